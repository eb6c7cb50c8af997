"""The policy library: what to keep of a KV cache. No model and no cache is known here."""
