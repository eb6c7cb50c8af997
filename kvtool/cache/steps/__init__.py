"""The step that every layer runs on a block or a decoded token."""
