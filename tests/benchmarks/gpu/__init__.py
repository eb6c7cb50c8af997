"""Everything about a GPU in one command: `python -m tests.benchmarks.gpu --help`."""
