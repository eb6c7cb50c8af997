"""Paces: how many tokens are decoded between two cuts."""
