"""Notes for the user about a model, a budget or a text, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtool.model_shape import trained_length
from kvtool.models.folder import REFERENCE, Source, find_source
from kvtool.models.smollm2 import TITLE, is_smollm2, unpacked

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_HANDFUL = 16  # a budget below it is one of a handful of tokens


def model_note(model: str | None) -> str | None:
    """Say that the user named no model, that the hub is asked, or that the file is unpacked."""
    if model is None:
        return f"model: {REFERENCE} (bundled; choose another with --model)"
    source = find_source(model)
    if is_smollm2(model):
        return _smollm2_note(source)
    if not source.is_here:
        what = "folder" if source.gguf is None else "file"
        return f"model: {model} (no such {what} here, asking the hub)"
    if source.gguf is not None:
        return f"model: {model} (GGUF, unpacked at every start; once: kvtool convert {model} DIR)"
    return None


def _smollm2_note(source: Source) -> str:
    """Say what the packaged model is, and where it is or will be."""
    if source.gguf is None:
        return f"model: {source.name} ({TITLE}, in {source.place})"
    return f"model: {source.name} ({TITLE}; unpacking it once into {unpacked()}, 20 seconds)"


def handful_note(tokens: int) -> str | None:
    """Say of a budget of a handful of tokens that little can come of it."""
    if tokens >= _HANDFUL:
        return None
    plural = "token is" if tokens == 1 else "tokens are"
    return f"note: {tokens} {plural} a handful; what comes of so few makes little sense"


def length_note(config: PreTrainedConfig, tokens: int, new_tokens: int) -> str | None:
    """Say where a text is going to be longer than any that the model was trained for.

    Args:
        tokens: of the text before an answer.
        new_tokens: of the longest answer.
    """
    limit = trained_length(config)
    if limit is None or tokens + new_tokens <= limit:
        return None
    answer = f" and up to {new_tokens} new ones" if new_tokens else ""
    return (
        f"note: {tokens} tokens{answer} are more than the {limit} that the model was trained for; "
        "what it says beyond them may be nonsense"
    )
