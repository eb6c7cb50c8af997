"""Benchmarks: one, or one family of them, a file."""
