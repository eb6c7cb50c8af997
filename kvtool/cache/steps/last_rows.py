"""The attention of a prompt's last queries, by which policies vote that look back from its end."""

from __future__ import annotations

from functools import partial, reduce

import torch
from torch import Tensor

from kvtool.cache.steps.attend import call_weights
from kvtool.cache.steps.block import Block, vote_weights
from kvtool.cache.steps.call import Call
from kvtool.cache.steps.view import last_query_columns, make_rows
from kvtool.cache.storage.last_queries import LastQueries
from kvtool.cache.storage.layer import SlotLayer
from kvtool.maths.attention import visible_keys
from kvtool.maths.selection import take
from kvtool.policies.attention_rows import AttentionRows

_ROWS_AT_ONCE = 128  # queries whose weights are held at a time


def last_of_prompt(layer: SlotLayer, call: Call, block: Block) -> tuple[Tensor, Tensor]:
    """The last queries that a policy sees, those of earlier blocks of a prompt cut once included.

    Returns:
        (batch, heads, rows, head_dim), and their positions, (batch or 1, rows), -1 = padding.
    """
    query, new = call.query, block.new
    before = LastQueries.of(layer)
    if before is not None and before.query is not None and before.positions is not None:
        query = torch.cat([before.query, query], 2)
        rows = max(new.shape[0], before.positions.shape[0])
        new = torch.cat([before.positions.expand(rows, -1), new.expand(rows, -1)], 1)
    last = last_query_columns(layer, new)
    return take(query, last[:, None].expand(query.shape[0], -1, -1)), new.gather(1, last)


def last_rows(layer: SlotLayer, call: Call, block: Block) -> AttentionRows:
    """Weights of the last queries of a prompt, or the sum of their votes."""
    query, new = last_of_prompt(layer, call, block)
    visible = partial(visible_keys, key_positions=block.view.positions)
    spans = None if call.spans is None else _last_spans(layer, call.spans, block, new)
    weights = vote_weights(layer, block, new.shape[1])
    if weights is None:
        return _rows_of(layer, call, query, new, visible(new, spans=spans))
    votes = []
    for start in range(0, new.shape[1], _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        own = None if spans is None else spans[:, part]
        seen = visible(new[:, part], spans=own)
        rows = _rows_of(layer, call, query[:, :, part], new[:, part], seen)
        votes.append(rows.summed(weights[:, part]).weights)
    return AttentionRows(reduce(Tensor.add_, votes))


def _last_spans(layer: SlotLayer, spans: Tensor, block: Block, new: Tensor) -> Tensor:
    """Spans of the last queries; those of an earlier block see nothing later."""
    columns = last_query_columns(layer, block.new)[..., None]
    own = spans.gather(1, columns.expand(len(spans), -1, 2))
    earlier = new[:, : new.shape[1] - own.shape[1], None].expand(len(own), -1, 2)
    return torch.cat([earlier, own], 1)


def _rows_of(
    layer: SlotLayer, call: Call, query: Tensor, new: Tensor, visible: Tensor
) -> AttentionRows:
    weights = call_weights(call, query, call.key, visible)
    return make_rows(layer, weights, visible[:, :, 0], new >= 0 if layer.padded else None)
