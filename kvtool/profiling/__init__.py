"""Measurements of how a model uses its cache."""
