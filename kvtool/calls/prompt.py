"""The prompt of `generate` and `compress`: where it comes from, and its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtool.calls.settings import PromptSettings
from kvtool.documents.files import check_prompt, read_prompt
from kvtool.errors import UsageError
from kvtool.models.load import Loaded
from kvtool.models.notes import length_note
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig

    from kvtool.cache.cache import KVCache


def check_stdin(settings: PromptSettings) -> None:
    """Refuse to read stdin for two things."""
    files = {"the recipe": settings.recipe, "--prompt-file": settings.prompt_file}
    files["--turns"] = getattr(settings, "turns", None)
    files["--prompts"] = getattr(settings, "prompts", None)
    readers = [name for name, path in files.items() if path == "-"]
    if len(readers) > 1:
        raise UsageError(f"{' and '.join(readers)} both read stdin; name a file for one of them")


def typed_prompt(settings: PromptSettings) -> tuple[str | None, str]:
    """Return the prompt given, if one is, and where it came from."""
    if settings.prompt is not None and settings.prompt_file is not None:
        raise UsageError("--prompt and --prompt-file exclude each other; keep one")
    if settings.prompt_file is not None:
        name = "stdin" if settings.prompt_file == "-" else settings.prompt_file
        return read_prompt(settings.prompt_file), name
    if settings.prompt is not None:
        return check_prompt(settings.prompt, "--prompt"), "--prompt"
    return None, "none"


def encode(loaded: Loaded, text: str, *, first: bool, source: str) -> Tensor:
    """Return the (1, n) token ids of a prompt; special tokens come with a first prompt only."""
    import torch

    from kvtool.models.chat import continued_ids

    tokenizer = loaded.tokenizer
    ids = tokenizer(text)["input_ids"] if first else continued_ids(tokenizer, text)
    if not ids:
        raise UsageError(f"the prompt from {source} is empty for this tokenizer")
    return torch.tensor([ids], device=loaded.model.device)


def note_text(
    cache: KVCache, config: PreTrainedConfig, tokens: int, new_tokens: int, watcher: Watcher
) -> bool:
    """Say where a further text is going to leave the positions that the model was trained for.

    Args:
        cache: what is there already; one that numbers tokens by their place in it runs out of
            positions in a long block only.
        tokens: of the further text before an answer.
        new_tokens: of the longest answer.

    Returns:
        Whether it may leave them.
    """
    if not cache.renumbers:
        told = length_note(config, max(cache.tokens_seen()) + tokens, new_tokens)
    else:
        block, first = min(tokens, cache.block or tokens), cache.first_layer
        kept = first.slots.kept if first.is_initialized else 0
        told = length_note(config, kept + block, 0)
    watcher.note_any(told)
    return told is not None
