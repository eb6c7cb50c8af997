"""Storage of a compressed cache, and the one step that every layer runs. Knows transformers' cache and attention interfaces."""
