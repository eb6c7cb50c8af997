"""Scores made from scores: one modifier a file."""
