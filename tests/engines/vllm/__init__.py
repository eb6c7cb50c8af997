"""Compressed caches for vLLM: exported files and the connector."""
