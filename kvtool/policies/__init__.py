"""The policy library: what to keep of a KV cache. Pure tensor mathematics, no model and no cache."""
