"""The bundled reference model: a tiny Llama that answers questions about planted facts."""

from pathlib import Path

from kvtool.package_data import data_file


def path() -> Path:
    """Return the folder `AutoModelForCausalLM` and `AutoTokenizer` load the model from."""
    return data_file("models/reference/checkpoint")
