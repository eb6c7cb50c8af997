"""The cache as a whole: its layers, budgets and text, and the object that transformers holds."""
