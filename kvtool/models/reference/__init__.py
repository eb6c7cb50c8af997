"""The bundled reference model: a tiny Llama that answers questions about planted facts."""

from pathlib import Path


def path() -> Path:
    """Return the folder `AutoModelForCausalLM` and `AutoTokenizer` load the model from."""
    return Path(__file__).parent / "checkpoint"
