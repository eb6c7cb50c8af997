"""Generate, compress and plan in one call: what the commands of those names are flags over."""
