"""A model under one policy and budget: how prompts are put to it, and what they cost."""
