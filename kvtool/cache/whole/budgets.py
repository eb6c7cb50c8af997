"""Turn a budget of tokens, bytes or a plan into the tokens that each layer and sequence may store.

Budgets are fixed when a prompt begins, or once all layers have seen it. A budget may grow by what
is read, so that a question behind a context is kept whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from kvtool.cache.features.cuts import Deferred, HeadBudgets, measure
from kvtool.cache.features.traffic import TrafficBudgets
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.sizing import LayerBudget
from kvtool.cache.whole.settings import CacheSettings
from kvtool.errors import UsageError
from kvtool.planning.budgets import tokens_for_bytes
from kvtool.planning.bytes import Text
from kvtool.policies.allocate.problem import UNLIMITED
from kvtool.policies.allocate.split import AllocatedSplit, PlannedSplit, Split, Spread
from kvtool.sizes import fraction_of


class StoredBudgets:
    """The budget of a cache, in tokens of its layers and sequences.

    Attributes:
        new_tokens: tokens that will be generated, as far as is known.
        spreads: how each sequence's attention was spread over the last prompt that it had a part
            of, for an allocator that looks at it.
        traffic: what a reader may look at; None: no reader.
    """

    def __init__(self, layers: list[SlotLayer], settings: CacheSettings) -> None:
        policy, budget, plan = settings.policy, settings.budget, settings.plan
        self.policy, self.budget, self.settings = policy, budget, settings
        self._of_bytes: dict[tuple[int, int, int], int] = {}
        self.spreads: list[Spread] | None = None
        self.new_tokens = 0
        self._free = [layer for layer in layers if layer.window is None]
        self._split: Split | None = None
        self.traffic: TrafficBudgets | None = None
        if policy.reader is not None:
            self.traffic = TrafficBudgets(
                policy, budget, plan, self._tokens, self._expected, self._free
            )
        self._planned = plan is not None and not policy.budget_is_traffic
        if plan is not None and self._planned:
            self._split = PlannedSplit(plan)
        elif policy.allocator is not None and self._free:
            self._split = AllocatedSplit(policy, len(self._free))
        self._known: dict[tuple, list[int]] = {}
        self._counted: tuple[int, list[int]] | None = None
        self._raised: dict[int, int] | None = None  # tokens seen at the last block, by layer

    @property
    def deferred(self) -> bool:
        """Whether nothing may be cut before all layers have seen the prompt."""
        allocator = None if self._split is None or self._planned else self.policy.allocator
        return allocator is not None and allocator.metric is not None

    @property
    def waiting(self) -> list[SlotLayer]:
        """The layers whose prompt is stored whole and waits for its budget."""
        pairs = [(layer, layer.parts.later) for layer in self._free if self.deferred]
        return [layer for layer, part in pairs if part is not None and part.active]

    def is_last(self, layer: SlotLayer) -> bool:
        """Whether a forward runs no other layer of free budget after this one."""
        return layer is self._free[-1]

    def reset(self) -> None:
        """Forget the text."""
        self.spreads = self._counted = None
        self._known, self.new_tokens = {}, 0
        if self.traffic is not None:
            self.traffic.clear()

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Let what is read inside stay whole, such as a question: budgets grow by its tokens."""
        self._raised = {}
        try:
            yield
        finally:
            self._raised = None

    def expect(self, new_tokens: int) -> None:
        """Say how many tokens will be generated, as far as is known."""
        self.new_tokens = new_tokens

    def load(self, spreads: list[Spread] | None) -> None:
        """Take from a file how attention was spread over the last prompt."""
        self.spreads = spreads

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        """Let what is known of each batch entry follow the entries."""
        self._known = {}
        if self.traffic is not None:
            self.traffic.reindex(change)
        if self.spreads is not None:
            rows = change(torch.arange(len(self.spreads))).tolist()
            self.spreads = [self.spreads[row] for row in rows]

    def _expected(self) -> int:
        """Tokens to come; by default the plan's number."""
        if self.settings.plan is not None and self.new_tokens == 0:
            return self.settings.plan.target.max_new_tokens
        return self.new_tokens

    def check(self, lengths: list[int]) -> None:
        """Refuse a prompt of which an entry or layer would keep only protected tokens."""
        self._ratios(lengths)
        if self.policy.two_stages and self.traffic is not None and not self._by_bytes:
            for length in lengths if self._free else ():
                self.traffic.stored(self._free[0], length)
        if self._planned and self.budget is not None:
            self._of_entries(self._free[0], lengths)

    def assign(
        self,
        layer: SlotLayer,
        positions: Tensor | None,
        q_len: int,
        lengths: list[int] | None,
    ) -> None:
        """Fix what the batch entries of a layer may keep, before a block of a prompt is cut.

        Args:
            positions: (batch, q_len) of the block, -1 = padding; None: no padding.
            q_len: tokens of the block that are not counted yet.
            lengths: of the entries at the prompt's end; None: at the block's.
        """
        if layer.window is not None:
            layer.set_budget(LayerBudget.of([layer.window - 1]))
            return
        if self.traffic is not None:
            lengths = lengths or self._count(layer, positions, q_len)
            self.traffic.end_prompt(lengths)
        if self._raised is not None and not self.policy.stores_all:
            self._raise(self._raised, layer, positions, q_len)
            return
        if self.policy.budget_is_traffic:
            if self.policy.two_stages and self.traffic is not None:
                lengths = lengths or self._count(layer, positions, q_len)
                self._set(layer, [self.traffic.stored(layer, length) for length in lengths])
            return
        if self.budget is None:
            return
        by_length = self._split is not None or self.budget.ratio is not None
        if not (by_length or self._needs_length):
            self._set(layer, [self._tokens(layer)])
            return
        lengths = lengths or self._count(layer, positions, q_len)
        if not by_length:
            self._set(layer, [self._tokens(layer, max(lengths))])
        elif self.deferred:
            part = Deferred.of(layer)
            if part is not None and not part.active:
                part.start()
                layer.grow_exactly(True)
            self._set(layer, [max(lengths)])
        else:
            self._set(layer, self._of_entries(layer, lengths), lengths)

    def keep(self, layer: SlotLayer, lengths: list[int]) -> None:
        """Let a layer keep all of a prompt, whose end is still to come."""
        if self.deferred:
            self.assign(layer, None, 0, lengths)
        else:
            layer.set_budget(LayerBudget.of([max(lengths)]))

    def plan_block(self, q_len: int, valid: Tensor | None, lengths: list[int] | None) -> None:
        """Fix what may be kept before a block is read, where something is stored already.

        Args:
            valid: (batch, q_len), False = padding; None: no padding.
            lengths: as for `assign`.
        """
        if not self._free or not self._free[0].is_initialized or self.budget is None:
            return
        first = self._free[0]
        if self._raised is not None:
            places = None if valid is None else torch.where(valid, 0, -1)
            for layer in self._free:
                self._raise(self._raised, layer, places, q_len)
            return
        if lengths is None and (self._split is not None or self.budget.ratio is not None):
            before = first.seen if first.lengths is None else first.lengths
            new = q_len if valid is None else valid.sum(1)
            lengths = torch.as_tensor(before + new).expand(first.batch_size).tolist()
        for layer in self._free:
            self.assign(layer, None, 0, lengths)

    def prompt_budgets(self, lengths: list[int]) -> list[int] | None:
        """Tokens that each entry may keep, where layers have equal budgets.

        None without a budget, or for one in bytes before anything is stored.
        """
        if not self._free:
            return list(lengths)
        first = self._free[0]
        if self.budget is None or (self._by_bytes and not first.is_initialized):
            return None
        return self._ratios(lengths) or [self._tokens(first)] * len(lengths)

    def assign_deferred(self, lengths: list[int]) -> list[SlotLayer]:
        """Split the budget by what all layers have shown, and return them: they are to be cut."""
        layers = self.waiting
        device = layers[0].slots.device  # layers may be on several
        found = [measure(layer).to(device) for layer in layers]
        before, self._known = self.spreads, {}
        self.spreads = []
        for row, measured in enumerate(torch.stack(found, 1).tolist()):
            variance, queries, held = zip(*measured, strict=True)
            spread = Spread(variance, int(queries[0]), [int(slots) for slots in held])
            silent = spread.queries == 0 and before is not None  # an entry of padding alone
            self.spreads.append(before[row] if silent and before is not None else spread)
        for layer in layers:
            self._set(layer, self._of_entries(layer, lengths))
        return layers

    def _set(self, layer: SlotLayer, rows: list[int], lengths: list[int] | None = None) -> None:
        part = HeadBudgets.of(layer)
        if part is not None and part.split.fixed:
            place = self._free.index(layer)
            pairs = zip(rows, lengths or [UNLIMITED] * len(rows), strict=True)
            part.fix([self._of_heads(place, tokens, n) for tokens, n in pairs])
        budget = LayerBudget.of(rows, layer.slots.device, layer.budget.by_head)
        layer.set_budget(budget)
        if budget.min_budget < budget.max_budget:
            # no entry may be padded yet, but they will keep different counts
            layer.count_apart(len(rows), layer.slots.device)

    def _of_entries(self, layer: SlotLayer, lengths: list[int]) -> list[int]:
        """What each sequence of a layer may keep."""
        means = self._ratios(lengths)
        if self._split is None:
            return [max(mean, layer.budget.min_budget) for mean in means]
        place = self._free.index(layer)
        rows = []
        for row, n in enumerate(lengths):
            longest = max(lengths) if self._needs_length else 0
            mean = means[row] if means else 0 if self._planned else self._tokens(layer, longest)
            key = (mean, n, row if self.spreads else None)
            if key not in self._known:
                spread = self.spreads[row] if self.spreads else None
                budgets = self._split.for_prompt(mean, n, spread)
                least = min(min(self._of_heads(i, own, n)) for i, own in enumerate(budgets))
                if least < n:
                    self.policy.check_budget(least)
                self._known[key] = budgets
            rows.append(self._known[key][place])
        return rows

    def _of_heads(self, place: int, tokens: int, n: int) -> list[int]:
        """What each KV head of a layer may keep of a prompt of `n` tokens, as far as is known."""
        split, shape = self.policy.head_split, self.settings.shapes[self._free[place].index]
        if split is None or not split.fixed or shape is None:
            return [tokens]
        return split.forecast(tokens, n, shape.kv_heads, (place, len(self._free)))

    @property
    def _needs_length(self) -> bool:
        """Whether bytes mean tokens by the prompt's length: some KV heads keep all of it."""
        return self._by_bytes and self.policy.head_split is not None

    @property
    def _by_bytes(self) -> bool:
        return self.budget is not None and self.budget.bytes is not None

    def _ratios(self, lengths: list[int]) -> list[int]:
        """The mean over layers that each sequence may keep, for a ratio; else empty."""
        if self.budget is None or self.budget.ratio is None:
            return []
        shortest = min((n for n in lengths if n), default=0)
        try:
            self.policy.check_budget(fraction_of(self.budget.ratio, shortest))
        except UsageError as error:
            raise UsageError(f"{self.budget} of {shortest} tokens: {error}") from None
        return [fraction_of(self.budget.ratio, n) for n in lengths]

    def _raise(
        self, ends: dict[int, int], layer: SlotLayer, positions: Tensor | None, q_len: int
    ) -> None:
        """Add the tokens of a block to what a layer may keep, once: see `assign`."""
        end = layer.seen + q_len
        if ends.get(layer.index) == end:
            return  # raised before its forward, for a policy that frees slots there
        ends[layer.index] = end
        new = [q_len] * layer.batch_size
        if positions is not None:
            new = (positions >= 0).sum(1).tolist()
        layer.set_budget(layer.budget.raised(new, layer.slots.device))

    def _tokens(self, layer: SlotLayer, length: int = 0) -> int:
        """Return tokens, or pairs that are read, per layer and KV head; no share is asked for."""
        settings, budget, batch = self.settings, self.budget, layer.batch_size
        assert budget is not None, "a policy without a budget asks for none"
        if budget.bytes is None:
            return budget.tokens or 0
        key = (length, batch, self.new_tokens)
        if key not in self._of_bytes:
            text = Text(length, self.new_tokens, batch, settings.config.vocab_size)
            size = layer.slots.form.sample[0].element_size()
            shapes = [each and replace(each, itemsize=size) for each in settings.shapes]
            self._of_bytes[key] = tokens_for_bytes(settings.policy, shapes, text, budget.bytes)
        return self._of_bytes[key]

    def _count(self, layer: SlotLayer, positions: Tensor | None, q_len: int) -> list[int]:
        """Tokens of each sequence at the end of the running block; a device sync with padding."""
        end = layer.seen + q_len
        if positions is None and not layer.padded:
            return [end] * layer.batch_size
        if self._counted is None or self._counted[0] != end:
            before = torch.as_tensor(layer.seen if layer.lengths is None else layer.lengths)
            new = q_len if positions is None else (positions >= 0).sum(1)
            self._counted = (end, (before + new).tolist())
        return self._counted[1]
