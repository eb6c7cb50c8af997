"""Exact top-k: the tokens of highest attention, known by computing all of it.

The oracle that Quest, SparQ and RocketKV (https://arxiv.org/abs/2502.14051, section 4) are
compared with. Choosing reads every key, and is counted as free.

By default every query head chooses for itself, as RocketKV's authors run it, so that a group of G
heads reads up to G times the budget. All other readers choose once for a group; `scope=group` does
that here, by the mean probability.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from kvtool.lazy_torch import Tensor
from kvtool.maths.selection import top_slots
from kvtool.policies.numbers import HeadSizes
from kvtool.policies.read.rows import RowsChoice, RowsRead, RowsView, best_slots
from kvtool.policies.read.view import Choice, ReadView, StepBudget, fixed
from kvtool.policies.spelling import computed, limited


@dataclass(frozen=True)
class ExactTopK(RowsRead):
    """Read the tokens of highest attention, found by computing all of it: the oracle.

    Args:
        scope: `query_head` chooses for every query head, `group` for all that share a KV head.
        k: tokens to attend to; None: the budget.
        skip_layers: number of first layers that read all that they store.
    """

    scope: Literal["query_head", "group"] = "query_head"
    k: int | None = computed("budget", "1 or more")
    skip_layers: int = limited(0, "0 or more")

    name: ClassVar = "exact-topk"
    paper: ClassVar = "https://arxiv.org/abs/2502.14051"
    divisor: ClassVar = 1

    def sized(self, step: StepBudget) -> "ExactTopK":
        return replace(self, k=self.k or step.pairs)

    def counted_step(self, layer: HeadSizes, tokens: int) -> int:
        lists = layer.kv_heads if self.scope == "group" else layer.heads
        read = min(fixed(self.k), tokens) * (layer.key_dim + layer.value_dim)
        return lists * read * layer.itemsize

    def choose(self, view: ReadView) -> Choice:
        scores = self._scores(view, view.keys)
        return Choice(top_slots(scores, min(fixed(self.k), view.tokens)))

    def choose_rows(self, view: RowsView) -> RowsChoice:
        tokens = view.counts
        visible = tokens.once("there", lambda: ~tokens.beyond(tokens.most)[:, :, None, None])
        scores = self._scores(view, view.keys[:, :, : tokens.most], visible)
        k = tokens.once("k", lambda: tokens.least(view.sizes["k"]))
        return RowsChoice(best_slots(scores, k), k, [0] * len(k.known))

    def _scores(self, view: ReadView, keys: "Tensor", visible: "Tensor | None" = None) -> "Tensor":
        """Compute the weights by which a query head, or a group, chooses."""
        from kvtool.maths.attention import attention_weights

        weights = attention_weights(
            view.query[:, :, :, None],
            keys,
            scale=view.scale,
            visible=visible,
            softcap=view.softcap,
            sinks=view.sinks,
        )[:, :, :, 0]
        return weights if self.scope == "query_head" else weights.mean(2)
