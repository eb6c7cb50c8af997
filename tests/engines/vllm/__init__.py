"""Compressed caches behind vLLM; `python -m tests.engines.vllm` measures the real engine."""
