"""Compressed caches behind the real vLLM: right answers, bytes and seconds."""
