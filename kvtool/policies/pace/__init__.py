"""How many tokens are decoded between two cuts."""
