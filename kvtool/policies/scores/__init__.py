"""Scores of tokens: one a file."""
