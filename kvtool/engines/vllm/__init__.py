"""Serve compressed caches from vLLM: export them, load them in the engine, ask about them."""

from kvtool.engines.vllm.client import prompt

__all__ = ["prompt"]
