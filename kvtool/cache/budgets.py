"""What each layer and row may keep: fixed when a prompt begins, or once all layers have seen it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvtool.cache.density import Density
from kvtool.cache.eviction import cut_stored
from kvtool.cache.read_budgets import ReadBudgets
from kvtool.cache.slots import SlotLayer
from kvtool.documents.plan import PlanDocument
from kvtool.errors import UsageError
from kvtool.model_shape import LayerShape, layer_shapes
from kvtool.planning.forecast import Text
from kvtool.planning.held import tokens_for_bytes
from kvtool.policies.allocate.planned import PlannedSplit
from kvtool.policies.allocate.split import AllocatedSplit, Split, Spread
from kvtool.policies.policy import Policy
from kvtool.sizes import Budget, fraction_of


@dataclass(frozen=True)
class ModelFacts:
    """What bytes follow from, read from a decoder's configuration once it is asked for."""

    config: PreTrainedConfig

    @cached_property
    def layers(self) -> list[LayerShape | None]:
        """What each layer stores, in all processes together."""
        return layer_shapes(self.config)


class Budgets:
    """The budget of a cache, in tokens of its layers and rows.

    Attributes:
        reserve: tokens that will be generated, as far as is known.
        spreads: how each row's attention was spread over the last prompt of which it had a part,
            for an allocator that looks at it.
        reads: what a reader may look at; None: no reader.
    """

    def __init__(
        self,
        layers: list[SlotLayer],
        policy: Policy,
        budget: Budget | None,
        plan: PlanDocument | None,
        facts: ModelFacts,
    ) -> None:
        self.policy, self.budget, self._layers, self.facts = policy, budget, layers, facts
        self.spreads: list[Spread] | None = None
        self.reserve = 0
        self._free = [layer for layer in layers if layer.window is None]
        self._split: Split | None = None
        self.reads: ReadBudgets | None = None
        if policy.reader is not None:
            self.reads = ReadBudgets(policy, budget, plan, self._tokens, self._reserved, self._free)
        self._plan, self._planned = plan, plan is not None and not policy.budget_is_traffic
        if self._planned:
            self._split = PlannedSplit(plan)
        elif policy.allocator is not None and self._free:
            self._split = AllocatedSplit(policy, len(self._free))
        self._known: dict[tuple, list[int]] = {}
        self._of_bytes: dict[tuple, int] = {}
        self._counted: tuple[int, list[int]] | None = None

    @property
    def wait(self) -> bool:
        """Whether nothing may be cut before all layers have seen the prompt."""
        if self._split is None or self._planned:
            return False
        return self.policy.allocator.metric is not None

    @property
    def held_back(self) -> bool:
        """Whether a prompt is stored whole and waits to be cut."""
        return bool(self._free) and self._free[-1].held_back

    def is_last(self, layer: SlotLayer) -> bool:
        """Whether a forward runs no other layer of free budget after this one."""
        return layer is self._free[-1]

    def reset(self) -> None:
        """Forget the text."""
        self.spreads = self._counted = None
        self._known, self.reserve = {}, 0
        if self.reads is not None:
            self.reads.ends = []

    def choose_rows(self, choose: Callable[[Tensor], Tensor]) -> None:
        """Let what is known of each row follow the rows.

        Args:
            choose: what happens to the rows, done to their numbers.
        """
        self._known = {}
        if self.reads is not None:
            self.reads.choose_rows(choose)
        if self.spreads is not None:
            rows = choose(torch.arange(len(self.spreads))).tolist()
            self.spreads = [self.spreads[row] for row in rows]

    def _reserved(self) -> int:
        """Tokens to come; what the plan counts on where nobody says."""
        if self._plan is not None and self.reserve == 0:
            return self._plan.target.max_new_tokens
        return self.reserve

    def check(self, lengths: list[int]) -> None:
        """Refuse a prompt of which a row or layer would keep no more than what always stays.

        Raises:
            UsageError: the first such row.
        """
        self._shares(lengths)
        if self.policy.two_stages and self.budget.bytes is None:
            for length in lengths:
                self.reads.stored(self._free[0], length)
        if self._planned and self.budget is not None:
            self._of_rows(self._free[0], lengths)

    def set(
        self,
        layer: SlotLayer,
        positions: Tensor | None,
        q_len: int,
        lengths: list[int] | None,
    ) -> None:
        """Fix what the rows of a layer may keep, before a block of a prompt is cut.

        Args:
            positions: (batch, q_len) of the block, -1 = padding; None: no padding.
            lengths: tokens that each row will have seen at the prompt's end; None: at the block's.
        """
        if layer.window is not None:
            layer.budget = layer.least = layer.most = layer.window - 1
            return
        if self.reads is not None:
            lengths = lengths or self._count(layer, positions, q_len)
            self.reads.end_prompt(lengths)
        if self.policy.budget_is_traffic:
            if self.policy.two_stages:
                rows = [self.reads.stored(layer, length) for length in lengths]
                self._set_rows(layer, rows, q_len)
            return
        if self.budget is None:
            return
        by_length = self._split is not None or self.budget.ratio is not None
        if not (by_length or self._needs_length):
            layer.budget = layer.least = layer.most = self._tokens(layer)
            return
        lengths = lengths or self._count(layer, positions, q_len)
        if not by_length:
            layer.budget = layer.least = layer.most = self._tokens(layer, max(lengths))
            return
        if self.wait:
            if not layer.held_back:
                layer.held_back, layer.density = True, Density()
            layer.budget = layer.least = layer.most = max(lengths)
            return
        self._set_rows(layer, self._of_rows(layer, lengths), q_len)

    def foresee(self, q_len: int, valid: Tensor | None, lengths: list[int] | None) -> None:
        """Fix what the rows may keep before a block is read, where something is stored already.

        Args:
            valid: (batch, q_len), False = padding; None: no padding.
            lengths: tokens that each row will have seen at the prompt's end; None: at the block's.
        """
        if not self._free or not self._free[0].is_initialized:
            return
        first = self._free[0]
        if lengths is None and (self._split is not None or self.budget.ratio is not None):
            before = first.lengths if first.ragged else first.seen
            new = q_len if valid is None else valid.sum(1)
            lengths = torch.as_tensor(before + new).expand(first.batch_size).tolist()
        for layer in self._free:
            self.set(layer, None, 0, lengths)

    def of_prompt(self, lengths: list[int]) -> list[int] | None:
        """Tokens that each row may keep, where layers have equal budgets.

        None for a budget in bytes before anything is stored.
        """
        first = self._free[0]
        if self.budget.bytes is not None and not first.is_initialized:
            return None
        return self._shares(lengths) or [self._tokens(first)] * len(lengths)

    def cut_held_back(self, lengths: list[int]) -> None:
        """Split the budget by what all layers have shown of a prompt, and cut them.

        Args:
            lengths: tokens that each row has seen.
        """
        device = self._free[0].device  # layers may be on several
        found = [
            layer.density.measure(layer.positions[:, :, : layer.used], layer.heads).to(device)
            for layer in self._free
        ]
        before, self._known = self.spreads, {}
        self.spreads = []
        for row, layers in enumerate(torch.stack(found, 1).tolist()):
            variance, queries, held = zip(*layers, strict=True)
            spread = Spread(variance, int(queries[0]), [int(slots) for slots in held])
            silent = spread.queries == 0 and before is not None  # a row of padding alone
            self.spreads.append(before[row] if silent else spread)
        for layer in self._free:
            layer.held_back, layer.density = False, None
            self._set_rows(layer, self._of_rows(layer, lengths), 0)
            cut_stored(layer)

    def _set_rows(self, layer: SlotLayer, rows: list[int], q_len: int) -> None:
        """Set the budget of every row, before or (`q_len` 0) after a block is stored."""
        layer.least, layer.most = min(rows), max(rows)
        layer.budget = layer.most
        if layer.least < layer.most:
            layer.budget = torch.tensor(rows, device=layer.device)[:, None, None]
            if not layer.ragged:  # no row is padded yet, but rows will keep different counts
                before = layer.seen - q_len
                layer.lengths = torch.full((len(rows),), before, device=layer.device)

    def _of_rows(self, layer: SlotLayer, lengths: list[int]) -> list[int]:
        """What each row of a layer may keep."""
        shares = self._shares(lengths)
        if self._split is None:
            return [max(share, layer.least) for share in shares]
        place = self._free.index(layer)
        rows = []
        for row, n in enumerate(lengths):
            longest = max(lengths) if self._needs_length else 0
            mean = shares[row] if shares else 0 if self._planned else self._tokens(layer, longest)
            key = (mean, n, row if self.spreads else None)
            if key not in self._known:
                spread = self.spreads[row] if self.spreads else None
                budgets = self._split.for_prompt(mean, n, spread)
                if min(budgets) < n:
                    self.policy.check_budget(min(budgets))
                self._known[key] = budgets
            rows.append(self._known[key][place])
        return rows

    @property
    def _needs_length(self) -> bool:
        """Whether bytes mean tokens by the prompt's length: some KV heads keep all of it."""
        by_bytes = self.budget is not None and self.budget.bytes is not None
        return by_bytes and self.policy.head_split is not None

    def _shares(self, lengths: list[int]) -> list[int]:
        """The mean over layers that each row may keep, for a ratio; empty for other budgets."""
        if self.budget is None or self.budget.ratio is None:
            return []
        rows = [fraction_of(self.budget.ratio, n) for n in lengths]
        try:
            self.policy.check_budget(min(rows))
        except UsageError as error:
            raise UsageError(f"{self.budget} of {min(lengths)} tokens: {error}") from None
        return rows

    def _tokens(self, layer: SlotLayer, length: int = 0) -> int:
        """The budget in tokens or pairs per layer and KV head, if it is no share of the prompt.

        Args:
            length: tokens that the longest row will have seen at the prompt's end.
        """
        if self.budget.tokens is not None:
            return self.budget.tokens
        key = (length, layer.batch_size, self.reserve)
        if key not in self._of_bytes:
            text = Text(length, self.reserve, layer.batch_size, self.facts.config.vocab_size)
            shapes = self._shapes(layer)
            self._of_bytes[key] = tokens_for_bytes(self.policy, shapes, text, self.budget.bytes)
        return self._of_bytes[key]

    def _shapes(self, layer: SlotLayer) -> list[LayerShape | None]:
        """What each layer stores of a token, with numbers of the size that this one has."""
        size = layer.keys.element_size()
        return [each and replace(each, itemsize=size) for each in self.facts.layers]

    def _count(self, layer: SlotLayer, positions: Tensor | None, q_len: int) -> list[int]:
        """Tokens of each row at the end of the running block: a device sync if rows are padded."""
        if positions is None and not layer.ragged:
            return [layer.seen] * layer.batch_size
        if self._counted is None or self._counted[0] != layer.seen:
            before = layer.lengths if layer.ragged else layer.seen - q_len
            new = q_len if positions is None else (positions >= 0).sum(1)
            self._counted = (layer.seen, (before + new).tolist())
        return self._counted[1]
