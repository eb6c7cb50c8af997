"""Pure tensor functions: attention over slots and selection. Nothing here knows a policy or a model."""
