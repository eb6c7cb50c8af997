"""The kept text: every token of a prompt, shaded by how many layers and heads still hold it."""
