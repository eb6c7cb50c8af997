"""KV heads that keep different counts, stored for real and not masked at the size of the fullest.

One head of one batch entry is a lane. Lanes of nearly the same count share a bucket: a slot layer
of one KV head whose batch entries they are. So a decoded token runs the same step as everywhere,
bucket by bucket. A block of a prompt sees all heads side by side again, while it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvtool.cache.slots.buffers import Slots
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import Lanes
from kvtool.cache.slots.sizing import LayerBudget, State
from kvtool.cache.slots.slot_form import CodedForm, Form, take_stored
from kvtool.maths.quantise import ChannelRanges
from kvtool.policies.allocate.problem import UNLIMITED

_TIGHT = 7 / 8  # a lane joins a bucket if it fills at least this part of it
_CLOSE = 8  # or if it is at most this number of slots short


class RaggedBuffers:
    """The heads of a layer, by buckets of lanes of nearly the same count.

    Attributes:
        buckets: slot layers whose batch entries are lanes and which have one KV head.
        order: (lanes,) int64, the lanes in the order of the buckets; lane = entry * kv_heads +
            head.
        back: (lanes,) int64, where each lane is in that order.
        kv_heads: KV heads of a batch entry.
    """

    def __init__(self, buckets: list[SlotLayer], order: Tensor, kv_heads: int) -> None:
        self.buckets, self.order, self.kv_heads = buckets, order, kv_heads
        self.back = order.argsort()

    def pick(self, tensor: Tensor) -> Tensor:
        """Bring what belongs to heads, (batch, kv_heads, ..), into the order of the buckets."""
        return tensor.flatten(0, 1).index_select(0, self.order)

    @property
    def entries(self) -> Tensor:
        """The batch entry of each lane, in the order of the buckets."""
        return self.order // self.kv_heads

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        """Split (lanes, ..) in the order of the buckets by bucket."""
        return tensor.split([bucket.batch_size for bucket in self.buckets])

    def put_back(self, tensor: Tensor) -> Tensor:
        """Bring (lanes, ..) in the order of the buckets back to (batch, kv_heads, ..)."""
        return tensor.index_select(0, self.back).unflatten(0, (-1, self.kv_heads))

    def stored_positions(self) -> Tensor:
        """Positions side by side, -1 = empty or about to be overwritten."""
        return self._beside([bucket.stored_positions() for bucket in self.buckets], -1)

    def state(self) -> State:
        """Return the numbers of the used slots, side by side."""
        states = [bucket.slots.used_slots().state for bucket in self.buckets]
        return {name: self._beside([each[name] for each in states], 0) for name in states[0]}

    def taken(self, chosen: Tensor, positions: Tensor, state: State) -> Slots:
        """Copy some slots of all lanes, whose own are in ascending position.

        Args:
            chosen: (batch, kv_heads, count) indices into the used slots side by side.
            positions, state: of the chosen ones.
        """
        parts = []
        for bucket, own in zip(self.buckets, self.split(self.pick(chosen)), strict=True):
            index = own[:, None].clamp(max=max(0, bucket.slots.used - 1))
            parts.append(take_stored(bucket.slots.used_stored(), index))
        stored = {name: self._beside([part[name] for part in parts], 0) for name in parts[0]}
        return Slots(stored, positions, state)

    def sorted_slots(self) -> Slots:
        """Copies of what all lanes hold, in ascending position, as wide as the fullest."""
        parts = [bucket.sorted_slots() for bucket in self.buckets]
        most = max(int((part.positions >= 0).sum(-1).max()) for part in parts)

        def joined(tensors: list[Tensor], fill: int) -> Tensor:
            return self._beside([tensor[:, :, :most] for tensor in tensors], fill)

        names = parts[0].state
        state = {name: joined([part.state[name] for part in parts], 0) for name in names}
        stored = {
            name: joined([part.stored[name] for part in parts], 0) for name in parts[0].stored
        }
        return Slots(stored, joined([part.positions for part in parts], -1), state)

    def whole_form(self, form: Form) -> Form:
        """Return the form of all heads side by side, by those of the buckets."""
        own = [bucket.slots.form for bucket in self.buckets]
        coded = [each for each in own if isinstance(each, CodedForm)]
        if not isinstance(form, CodedForm) or not coded:
            return form
        ranges = zip(*(each.ranges for each in coded), strict=True)
        whole = ChannelRanges(*(self.put_back(torch.cat(parts))[:, :, 0] for parts in ranges))
        return form.with_ranges(whole, shifted=any(each.shifted for each in coded))

    def split_again(self, layer: SlotLayer) -> None:
        """Split the heads of a layer by what they may keep, once they lie side by side again."""
        to_ragged(layer, layer.sorted_slots())

    def _beside(self, parts: list[Tensor], fill: int) -> Tensor:
        """Join (lanes, 1, slots, ..) of all buckets to (batch, kv_heads, most slots, ..)."""
        width = max(part.shape[2] for part in parts)
        first = parts[0]
        whole = first.new_full((len(self.order), width, *first.shape[3:]), fill)
        start = 0
        for part in parts:
            whole[start : start + len(part), : part.shape[2]] = part[:, 0]
            start += len(part)
        return self.put_back(whole)


def to_ragged(layer: SlotLayer, slots: Slots) -> None:
    """Store the kept slots of a layer by lanes, in place of what it has stored.

    Its budget says what each lane may keep. One device sync.

    Args:
        slots: (batch, kv_heads, slots, ..), in ascending position, -1 at the end where a head keeps
            fewer.
    """
    assert layer.budget.by_head is not None, "heads keep different counts"
    heads = slots.positions.shape[1]
    budgets: list[int] = layer.budget.by_head.flatten().tolist()
    filled: list[int] = (slots.positions >= 0).sum(-1).flatten().tolist()
    needs = filled if layer.appends else budgets
    needs = [min(need, slots.positions.shape[2]) for need in needs]
    # a bucket has slots for its largest budget, so lanes that grow without end are apart
    growing = [lane for lane, budget in enumerate(budgets) if budget >= UNLIMITED]
    limited = [lane for lane, budget in enumerate(budgets) if budget < UNLIMITED]
    buckets, order, whole = [], [], layer.form
    exact = layer.sizing.meter.promised or layer.sizing.growth.exact
    for lanes in _bins(growing, needs, exact) + _bins(limited, needs, exact):
        index = torch.tensor(lanes, device=slots.positions.device)
        uneven = len({(filled[lane], budgets[lane]) for lane in lanes}) > 1
        width = max(filled[lane] for lane in lanes)
        own = _lanes(slots, index, heads, width)
        budget = LayerBudget.of([budgets[lane] for lane in lanes], index.device)
        form = _form_of_lanes(whole, index, heads)
        whose = Lanes(index // heads, index % heads, heads)
        buckets.append(_bucket(layer, own, budget, whose, form, uneven=uneven))
        order += lanes
    layer.hold_ragged(
        RaggedBuffers(buckets, torch.tensor(order, device=slots.positions.device), heads)
    )


def _lanes(slots: Slots, lanes: Tensor, heads: int, width: int) -> Slots:
    """The first slots of some lanes, as batch entries of one head."""
    entries, own = lanes // heads, lanes % heads

    def picked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor[entries, own, :width][:, None] for name, tensor in tensors.items()}

    positions = slots.positions[entries, own, :width][:, None]
    return Slots(picked(slots.stored), positions, picked(slots.state))


def _form_of_lanes(form: Form, lanes: Tensor, heads: int) -> Form:
    """The form of some lanes, as batch entries of one head."""
    return form.reindexed(lambda tensor: tensor[lanes // heads, lanes % heads][:, None])


def _bucket(
    layer: SlotLayer,
    slots: Slots,
    budget: LayerBudget,
    lanes: Lanes,
    form: Form,
    *,
    uneven: bool,
) -> SlotLayer:
    """Make the slot layer of some lanes; what is remembered for all heads stays with the layer."""
    entries = lanes.entries
    own = [part.for_heads(lanes) for part in layer.parts.values()]
    parts = [part for part in own if part is not None]
    bucket = SlotLayer(layer.index, layer.policy, parts=parts, meter=layer.sizing.meter)
    bucket.parts.allow_kernel(layer.parts.kernel)
    bucket.begin_as(layer, len(entries))
    bucket.slots.set_form(form)
    bucket.set_budget(budget)
    lengths = layer.lengths
    if lengths is not None:
        bucket.count_from(layer.seen, lengths[entries])
    elif uneven:
        seen = layer.seen
        bucket.count_from(seen, torch.full((len(entries),), seen, device=entries.device))
    else:
        bucket.count_from(layer.seen, None)
    bucket.grow_exactly(layer.sizing.growth.exact)
    bucket.slots.replace(slots)
    return bucket


def _bins(lanes: Iterable[int], needs: list[int], exact: bool = False) -> list[list[int]]:
    """Put lanes together whose needs are close; the widest first, and lanes in ascending order."""
    bins: list[list[int]] = []
    for lane in sorted(lanes, key=lambda lane: -needs[lane]):
        widest = needs[bins[-1][0]] if bins else 0
        lowest = widest if exact else min(widest * _TIGHT, widest - _CLOSE)
        if bins and needs[lane] >= lowest:
            bins[-1].append(lane)
        else:
            bins.append([lane])
    return [sorted(lanes) for lanes in bins]
