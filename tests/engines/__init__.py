"""Engines and servers that kvtool meets."""
