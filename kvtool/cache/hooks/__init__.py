"""The only files that touch a model: its attention, its forwards, and what is asked of it."""
