"""What decode steps may read: from a budget of pairs and the lengths of prompts to sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvtool.cache.key_basis import read_basis
from kvtool.cache.slots import SlotLayer
from kvtool.documents.plan import PlanDocument
from kvtool.errors import UsageError
from kvtool.planning.rocketkv import RocketKVPlan, plan_rocketkv
from kvtool.policies.policy import Policy
from kvtool.policies.read.reader import Read, StepBudget
from kvtool.sizes import Budget, fraction_of


@dataclass
class ReadBudgets:
    """The sizes of readers, fixed for each row when its prompt ends.

    Attributes:
        budget: pairs of key and value that a step reads of every layer and KV head, or a share of
            the prompt, or bytes of all layers and rows; None: the reader has its own `k`.
        tokens: a budget of bytes as pairs of a layer.
        ends: tokens that each row had seen when its prompt ended; one number if all are alike.
        reserve: tokens that will be generated, as far as is known.
    """

    policy: Policy
    budget: Budget | None
    plan: PlanDocument | None
    tokens: Callable[[SlotLayer], int]
    ends: list[int] = field(default_factory=list)
    reserve: int = 0
    _bases: Tensor | None = None

    def __post_init__(self) -> None:
        if self.policy.reader.basis is not None:
            self._bases = read_basis(self.policy.reader.basis)

    def end(self, row: int) -> int:
        """Tokens that a row had seen when its prompt ended."""
        return self.ends[0] if len(self.ends) == 1 else self.ends[row]

    def end_prompt(self, lengths: list[int]) -> None:
        """Note the lengths of the rows' prompts."""
        self.ends = lengths if len(set(lengths)) > 1 else lengths[:1]

    def choose_rows(self, choose: Callable[[Tensor], Tensor]) -> None:
        """Let what is known of each row follow the rows."""
        if len(self.ends) > 1:
            self.ends = choose(torch.tensor(self.ends)).tolist()

    def pairs(self, layer: SlotLayer, length: int) -> int:
        """What a step may read of a row, its prompt being so long."""
        if not self.policy.reads_budget:
            return self.policy.reader.k * self.policy.reader.share
        budget = self.budget
        if self.plan is not None and self.plan.rocketkv is not None and budget.ratio is None:
            return self.plan.rocketkv.token_budget
        if budget.ratio is not None:
            return fraction_of(budget.ratio, length)
        return self.tokens(layer)

    def stored(self, layer: SlotLayer, length: int) -> int:
        """What stage 1 of RocketKV leaves of a prompt.

        Raises:
            UsageError: a budget too small for its plan.
        """
        pairs = self.pairs(layer, length)
        plan = self._stages(pairs, length, head_dim=1, window=self.policy.score.window)
        return length if length <= pairs else min(length, plan.prompt_tokens)

    def reader(self, layer: SlotLayer, row: int, stored: int) -> tuple[Read, int]:
        """The reader of a row with all its sizes, and the pairs that a step may read of it.

        Args:
            stored: tokens that the row held when its prompt ended.
        """
        policy, head_dim = self.policy, layer.keys.shape[-1]
        length = self.end(row) if policy.reads_budget else stored
        pairs = self.pairs(layer, length)
        stages = None
        if policy.reader.planned:
            stages = self._stages(pairs, length, head_dim, window=0, strict=True)
        step = StepBudget(pairs, stored, head_dim, stages)
        return policy.reader.sized(step), pairs

    def basis(self, layer: SlotLayer) -> Tensor | None:
        """The key basis of a layer, (kv_heads, head_dim, head_dim), from the reader's file.

        Raises:
            UsageError: the file is of another model.
        """
        if self._bases is None:
            return None
        shape = (layer.keys.shape[1], layer.keys.shape[-1], layer.keys.shape[-1])
        fits = layer.index < len(self._bases) and self._bases.shape[1:] == shape
        if not fits or not self._bases[layer.index].isfinite().all():
            raise UsageError(
                f"`{self.policy.reader.basis}` holds no key basis for layer {layer.index} "
                f"with {shape[0]} KV heads of {shape[1]} channels"
            )
        return self._bases[layer.index].to(layer.device)

    def _stages(
        self, pairs: int, length: int, head_dim: int, window: int, strict: bool = False
    ) -> RocketKVPlan:
        """RocketKV's plan for a prompt; readers that keep everything have no stage 1.

        Args:
            strict: also for a prompt that fits: what is generated may exceed the budget.
        """
        reserve = self.reserve
        if self.plan is not None and reserve == 0:
            reserve = self.plan.target.max_new_tokens
        return plan_rocketkv(
            length + reserve,
            pairs,
            head_dim,
            max_new_tokens=reserve,
            window=window,
            split=self.policy.score.split if self.policy.score.reads else 0.0,
            strict=strict and pairs >= self.policy.reader.least,
        )
