"""What kvtool reads and writes: prompts, result documents, files that are never half written."""
