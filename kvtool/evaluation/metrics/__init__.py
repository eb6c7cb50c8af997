"""How an answer is scored: text in, numbers out."""
