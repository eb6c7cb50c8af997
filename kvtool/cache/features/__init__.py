"""What features keep beside the slots, and what they do while a model reads and writes."""
