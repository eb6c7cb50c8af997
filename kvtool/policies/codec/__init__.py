"""How keys and values are written down in slots: fewer bits, one format a file."""
