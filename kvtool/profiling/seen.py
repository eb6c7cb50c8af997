"""The material of a measurement: an attention layer at work, its weights a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvtool.cache.steps.call import Call, PendingStep

_ROWS = 128  # queries whose weights are held at a time


@dataclass(frozen=True)
class Seen:
    """A step of one layer of a full cache, over one text: the whole prompt, or a decoded token.

    `row` is the text's place among those that are read together.
    """

    step: PendingStep
    call: Call
    out: Tensor
    row: int = 0

    @property
    def layer(self) -> int:
        """Index of the layer."""
        return self.step.layer.index

    @property
    def decoding(self) -> bool:
        """Whether this is a decoded token."""
        return self.step.decoding

    @property
    def slides(self) -> bool:
        """Whether the layer has a sliding window, so that it forgets by itself."""
        return self.step.layer.window is not None

    @property
    def query(self) -> Tensor:
        """(heads, q_len, head_dim), after RoPE."""
        return self.call.query[self.row]

    @property
    def key(self) -> Tensor:
        """(kv_heads, kv_len, head_dim), after RoPE."""
        return self.call.key[self.row]

    @property
    def lse(self) -> Tensor | None:
        """(heads, q_len) float32 log-sum-exp of the rows; None: the kernel has not returned it."""
        norms = self.call.context.norms
        return norms[0][self.row] if norms else None

    def weights(self, start: int, stop: int, heads: slice = slice(None)) -> tuple[Tensor, int]:
        """Compute the weights of a few queries: `row_weights` of these KV heads.

        Args:
            start, stop: among the new tokens.
        """
        call, kv_heads = self.call, self.key.shape[0]
        kept = self.key.shape[1] - self.query.shape[1]
        sinks = None if call.sinks is None else call.sinks.view(kv_heads, -1)[heads]
        return row_weights(
            self.query[:, start:stop].unflatten(0, (kv_heads, -1))[heads],
            self.key[heads, : kept + stop],
            scale=call.scale,
            window=self.step.layer.window,
            chunks_from=self._first_position if self.step.layer.chunked else None,
            softcap=call.softcap,
            sinks=sinks,
        )

    @property
    def _first_position(self) -> int:
        """Position of the first key, in a layer that keeps what came last."""
        return self.step.layer.seen - self.key.shape[1]

    def group_rows(self) -> Iterator[tuple[int, Tensor]]:
        """Average the weights of the query heads that share a KV head, a few rows at a time.

        Yields:
            The position of the first row, and (kv_heads, rows, position of the last row + 1).
        """
        count = self.query.shape[1]
        kept = self.key.shape[1] - count
        for start in range(0, count, _ROWS):
            weights, _ = self.weights(start, min(start + _ROWS, count))
            yield kept + start, weights.mean(1)


class Study(Protocol):
    """A measurement over one text, which sees every step of every layer."""

    def see(self, seen: Seen) -> None:
        """Take note of a step."""

    def results(self) -> dict[str, dict[int, Tensor]]:
        """Return numbers by name and layer, heads first; layers it cannot judge are left out."""


def row_weights(
    query: Tensor,
    key: Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunks_from: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, int]:
    """Compute the attention weights of the last queries over all keys before them, in float32.

    As `attention_weights`, but only the triangles at both ends of the rows are masked, which takes
    two thirds of the time.

    Args:
        query: (kv_heads, group, rows, head_dim), those of the last `rows` keys.
        key: (kv_heads, kv_len, head_dim).
        window: width of a sliding window, the query itself included.
        chunks_from: position of the first key, where windows are side by side in place of sliding.
        softcap, sinks: as for `attention_weights`, the sinks as (kv_heads, group).

    Returns:
        (kv_heads, group, rows, kv_len - low), and `low`, the first key that any row sees.
    """
    kv_heads, group, rows, head_dim = query.shape
    first = key.shape[1] - rows
    low = 0 if window is None else max(0, first - window + 1)
    flat = query.reshape(kv_heads, group * rows, head_dim)
    nothing = flat.new_empty(1, 1, 1)  # the scale goes into the product, which saves a pass
    logits = torch.baddbmm(nothing, flat, key[:, low:].transpose(1, 2), beta=0, alpha=scale)
    logits = logits.float().view(kv_heads, group, rows, -1)
    if softcap is not None:
        logits = torch.tanh_(logits.div_(softcap)).mul_(softcap)
    square = torch.ones(rows, rows, dtype=torch.bool, device=key.device)
    logits[..., first - low :].masked_fill_(square.triu(1), float("-inf"))
    if window is not None:
        beyond = torch.ones(rows, logits.shape[-1], dtype=torch.bool, device=key.device)
        logits.masked_fill_(beyond.tril(first - window - low), float("-inf"))
    if window is not None and chunks_from is not None:
        place = chunks_from + torch.arange(low, key.shape[1], device=key.device)
        own = place[first - low :, None]
        logits.masked_fill_(place < own - own % window, float("-inf"))
    if sinks is None:
        return logits.softmax(-1), low
    column = sinks.float()[:, :, None, None].expand(-1, -1, rows, 1)
    return torch.cat([logits, column], -1).softmax(-1)[..., :-1], low
