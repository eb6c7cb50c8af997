"""SparQ: attention is estimated from the channels in which the query is large.

Ribar et al., 2024, https://arxiv.org/abs/2312.04985. The r channels of largest |q| give an estimate
of the attention weights. The k tokens of highest estimate are read, and the mean value of all
tokens replaces the rest, by the estimated share that it receives.

Where the sources differ: the estimates of a group of query heads are averaged after the softmax
(the authors' code for groups sums logits). With a token budget t and a prompt of S tokens,
r = D t / S rounded, at least 1, and k = t / 2. The estimate may then cost more than the other half.
A copy of the keys, channel by channel, makes the estimate read what it uses and no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from kvtool.errors import UsageError
from kvtool.kernels.tables import row_product
from kvtool.lazy_torch import Tensor, torch
from kvtool.maths.estimates import heaviest_channels, partial_scale, put_column, take_channels
from kvtool.maths.selection import top_slots
from kvtool.policies.numbers import HeadSizes, State
from kvtool.policies.read.rows import (
    PerRow,
    RowsChoice,
    RowsRead,
    RowsView,
    best_slots,
    fill_beyond,
    last_of,
)
from kvtool.policies.read.view import Choice, ReadView, StepBudget, Stored, fixed
from kvtool.policies.spelling import computed, limited


@dataclass(frozen=True)
class SparQ(RowsRead):
    """Read the tokens of highest attention as the largest channels of the query estimate it.

    Args:
        r: channels to estimate with; None: head_dim x budget / prompt, rounded.
        k: tokens to attend to; None: half the budget.
        local: newest tokens among them that are always read.
        reallocate: whether the mean value replaces the values of tokens that are not read.
        skip_layers: number of first layers that read all that they store.
    """

    r: int | None = computed("head_dim*budget/prompt", "1 or more")
    k: int | None = computed("budget/2", "1 or more")
    local: int = limited(0, "0 or more")
    reallocate: bool = True
    skip_layers: int = limited(0, "0 or more")

    name: ClassVar = "sparq"
    paper: ClassVar = "https://arxiv.org/abs/2312.04985"

    def __post_init__(self) -> None:
        if self.k is not None and self.local > self.k:
            raise UsageError(f"sparq: local {self.local} is above k {self.k}")

    def sized(self, step: StepBudget) -> SparQ:
        r = self.r or max(1, round(step.head_dim * step.pairs / step.tokens))
        k = self.k or step.pairs // self.divisor
        return replace(self, r=min(r, step.head_dim), k=k)

    def start(self, stored: Stored) -> State:
        channels = stored.keys.transpose(2, 3).contiguous()
        return {"channels": channels, "value_sum": stored.values.sum(2, dtype=torch.float32)}

    def columns(self, tokens: int) -> Mapping[str, int]:
        return {"channels": tokens}

    def append(self, tables: State, key: Tensor, value: Tensor, at: int) -> None:
        tables["channels"][..., at] = key
        tables["value_sum"].add_(value)

    def counted_step(self, layer: HeadSizes, tokens: int) -> int:
        estimate = fixed(self.r) * tokens + layer.value_dim * self.reallocate
        read = min(fixed(self.k), tokens) * (layer.key_dim + layer.value_dim)
        return layer.kv_heads * (estimate + read) * layer.itemsize

    def choose(self, view: ReadView) -> Choice:
        used = heaviest_channels(view.query, fixed(self.r))
        part = take_channels(view.query, used)
        logits = row_product(part, view.tables["channels"], used, view.tokens)
        weights = (logits * partial_scale(view.query, part, view.scale)).softmax(-1)
        past, k = view.tokens - self.local, min(fixed(self.k), view.tokens)
        slots = top_slots(weights.mean(2)[..., :past], k - self.local)
        if self.local:
            newest = torch.arange(past, view.tokens, device=slots.device)
            slots = torch.cat([slots, newest.expand(*slots.shape[:2], -1)], 2)
        read = used.shape[2] * view.tokens
        if not self.reallocate:
            return Choice(slots, read)
        total = view.tables["value_sum"]
        index = slots[:, :, None].expand(-1, -1, weights.shape[2], -1)
        share = weights.gather(3, index).sum(-1)
        return Choice(slots, read + total.shape[-1], share, total / view.tokens)

    def append_rows(
        self, tables: State, key: Tensor, value: Tensor, tokens: PerRow, sizes: Mapping[str, PerRow]
    ) -> None:
        put_column(tables["channels"], key, last_of(tokens))
        tables["value_sum"].add_(value)

    def choose_rows(self, view: RowsView) -> RowsChoice:
        tokens, r = view.counts, view.sizes["r"]
        used = heaviest_channels(view.query, r.most)
        part = fill_beyond(take_channels(view.query, used), r, 0)
        logits = row_product(part, view.tables["channels"], used, tokens.most)
        logits *= partial_scale(view.query, part, view.scale)
        logits = fill_beyond(logits, tokens, -torch.inf)
        weights = logits.softmax(-1)
        past, k, ranked = tokens.once("k", lambda: self._counts(tokens, view.sizes["k"]))
        scores = weights.mean(2)
        slots = best_slots(fill_beyond(scores, past, -torch.inf) if self.local else scores, ranked)
        if self.local:
            newest = tokens.once(
                "newest", lambda: past.tensor + torch.arange(self.local, device=slots.device)
            )
            slots = torch.cat([slots, newest.expand(*slots.shape[:2], -1)], 2)
        read = [channels * count for channels, count in zip(r.known, tokens.known, strict=True)]
        if not self.reallocate:
            return RowsChoice(slots, k, read)
        total = view.tables["value_sum"]
        there = slots if k.lowest >= slots.shape[2] else slots.clamp(min=0)
        share = weights.gather(3, there[:, :, None].expand(-1, -1, weights.shape[2], -1))
        if there is not slots:
            share = share * (slots >= 0)[:, :, None]
        read = [numbers + total.shape[-1] for numbers in read]
        return RowsChoice(slots, k, read, share.sum(-1), total / tokens.tensor)

    def _counts(self, tokens: PerRow, most: PerRow) -> tuple[PerRow, PerRow, PerRow]:
        """Count the tokens behind the newest, those that are read, and those chosen for that."""
        k = tokens.least(most)
        ranked = k.map(lambda n: max(n - self.local, 0), lambda n: (n - self.local).clamp(min=0))
        return tokens.plus(-self.local), k, ranked
