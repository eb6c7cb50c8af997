"""Where kvtool meets other engines and servers."""
