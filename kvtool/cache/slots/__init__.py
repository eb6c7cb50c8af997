"""What a layer of the cache holds: slots, counts, and one part for each feature beside them."""
