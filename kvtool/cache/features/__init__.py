"""Features of a cache: numbers beside the slots, and work while a model reads and writes."""
