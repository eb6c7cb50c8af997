"""Contents of a layer of the cache: slots, counts, and one part for each feature beside them."""
