"""Speed and memory against transformers' DynamicCache, in one process. Not collected by pytest; see `speed.py`."""
