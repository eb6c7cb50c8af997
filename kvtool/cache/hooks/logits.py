"""A model's own logits, for policies that go by them.

Before the model's forward the cache makes room for the new tokens, and all logits are asked for;
after it these are shown to the cache, and those that the caller had asked for are handed on.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvtool.cache.cache import KVCache
from kvtool.cache.steps.surprisal import Surprisals
from kvtool.errors import KvtoolError

_KEEP = "logits_to_keep"


def ask_logits(cache: KVCache, given: dict[str, Any]) -> tuple[tuple, dict] | None:
    """Prepare a cache for a forward, and ask the forward for the logits of all tokens.

    Returns:
        The forward's arguments; None: as they are given.
    """
    if given.get("input_ids") is None:
        raise KvtoolError(
            f"policy `{cache.policy.score.name}` goes by token ids, "
            "and this forward has embeddings only"
        )
    cache.expect_logits(given["input_ids"], given.get("attention_mask"))
    if _KEEP not in given:
        return None
    cache.running.ask_logits(given[_KEEP])
    return (), {**given, _KEEP: 0}


def answer_logits(cache: KVCache, surprisals: Surprisals, output: Any) -> None:
    """Show the logits to a cache, and leave those that the caller has asked for."""
    logits = getattr(output, "logits", None)
    if logits is None:
        raise KvtoolError(
            f"policy `{cache.policy.score.name}` goes by logits, and this forward returns none",
            hint="call the attached model itself, with return_dict=True",
        )
    surprisals.learn(logits)
    output.logits = _asked_for(logits, cache.running.answer_logits())


def _asked_for(logits: Tensor, asked: int | Tensor) -> Tensor:
    """The columns that transformers' `logits_to_keep` selects."""
    if isinstance(asked, int):
        return logits if asked == 0 else logits[:, -asked:]
    return logits[:, asked]
