"""Ways to split a budget over layers and heads, one a file."""
