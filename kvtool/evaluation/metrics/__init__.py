"""Scores of answers: text in, numbers out."""
