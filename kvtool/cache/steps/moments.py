"""Feed a block's queries, turned back to before RoPE, to the moments that a score asks for."""

from __future__ import annotations

import torch

from kvtool.cache.features.queries import Moments
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.steps.block import Block
from kvtool.cache.steps.call import Call

_ROWS = 1024  # queries that are turned at a time


@torch.no_grad()
def add_queries(layer: SlotLayer, call: Call, block: Block) -> None:
    """Add a block's queries to the moments, in parts of bounded size.

    Queries and keys keep what a model multiplies both by beside the turn (YaRN): so do the logits
    that it computes of them.
    """
    part = Moments.of(layer)
    if part is None:
        return
    part.set_scale(call.scale)
    sinks, new = part.asked.sinks, block.new
    for start in range(0, call.q_len, _ROWS):
        rows = slice(start, start + _ROWS)
        query, positions = call.query[:, :, rows].float(), new[:, rows]
        if part.rotation is not None:
            back = -positions.clamp(min=0)[:, None].float()
            query = part.rotation.shift(query, back)
        part.add(query, positions >= sinks)
