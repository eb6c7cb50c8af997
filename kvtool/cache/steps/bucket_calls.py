"""Split a call of a layer whose KV heads hold different counts: one call for each bucket of lanes.

A lane is attended as a batch entry of one head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor

from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.ragged import RaggedBuffers
from kvtool.cache.steps.call import Call
from kvtool.maths.attention import group_queries


def beside_slots(layer: SlotLayer, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values to attend to: of the slots, if they are not apart, and new ones."""
    if layer.reads_apart:
        return keys, values
    layer.compact()
    joined = layer.slots.joined(keys, values)
    layer.sizing.meter.run(sum(each.nbytes for each in joined))
    return joined


def bucket_calls(
    ragged: RaggedBuffers,
    call: Call,
    attended: Callable[[SlotLayer, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Iterator[tuple[SlotLayer, Call]]:
    """Yield each bucket with its part of a call, whose keys and values are those of new tokens.

    Args:
        attended: returns the keys and values that a bucket attends to, from new ones of its own.
    """
    heads, batch = ragged.kv_heads, len(call.query)
    query = ragged.pick(group_queries(call.query, heads))
    key, value = ragged.pick(call.raw_key)[:, None], ragged.pick(call.raw_value)[:, None]
    positions, sinks, placement = call.positions, call.sinks, call.context.placement
    if placement is not None:
        placement = placement.of(lambda rows: ragged.pick(rows[:, None].expand(-1, heads)))
    if positions is not None:
        positions = ragged.pick(positions[:, None].expand(-1, heads, -1))
    if sinks is not None:
        sinks = ragged.pick(sinks.view(1, heads, 1, -1).expand(batch, -1, -1, -1))
    start = 0
    for bucket in ragged.buckets:
        own = slice(start, start + bucket.batch_size)
        start = own.stop
        all_keys, all_values = attended(bucket, key[own], value[own])
        there = None if placement is None else placement.of(partial(_entries, own))
        yield (
            bucket,
            Call(
                query=query[own],
                key=all_keys,
                value=all_values,
                raw_key=all_keys,
                raw_value=all_values,
                positions=None if positions is None else positions[own],
                scale=call.scale,
                softcap=call.softcap,
                sinks=None if sinks is None else sinks[own],
                context=replace(call.context, placement=there, group=None),
            ),
        )


def _entries(own: slice, rows: Tensor) -> Tensor:
    return rows[own]
