"""PyramidInfer, for the cache alone: each layer keeps part of what the layer above it keeps.

Yang et al., 2024, https://arxiv.org/abs/2405.12532, section 3.3. Once a layer has attended to a
prompt, the last int(0.2 n) queries vote: the mean of their attention over all heads, the newest
query weighing 1.2 times as much as the oldest. Here n is what the first layer keeps: the whole
prompt, or where the budget is too small for that the shorter one whose schedule spends it. Kept are
the first 4 tokens, the newest int(0.2 n) + 1 and the best voted of those that the layer above kept.
Prompts that come at once only: a prompt fed in chunks is cut after each, by the queries of that
chunk.

Of the others, its context, layer l + 1 keeps int(p_l context_l), and not fewer than 64, with
p_l = (1 - d)(cos(pi l / layers) + 1) / 2 + d. The authors fix d = 0.9 and store what comes of it.
Here the budget is given, as the mean over the layers, and d is what spends it. As the first layer
keeps the whole prompt and p_0 is 1, even d = 0 needs about half of the prompt. Below, the schedule
at d = 0 is that of a prompt short enough, whose length is what the first layer keeps. Where the
rule would leave fewer than 64, the authors leave the context as it was, and here it falls to 64.

Differences from the paper: tokens that a layer drops are still computed in the layers below, so
memory shrinks and the work of the prompt does not. The authors' method cannot be had from a cache
alone. Generated tokens are appended; the authors also thin these out, 16 at a time. A further turn
is cut in the same way, among what each layer still holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvtool.lazy_torch import Tensor, torch
from kvtool.maths.allocation import Allocation
from kvtool.policies.allocate.problem import AllocationProblem
from kvtool.policies.evidence import asked
from kvtool.policies.parts import Allocator, AttentionRows, Count, Evidence, Score, SlotView, State
from kvtool.policies.spelling import limited

_NEWEST = 1.2  # weight of the newest vote; that of the oldest is 1
_HALVINGS = 60  # of the decay's bracket


def kept_tokens(
    n: int, layers: int, decay: float, *, recent_ratio: float = 0.2, min_context: int = 64
) -> list[int]:
    """Count what each layer keeps of a prompt of `n` tokens; never more than the layer above.

    >>> kept_tokens(1000, 8, 0.9)
    [1000, 1000, 996, 984, 959, 921, 871, 813]

    Args:
        decay: d, 0 to 1; 1 keeps everything.
        recent_ratio: share of the prompt that is recent.
        min_context: tokens beside the recent ones that the schedule leaves in any case.
    """
    recent = int(recent_ratio * n) + 1
    context = n - recent
    kept = []
    for layer in range(layers):
        kept.append(context + recent)
        share = 1 - (1 - decay) * (1 - math.cos(math.pi * layer / layers)) / 2
        context = max(int(context * share), min(context, min_context))
    return kept


@dataclass(frozen=True)
class Cosine(Allocator):
    """A falling share of the prompt from layer to layer, of a given mean (PyramidInfer)."""

    recent_ratio: float
    min_context: int

    name: ClassVar = "pyramidinfer"
    paper: ClassVar = "https://arxiv.org/abs/2405.12532"

    def split(self, problem: AllocationProblem) -> Allocation:
        line = self._kept(problem, max(problem.max_budgets), 0.0)
        if sum(line) <= problem.total:
            line = self._by_decay(problem, max(problem.max_budgets))
        else:
            line = self._by_length(problem, max(problem.max_budgets))
        return problem.by_weight([math.log(tokens) for tokens in line])

    def _kept(self, problem: AllocationProblem, n: int, decay: float) -> list[int]:
        return kept_tokens(
            n, problem.layers, decay, recent_ratio=self.recent_ratio, min_context=self.min_context
        )

    def _by_decay(self, problem: AllocationProblem, n: int) -> list[int]:
        """Find the schedule of the largest decay that the total can pay for."""
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if sum(self._kept(problem, n, middle)) <= problem.total:
                low = middle
            else:
                high = middle
        return self._kept(problem, n, low)

    def _by_length(self, problem: AllocationProblem, n: int) -> list[int]:
        """Find the steepest schedule, of the longest prompt that the total can pay for."""
        low, high = 1, n
        while high - low > 1:
            middle = (low + high) // 2
            if sum(self._kept(problem, middle, 0.0)) <= problem.total:
                low = middle
            else:
                high = middle
        return self._kept(problem, low, 0.0)


@dataclass(frozen=True)
class PyramidInfer(Score):
    """Keep fewer tokens layer by layer, by recent queries; the budget is the mean over layers.

    Args:
        recent_ratio: so large a share of what the first layer keeps votes, the last queries of the
            prompt; these tokens and one more are kept in every layer.
        min_context: tokens beside the recent ones that the schedule leaves in any case.
        sinks: first tokens that are always kept.
    """

    recent_ratio: float = limited(0.2, "above 0 and below 1")
    min_context: int = limited(64, "0 or more")
    sinks: int = limited(4, "0 or more")

    name: ClassVar = "pyramidinfer"
    paper: ClassVar = "https://arxiv.org/abs/2405.12532"
    evidence: ClassVar = Evidence.LAST_ROWS
    when: ClassVar = "prompt"
    layer_tokens: ClassVar = "nested"

    @property
    def allocator(self) -> Cosine:
        return Cosine(self.recent_ratio, self.min_context)

    def voters(self, first_layer_budget: int) -> int:
        return max(int(self.recent_ratio * first_layer_budget), 1)

    def vote_weights(self, rows: int, first_layer_budget: Count) -> Tensor:
        first_layer_budget = torch.as_tensor(first_layer_budget).view(-1, 1)
        voters = (self.recent_ratio * first_layer_budget.double()).long().clamp(min=1)
        age = torch.arange(rows - 1, -1, -1, device=first_layer_budget.device)
        weight = _NEWEST - (_NEWEST - 1) * age / (voters - 1).clamp(min=1)
        weight = torch.where(voters == 1, torch.ones_like(weight), weight)
        return torch.where(age < voters, weight / voters, 0.0).float()

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        votes = view.heads.mean(asked(rows).weights[..., 0, :].mean(2)).unsqueeze(1)
        kept = None if view.above is None else view.above.kept
        return votes if kept is None else votes.masked_fill(~kept, -1.0)

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor:
        budget = view.budget if view.above is None else view.above.budget
        first_layer_budget = torch.as_tensor(budget).double()
        recent = (self.recent_ratio * first_layer_budget).long() + 1
        return view.sinks(self.sinks) | view.recent(recent.to(view.positions.device))

    def reserved(self, budget: int) -> Mapping[str, int]:
        return {"sinks": self.sinks, "recent": int(self.recent_ratio * budget) + 1}
