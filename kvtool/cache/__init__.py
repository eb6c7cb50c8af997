"""Storage of a compressed cache, and the one step that every layer runs.

The only subpackages that know transformers' cache and attention interfaces.
"""
