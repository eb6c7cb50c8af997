"""Budgets before a run: tokens per layer, from a model's shape and a profile, without weights."""
