"""Everything about a GPU in one command: `python -m recipes.benchmarks.gpu --help`."""
