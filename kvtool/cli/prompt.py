"""The prompt of `generate` and `compress`: where it comes from, and its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtool.cli.terminal import Terminal
from kvtool.documents.prompts import check_prompt, read_prompt
from kvtool.errors import UsageError
from kvtool.models.load import Loaded

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig

    from kvtool.cache.cache import KVCache
    from kvtool.cli.prompt_options import PromptOptions

_HANDFUL = 16  # a budget below it is one of a handful of tokens


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
    if tokens < _HANDFUL:
        plural = "token is" if tokens == 1 else "tokens are"
        terminal.note(f"note: {tokens} {plural} a handful; what comes of so few makes little sense")


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
        return note_length(config, max(cache.tokens_seen()) + tokens, new_tokens, terminal)
    block = min(tokens, cache.block or tokens)
    return note_length(config, cache.first_layer.kept + block, 0, terminal)


def note_length(config: PreTrainedConfig, tokens: int, new_tokens: int, terminal: Terminal) -> bool:
    """Say where a text is going to be longer than any that the model was trained for.

    Args:
        tokens: of the text before an answer.
        new_tokens: of the longest answer.

    Returns:
        Whether it may be longer.
    """
    from kvtool.model_shape import trained_length

    limit = trained_length(config)
    if limit is None or tokens + new_tokens <= limit:
        return False
    answer = f" and up to {new_tokens} new ones" if new_tokens else ""
    terminal.note(
        f"note: {tokens} tokens{answer} are more than the {limit} that the model was trained for; "
        "what it says beyond them may be nonsense"
    )
    return True
