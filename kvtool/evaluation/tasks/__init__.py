"""One benchmark, or one family of benchmarks, a file."""
