"""Loki: attention is estimated from the principal components of the keys.

Singhania et al., 2024, https://arxiv.org/abs/2406.02542. Keys vary in few directions. With an
orthonormal basis E of their principal components, the first d channels of q E and K E rank tokens
nearly as q K does.

Differences from the authors' code: the rotated channels are kept beside the keys (they rotate the
stored keys, which saves d / 2D of the cache and would make its files depend on the basis). A group
of query heads chooses together by the mean of softmaxed estimates, and prompts are read in full.
Without a file of bases (`kvtool profile --metrics key_basis`), the basis is that of the stored keys
at the end of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from kvtool.lazy_torch import Tensor, torch
from kvtool.maths.estimates import moments, principal_components, put_column
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
class Loki(RowsRead):
    """Read the tokens of highest attention as the keys' principal components estimate it.

    Args:
        d: components to estimate with; None: head_dim x budget / prompt, rounded.
        k: tokens to attend to; None: half the budget.
        basis: a safetensors file of bases that `kvtool profile` wrote; None: the prompt's own.
        scope: `group` chooses for all query heads that share a KV head, `query_head` for each.
        skip_layers: number of first layers that read all that they store.
    """

    d: int | None = computed("head_dim*budget/prompt", "1 or more")
    k: int | None = computed("budget/2", "1 or more")
    basis: str | None = computed("that of the prompt")
    scope: Literal["group", "query_head"] = "group"
    skip_layers: int = limited(0, "0 or more")

    name: ClassVar = "loki"
    paper: ClassVar = "https://arxiv.org/abs/2406.02542"

    def sized(self, step: StepBudget) -> Loki:
        d = self.d or max(1, round(step.head_dim * step.pairs / step.tokens))
        k = self.k or step.pairs // self.divisor
        return replace(self, d=min(d, step.head_dim), k=k)

    def start(self, stored: Stored) -> State:
        keys, basis = stored.keys, stored.basis
        if basis is None:
            basis = principal_components(moments(keys[:, :, : stored.prompt]))[1]
        leading = basis.to(keys)[..., : self.d].expand(*keys.shape[:2], -1, -1)
        rotated = torch.matmul(leading.transpose(2, 3), keys.transpose(2, 3))
        return {"basis": leading.contiguous(), "components": rotated.contiguous()}

    def columns(self, tokens: int) -> Mapping[str, int]:
        return {"components": tokens}

    def append(self, tables: State, key: Tensor, value: Tensor, at: int) -> None:
        tables["components"][..., at] = torch.matmul(key[:, :, None], tables["basis"])[:, :, 0]

    def counted_step(self, layer: HeadSizes, tokens: int) -> int:
        lists = layer.kv_heads if self.scope == "group" else layer.heads
        read = min(fixed(self.k), tokens) * (layer.key_dim + layer.value_dim)
        return (layer.kv_heads * fixed(self.d) * tokens + lists * read) * layer.itemsize

    def choose(self, view: ReadView) -> Choice:
        part = torch.matmul(view.query, view.tables["basis"])
        components = view.tables["components"][..., : view.tokens]
        logits = torch.matmul(part, components).float() * view.scale
        scores = logits if self.scope == "query_head" else logits.softmax(-1).mean(2)
        slots = top_slots(scores, min(fixed(self.k), view.tokens))
        return Choice(slots, estimate=components.shape[2] * view.tokens)

    def append_rows(
        self, tables: State, key: Tensor, value: Tensor, tokens: PerRow, sizes: Mapping[str, PerRow]
    ) -> None:
        new = torch.matmul(key[:, :, None], tables["basis"])[:, :, 0]
        put_column(tables["components"], new, last_of(tokens))

    def choose_rows(self, view: RowsView) -> RowsChoice:
        tokens = view.counts
        part = torch.matmul(view.query, view.tables["basis"])  # 0 beyond a sequence's own d
        components = view.tables["components"][..., : tokens.most]
        logits = torch.matmul(part, components).float() * view.scale
        logits = fill_beyond(logits, tokens, -torch.inf)
        scores = logits if self.scope == "query_head" else logits.softmax(-1).mean(2)
        k = tokens.once("k", lambda: tokens.least(view.sizes["k"]))
        read = [d * count for d, count in zip(view.sizes["d"].known, tokens.known, strict=True)]
        return RowsChoice(best_slots(scores, k), k, read)
