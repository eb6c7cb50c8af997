"""The prompt of `generate` and `compress`: where it comes from, and its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtool.cli.terminal import Terminal
from kvtool.documents.prompts import check_prompt, read_prompt
from kvtool.errors import UsageError
from kvtool.models.load import Loaded
from kvtool.models.notes import handful_note, length_note

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig

    from kvtool.cache.cache import KVCache
    from kvtool.cli.prompt_options import PromptOptions


def check_stdin(options: PromptOptions) -> None:
    """Refuse to read stdin for two things."""
    files = {"the recipe": options.recipe, "--prompt-file": options.prompt_file}
    files["--turns"] = getattr(options, "turns", None)
    readers = [name for name, path in files.items() if path == "-"]
    if len(readers) > 1:
        raise UsageError(f"{' and '.join(readers)} both read stdin; name a file for one of them")


def typed_prompt(options: PromptOptions) -> tuple[str | None, str]:
    """Return the prompt given, if one is, and where it came from."""
    if options.prompt is not None and options.prompt_file is not None:
        raise UsageError("--prompt and --prompt-file exclude each other; keep one")
    if options.prompt_file is not None:
        name = "stdin" if options.prompt_file == "-" else options.prompt_file
        return read_prompt(options.prompt_file), name
    if options.prompt is not None:
        return check_prompt(options.prompt, "--prompt"), "--prompt"
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


def note_handful(tokens: int, terminal: Terminal) -> None:
    """Say of a budget of a handful of tokens that little can come of it."""
    terminal.note_any(handful_note(tokens))


def note_text(
    cache: KVCache, config: PreTrainedConfig, tokens: int, new_tokens: int, terminal: Terminal
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
    terminal.note_any(told)
    return told is not None
