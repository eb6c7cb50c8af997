"""Batch entries of one cache put behind those of another, so that a prompt joins a running batch.

Everything that follows batch entries when transformers reorders them (`reindex`) follows them here:
the tensors of one cache are paired with those of the other by their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvtool.cache.slots.buffers import Slots
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import CutSchedule, Part
from kvtool.cache.slots.ragged import to_ragged
from kvtool.cache.slots.sizing import Growth, LayerBudget
from kvtool.cache.slots.slot_form import CodedForm
from kvtool.cache.whole.cache import KVCache
from kvtool.cache.whole.layers import why_not
from kvtool.errors import KvtoolError
from kvtool.policies.policy import Policy


def why_apart(policy: Policy, *, recurrent: bool = False) -> str | None:
    """Say why sequences under a policy, or of a recurrent model, cannot join a batch that runs."""
    recurs = "the model has recurrent layers" if recurrent else None
    return why_not(policy, "joined") or recurs


@torch.no_grad()
def append_entries(cache: KVCache, others: Sequence[KVCache], coming: int = 0) -> None:
    """Put the sequences of other caches behind those of one, between two forwards.

    Each goes on as it would alone. The others are empty afterwards. One device sync a layer.

    Args:
        cache: that has read a text.
        others: of the same model, policy and budget, which have each read a text.
        coming: tokens of each sequence until sequences join or leave again, as far as is known.

    Raises:
        KvtoolError: a policy or a model whose sequences cannot be joined.
    """
    why = why_apart(cache.policy, recurrent=cache.recurrent)
    if why is not None:
        raise KvtoolError(f"rows under `{cache.policy}` cannot join a running batch: {why}")
    for each in (cache, *others):
        each.check_whole()
    for each in (cache, *others):
        each.ungroup()
        each.static.forget()
    spreads = [each.budgets.spreads for each in (cache, *others)]
    cache.budgets.reindex(lambda tensor: tensor)
    known = [entry for own in spreads if own is not None for entry in own]
    cache.budgets.load(known if spreads[0] is not None else None)
    cache.remember(None)
    cache.join_rope(others)
    for place, layer in enumerate(cache.slot_layers):
        _join(layer, [other.slot_layers[place] for other in others], coming)


@torch.no_grad()
def keep_entries(cache: KVCache, entries: Tensor, coming: int = 0) -> None:
    """Drop all other sequences, with the slots that only they had filled; a device sync a layer.

    Args:
        entries: (count,) int64; `coming` as for `append_entries`.
    """
    cache.batch_select_indices(entries)
    for layer in cache.slot_layers:
        if layer.appends and layer.ragged is None:  # those that evict are as wide as their budget
            layer.slots.replace(_packed(layer))
        layer.expect(coming)


@torch.no_grad()
def put_entry(cache: KVCache, entry: int, other: KVCache) -> bool:
    """Write the sequence of another cache over one of a batch, where every tensor stays in place.

    So steps that were recorded hold. The other cache is empty afterwards. One device sync a layer.

    Returns:
        Whether it fits there; if not, nothing has changed.
    """
    pairs = list(zip(cache.slot_layers, other.slot_layers, strict=True))
    if cache.link.rope is not None or not all(_fits(*pair) for pair in pairs):
        return False
    for each in (cache, other):
        each.check_whole()
        each.ungroup()
    other.static.forget()
    spreads, new = cache.budgets.spreads, other.budgets.spreads
    if spreads is not None and new is not None:
        spreads[entry] = new[0]
    cache.remember(None)
    for layer, own in pairs:
        budget, filled = own.budget.tokens, _packed(own)
        _hold(own, filled, layer.slots.capacity)
        own.slots.go_on_behind((filled.positions >= 0).sum(-1), layer.slots)
        if isinstance(layer.budget.tokens, Tensor):
            own.set_budget(LayerBudget(layer.budget.tokens.new_tensor(budget).view(1, 1, 1)))
        for old, now in zip(_tensors(layer), _tensors(own), strict=True):
            old[entry] = now[0]
        layer.count_from(max(layer.seen, own.seen), layer.lengths)
        own.reset()
    return True


def _fits(layer: SlotLayer, other: SlotLayer) -> bool:
    """Whether the sequence of another layer can take the place of one, and nothing moves."""
    slots, budget, own = layer.slots, layer.budget, other.budget
    if layer.ragged is not None or other.ragged is not None or CutSchedule.of(layer) is not None:
        return False
    if layer.lengths is None or (slots.reuse_slot is None and slots.reserved is None):
        return False
    same = budget.min_budget <= own.min_budget <= own.max_budget <= budget.max_budget
    forms = slots.form, other.slots.form
    coded = [form.shifted for form in forms if isinstance(form, CodedForm)]
    if not same or other.slots.kept > slots.kept or coded == [False, True]:
        return False
    beside = [
        [t for part in each.parts.values() for t in _tensors(part)] for each in (layer, other)
    ]
    shapes = [[(each.shape[1:], each.dtype) for each in tensors] for tensors in beside]
    own_rows = all(len(each) == slots.batch and each.stride(0) for each in beside[0])
    return shapes[0] == shapes[1] and own_rows


@torch.no_grad()
def take_entry(cache: KVCache, entry: int) -> KVCache:
    """Return one sequence of a batch in a cache of its own, which does not know its text.

    The batch stays as it is. No tensor is copied whole, but the entry's part of each.
    """
    cache.ungroup()
    whole = [tensor for layer in cache.slot_layers for tensor in _tensors(layer)]
    taken = cache.copy_but(whole)
    taken.remember(None)
    keep_entries(taken, torch.tensor([entry]))
    for layer in taken.slot_layers:
        if layer.lengths is not None:
            layer.count_from(int(layer.lengths[0]), layer.lengths)
    return taken


def _join(layer: SlotLayer, others: Sequence[SlotLayer], coming: int) -> None:
    layers = (layer, *others)
    budgets = [(each.budget, each.batch_size) for each in layers]
    split = any(each.budget.by_head is not None for each in layers)
    packed = [_packed(each) for each in layers]
    width = max(slots.positions.shape[2] for slots in packed)
    forms = [each.slots.form for each in layers]
    shifted = any(isinstance(form, CodedForm) and form.shifted for form in forms)
    for each, slots in zip(layers, packed, strict=True):
        if split and each.budget.by_head is None:
            _spread_over_heads(each)
        _hold(each, slots, width)
    met = [_tensors(other) for other in others]
    layer.reindex(lambda tensor: torch.cat([tensor, *(next(each) for each in met)]))
    form = layer.slots.form
    if isinstance(form, CodedForm):
        layer.slots.set_form(form.with_ranges(form.ranges, shifted=shifted))
    layer.count_from(max(each.seen for each in layers), layer.lengths)
    layer.set_budget(_joined(budgets, layer.slots.device).split(layer.budget.by_head))
    if split:
        to_ragged(layer, layer.sorted_slots())
    layer.expect(coming)
    for each in others:
        each.reset()  # so that no more than a layer is there twice


def _spread_over_heads(layer: SlotLayer) -> None:
    """Give each head the layer's budget, where heads have no budgets of their own yet."""
    tokens = torch.as_tensor(layer.budget.tokens).flatten()[:, None].to(layer.slots.device)
    by_head = tokens.expand(layer.batch_size, layer.slots.kv_heads).clone()
    layer.set_budget(layer.budget.split(by_head))


def _packed(layer: SlotLayer) -> Slots:
    """Copy what a layer holds, in ascending position, as wide as its fullest head."""
    layer.compact()
    slots = layer.sorted_slots()
    filled = int((slots.positions >= 0).sum(-1).max())
    return Slots(
        {name: tensor[:, :, :filled] for name, tensor in slots.stored.items()},
        slots.positions[:, :, :filled],
        {name: number[:, :, :filled] for name, number in slots.state.items()},
    )


def _hold(layer: SlotLayer, slots: Slots, width: int) -> None:
    """Have buffers of exactly `width` slots, and counts by sequence, to be joined."""
    layer.count_apart(layer.batch_size, layer.slots.device)
    layer.set_budget(LayerBudget(by_head=layer.budget.by_head))
    layer.slots.set_growth(Growth("never", exact=True))
    layer.slots.replace(slots)
    layer.slots.shrink(slots.positions.shape[2])
    layer.slots.fill_to(width)


def _tensors(holder: SlotLayer | Part) -> Iterator[Tensor]:
    """Everything of a layer or a part that follows batch entries, in the order of `reindex`."""
    met: list[Tensor] = []

    def meet(tensor: Tensor) -> Tensor:
        met.append(tensor)
        return tensor

    holder.reindex(meet)
    return iter(met)


def _joined(budgets: Sequence[tuple[LayerBudget, int]], device: torch.device) -> LayerBudget:
    """Put budgets, each with its number of sequences, behind each other."""
    low = min(budget.min_budget for budget, _ in budgets)
    high = max(budget.max_budget for budget, _ in budgets)
    if low == high:
        return budgets[0][0]
    entries = [
        torch.as_tensor(budget.tokens, device=device).reshape(-1, 1, 1).expand(batch, 1, 1)
        for budget, batch in budgets
    ]
    return LayerBudget(torch.cat(entries), low, high)
