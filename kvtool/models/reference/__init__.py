"""The bundled models: a tiny Llama that recalls planted facts, and one that works in steps."""

from pathlib import Path

from kvtool.package_data import data_file

CHECKPOINTS = {"reference": "checkpoint", "reference-trace": "checkpoint-trace"}
"""The folder of each bundled model: the one that recalls facts, and the one that works in steps."""


def path(name: str = "reference") -> Path:
    """Return the folder `AutoModelForCausalLM` and `AutoTokenizer` load a bundled model from."""
    return data_file(f"models/reference/{CHECKPOINTS[name]}")
