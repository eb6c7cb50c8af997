"""Other engines and servers: an OpenAI server, and compressed caches for vLLM."""
