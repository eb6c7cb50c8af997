"""What matters: one score a file."""
