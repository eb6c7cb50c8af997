"""Runs that can be broken off and resumed: their folder, records and results."""
