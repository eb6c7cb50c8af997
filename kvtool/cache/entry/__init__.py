"""The ways to a cache: one that is built, or one for every call of `generate`."""
