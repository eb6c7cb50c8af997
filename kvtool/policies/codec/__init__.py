"""Codecs: formats of keys and values in slots that take fewer bits, one a file."""
