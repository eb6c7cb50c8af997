"""Refuse tokens and positions that a model has no embeddings for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from transformers import PreTrainedModel

from kvtool.errors import UsageError

_LEARNED = (
    *("wpe", "embed_positions", "embed_position", "positions_embed"),
    *("position_embeddings", "position_embedding"),
)
"""Names that families give to embeddings of positions (GPT-2, OPT, GPT, BioGPT)."""


def check_tokens(model: PreTrainedModel, input_ids: Tensor) -> None:
    """Refuse ids beyond the model's embeddings, which fail inside of torch.

    Raises:
        UsageError: it names the first such id.
    """
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if rows is None or input_ids.is_meta or input_ids.numel() == 0:
        return
    wrong = (input_ids < 0) | (input_ids >= rows)
    if bool(wrong.any()):
        raise UsageError(
            f"the text has token {int(input_ids[wrong][0])}, and the model has embeddings for "
            f"{rows} tokens only: this tokenizer is not the model's",
            hint="use the tokenizer that came with the model, or resize_token_embeddings",
        )


def check_positions(model: PreTrainedModel, lengths: Sequence[int], new_tokens: int) -> None:
    """Refuse a text that goes beyond the positions that a model has learned.

    Args:
        lengths: tokens of each row, with those of earlier turns.
        new_tokens: that will be generated after them; the last one is not fed.

    Raises:
        UsageError: it says how many tokens fit.
    """
    limit = learned_positions(model)
    tokens = max(lengths, default=0)
    if limit is None or tokens + max(new_tokens - 1, 0) <= limit:
        return
    more = f" and {new_tokens} new ones" if new_tokens else ""
    raise UsageError(
        f"{tokens} tokens{more} are more than the {limit} positions that this model has learned",
        hint=f"--max-new-tokens {limit - tokens + 1}" if tokens <= limit else "a shorter text",
    )


def learned_positions(model: PreTrainedModel) -> int | None:
    """Count the positions that a model has embeddings for; None: it needs none."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _LEARNED:
            return module.num_embeddings - int(getattr(module, "offset", 0))
    return None
