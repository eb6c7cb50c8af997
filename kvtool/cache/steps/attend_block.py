"""Attention of a block by the kernel that fits: fused, flash, Triton, or weights in full.

Queries go in chunks, so that nothing of size prompt x prompt is ever held. A fused kernel of a CPU
attends a whole prompt, and its log-sum-exp gives the column sums.

A layer may read the keys and values of an earlier one. It sees what that layer has seen in the same
forward, stores nothing, and its attention is no evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import Correction
from kvtool.cache.steps.attend import (
    SharedKV,
    attend_codes,
    attend_unseen,
    call_weights,
    call_weights_lse,
    share_kv,
)
from kvtool.cache.steps.attend_triton import can_count, can_run, count_block
from kvtool.cache.steps.block import Block, RowWatcher, vote_weights
from kvtool.cache.steps.call import Call
from kvtool.cache.steps.view import last_query_columns, make_rows
from kvtool.kernels.checks import Family
from kvtool.maths.attention import can_fuse, fused_attention, visible_keys, weighted_values
from kvtool.maths.selection import take
from kvtool.maths.statistics import add_causal_columns
from kvtool.policies.evidence import AttentionRows
from kvtool.sizes import LONG_PROMPT

_EXPLICIT_ROWS = 128  # queries whose weights are held at a time
_MASKED_ROWS = 1024  # queries whose boolean mask is held at a time


def last_of_prompt(layer: SlotLayer, call: Call, block: Block) -> tuple[Tensor, Tensor]:
    """The last queries that a policy sees, those of earlier blocks of a prompt cut once included.

    Returns:
        (batch, heads, rows, head_dim), and their positions, (batch or 1, rows), -1 = padding.
    """
    query, new = call.query, block.new
    if block.earlier is not None:
        before, places = block.earlier
        rows = max(new.shape[0], places.shape[0])
        query = torch.cat([before, query], 2)
        new = torch.cat([places.expand(rows, -1), new.expand(rows, -1)], 1)
    last = last_query_columns(layer, block.view, new)
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
    for start in range(0, new.shape[1], _EXPLICIT_ROWS):
        part = slice(start, start + _EXPLICIT_ROWS)
        own = None if spans is None else spans[:, part]
        seen = visible(new[:, part], spans=own)
        rows = _rows_of(layer, call, query[:, :, part], new[:, part], seen)
        votes.append(rows.summed(weights[:, part]).weights)
    return AttentionRows(reduce(Tensor.add_, votes))


def _last_spans(layer: SlotLayer, spans: Tensor, block: Block, new: Tensor) -> Tensor:
    """Spans of the last queries; those of an earlier block see nothing later."""
    columns = last_query_columns(layer, block.view, block.new)[..., None]
    own = spans.gather(1, columns.expand(len(spans), -1, 2))
    earlier = new[:, : new.shape[1] - own.shape[1], None].expand(len(own), -1, 2)
    return torch.cat([earlier, own], 1)


def _rows_of(
    layer: SlotLayer, call: Call, query: Tensor, new: Tensor, visible: Tensor
) -> AttentionRows:
    weights = call_weights(call, query, call.key, visible)
    return make_rows(layer, weights, visible[:, :, 0], new >= 0 if layer.padded else None)


def returns_norms(layer: SlotLayer, call: Call, block: Block) -> bool:
    """Whether the fused kernel can attend the block, and return the log-sum-exp of its rows.

    It has to be the beginning of a prompt that sees all before it, with padding at the ends only,
    and long. Weights from a log-sum-exp are off by the rounding of large logits (1e-5 of a weight),
    which distinguishes tokens that tie exactly where weights are computed in full. In short prompts
    ties are likely, and no time is to be gained.
    """
    query, key, value = call.query, call.key, call.value
    if call.q_len < LONG_PROMPT:
        return False
    plain = not (call.needs_weights or layer.chunked or call.spans is not None)
    if not plain or layer.window is not None or block.kept:
        return False
    if not can_fuse(query, key, value) or key.shape[1] != layer.slots.kv_heads:
        return False
    return not layer.padded or all(
        own.stop - own.start >= LONG_PROMPT and bool((block.new[row, own] >= 0).all())
        for row, own in enumerate(_token_columns(block.new))
    )


def can_sum(layer: SlotLayer, call: Call, block: Block) -> bool:
    """Whether that is all the policy needs."""
    return not layer.policy.observes_rows and returns_norms(layer, call, block)


def sum_block(layer: SlotLayer, call: Call, block: Block) -> Tensor:
    """Attend a block, and add its columns to the block's state, if the policy has any.

    Returns:
        (batch, heads, q_len, value_dim).
    """
    out, lse = attend_with_norms(layer, call, block)
    if call.context.norms is not None:
        call.context.norms.append(lse)
    batch, kv_heads, slots = call.key.shape[:3]
    sums = {name: block.state[name] for name in layer.policy.columns}
    waiting, by_head = block.waiting, None
    if not sums and waiting is None:
        return out
    if waiting is not None:
        by_head = lse.new_zeros(batch, kv_heads, call.query.shape[1] // kv_heads, slots)
    for row, own in enumerate(_columns_of_rows(layer, call, block)):
        add_causal_columns(
            {name: total[row, :, own] for name, total in sums.items()},
            None if by_head is None else by_head[row, ..., own],
            call.query[row, :, own].unflatten(0, (kv_heads, -1)),
            call.key[row, :, own],
            lse[row, :, own].unflatten(0, (kv_heads, -1)),
            scale=call.scale,
        )
    if waiting is not None and by_head is not None:
        waiting.add(by_head, block.view.block)
    return out


def attend_with_norms(layer: SlotLayer, call: Call, block: Block) -> tuple[Tensor, Tensor]:
    """Attend a block by the fused kernel.

    Returns:
        (batch, heads, q_len, value_dim), and the log-sum-exp of the rows, (batch, heads, q_len)
        float32; 0 where there is padding.
    """
    batch, heads, q_len, _ = call.query.shape
    new = torch.zeros if layer.padded else torch.empty
    out = new(batch, q_len, heads, call.value.shape[-1], dtype=call.query.dtype).transpose(1, 2)
    lse = new(batch, heads, q_len, dtype=torch.float32)
    for row, own in enumerate(_columns_of_rows(layer, call, block)):
        if own.start == own.stop:
            continue
        # a KV head is an entry of the batch whose one head all queries of the group read: no copies
        query = call.query[row, :, own].unflatten(0, (call.key.shape[1], -1))
        key, value = (
            each[row, :, None, own].expand(-1, query.shape[1], -1, -1)
            for each in (call.key, call.value)
        )
        found, norms = fused_attention(query, key, value, call.scale, causal=True)
        out[row, :, own] = found.flatten(0, 1)
        lse[row, :, own] = norms.flatten(0, 1)
    return out, lse


def _columns_of_rows(layer: SlotLayer, call: Call, block: Block) -> list[slice]:
    """The columns of each batch entry that hold its tokens."""
    if not layer.padded:
        return [slice(0, call.q_len)] * len(call.query)
    return _token_columns(block.new.expand(len(call.query), -1))


def _token_columns(new: Tensor) -> list[slice]:
    """As many columns of each sequence as it has tokens, from its first token on."""
    valid = new >= 0
    first, count = valid.int().argmax(1).tolist(), valid.sum(1).tolist()
    return [slice(start, start + held) for start, held in zip(first, count, strict=True)]


@dataclass(frozen=True)
class OwnBlock:
    """A block that kvtool attends by itself."""

    call: Call

    def placed(self, layer: SlotLayer, block: Block) -> OwnBlock:
        """The same with keys and queries at their places among the kept tokens."""
        call = self.call
        for part in layer.parts.at["place"]:
            call = part.place(layer, call, block)
        return self if call is self.call else OwnBlock(call)

    def attend(self, layer: SlotLayer, block: Block, observed: bool) -> Tensor:
        """Attend, and show all rows to whoever observes: (batch, heads, q_len, value_dim)."""
        call = self.call
        if call.context.shares_kv:
            share_kv(SharedKV(layer, call.key, call.context, block))
        found = [part.correct(layer, call, block) for part in layer.parts.at["correct"]]
        corrections = [each for each in found if each is not None]
        summed = observed and not (corrections or block.kept or layer.policy.observes_rows)
        known = call.columns if summed else None
        if known is None or call.attended is None:
            return self._attend(layer, block, observed, corrections)
        if not known.give(layer, block):
            self._attend(layer, block, observed, corrections)
            known.note(layer, block)
        return call.attended

    def _attend(
        self, layer: SlotLayer, block: Block, observed: bool, corrections: Sequence[Correction]
    ) -> Tensor:
        call, corrected = self.call, bool(corrections)
        odd = corrected or _odd(layer, call)
        needs_norms = observed or call.context.norms is not None
        if needs_norms and not odd and can_count(layer, call, Family.ROWS):
            return count_block(layer, call, block, observed)
        if needs_norms and not corrected and can_sum(layer, call, block):
            return sum_block(layer, call, block)
        if not (observed or corrected):
            return attend_plain(layer, call, block) if call.attended is None else call.attended
        return explicit_block(layer, call, block, observed, corrections)

    def last_rows(self, layer: SlotLayer, block: Block) -> AttentionRows:
        """Weights of the last queries of the prompt, or the sum of their votes."""
        return last_rows(layer, self.call, block)

    def end(self, layer: SlotLayer, block: Block) -> Block | None:
        """Show the attended block to whoever takes note of it; None: it has been stored whole."""
        taken: Block | None = block
        for part in layer.parts.at["take_block"]:
            taken = part.take_block(layer, self.call, taken)
        return taken


def attend_plain(layer: SlotLayer, call: Call, block: Block) -> Tensor:
    """Attend a block whose weights are not asked for: (batch, heads, q_len, value_dim)."""
    if call.needs_weights:
        if not _odd(layer, call) and can_count(layer, call, Family.ROWS):
            return count_block(layer, call, block, False)
        return explicit_block(layer, call, block, False)
    masked = needs_mask(layer, call, block) and can_run(call, Family.ROWS, layer.window)
    if masked and not _odd(layer, call):
        return count_block(layer, call, block, False)
    return fused_block(layer, call, block)


def needs_mask(layer: SlotLayer, call: Call, block: Block) -> bool:
    """Whether `fused_block` has to make masks, with which sdpa may write all weights on a GPU."""
    if _runs_flash(layer, call):
        return False
    return layer.padded or layer.window is not None or block.kept > 0 or call.spans is not None


def _odd(layer: SlotLayer, call: Call) -> bool:
    """Whether queries see another part of the keys than all before them, or a sliding window."""
    return layer.chunked or call.spans is not None


def _runs_flash(layer: SlotLayer, call: Call) -> bool:
    flash = call.context.kernel == "flash_attention_2"
    return flash and not layer.padded and not _odd(layer, call)


def fused_block(layer: SlotLayer, call: Call, block: Block) -> Tensor:
    """Attend a block by a kernel that writes no weights: (batch, heads, q_len, value_dim)."""
    q_len, heads = call.q_len, call.query.shape[1]
    grouped = heads != call.key.shape[1]
    if _runs_flash(layer, call):
        return _flash_block(layer, call)
    if not needs_mask(layer, call, block):
        return functional.scaled_dot_product_attention(
            call.query, call.key, call.value, is_causal=True, scale=call.scale, enable_gqa=grouped
        )
    parts = []
    for start, stop in _chunks(layer, q_len, _MASKED_ROWS):
        low, high = _reach(layer, call, block, start, stop)
        mask = _visible(layer, call, block, start, stop, low, high)
        if mask.shape[1] > 1:
            mask = mask.expand(-1, -1, heads // mask.shape[1], -1, -1)
        parts.append(
            functional.scaled_dot_product_attention(
                call.query[:, :, start:stop],
                call.key[:, :, low:high],
                call.value[:, :, low:high],
                attn_mask=mask.flatten(1, 2),
                scale=call.scale,
                enable_gqa=grouped,
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _flash_block(layer: SlotLayer, call: Call) -> Tensor:
    """A block without padding in the flash-attn package, whose causal mask ends at the last key."""
    from flash_attn import flash_attn_func

    reach = (-1, -1) if layer.window is None else (layer.window - 1, 0)
    out = flash_attn_func(
        call.query.transpose(1, 2),
        call.key.transpose(1, 2),
        call.value.transpose(1, 2),
        softmax_scale=call.scale,
        causal=True,
        window_size=reach,
    )
    return out.transpose(1, 2)


def explicit_block(
    layer: SlotLayer,
    call: Call,
    block: Block,
    observed: bool,
    corrections: Sequence[Correction] = (),
) -> Tensor:
    """Attend a block by weights in full, chunk by chunk, which are shown to whoever observes."""
    parts = []
    valid = block.new >= 0 if layer.padded else None
    plain = not (layer.padded or _odd(layer, call))
    causal = plain and layer.window is None  # all but the chunk's own keys are visible
    watch = RowWatcher(layer, block) if observed else None
    for start, stop in _chunks(layer, call.q_len, _EXPLICIT_ROWS):
        low, high = _reach(layer, call, block, start, stop)
        visible = _visible(layer, call, block, start, stop, low, high)
        query, key = call.query[:, :, start:stop], call.key[:, :, low:high]
        unsure = visible[..., block.kept + start :] if causal else visible
        if not corrections:
            weights = call_weights(call, query, key, unsure)
            parts.append(weighted_values(weights, call.value[:, :, low:high]))
        else:
            weights, lse = call_weights_lse(call, query, key, unsure)
            out = weighted_values(weights, call.value[:, :, low:high])
            for correct in corrections:
                out = correct(query, out, lse, start)
            parts.append(out)
        if watch is not None:
            seen = None if valid is None else valid[:, start:stop]
            watch.see(make_rows(layer, weights, visible[:, :, 0], seen))
    if watch is not None:
        watch.end()
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _chunks(layer: SlotLayer, q_len: int, rows: int) -> list[tuple[int, int]]:
    if layer.window is not None:
        rows = min(rows, max(_EXPLICIT_ROWS, layer.window))
    return [(start, min(start + rows, q_len)) for start in range(0, q_len, rows)]


def _reach(layer: SlotLayer, call: Call, block: Block, start: int, stop: int) -> tuple[int, int]:
    """First and last key that a chunk of queries can see."""
    if call.spans is not None:
        return 0, call.key.shape[2]
    low = 0
    if layer.window is not None and not layer.padded:
        low = max(0, block.kept + start - layer.window + 1)
    return low, block.kept + stop


def _visible(
    layer: SlotLayer, call: Call, block: Block, start: int, stop: int, low: int, high: int
) -> Tensor:
    """Mask of a chunk: bool (batch or 1, kv_heads or 1, 1, rows, keys)."""
    if layer.padded or _odd(layer, call):
        positions = block.view.positions[:, :, low:high]
        if block.kept == 0:
            positions = positions[:, :1]  # no head has lost anything yet
        spans = None if call.spans is None else call.spans[:, start:stop]
        query = block.new[:, start:stop]
        chunked = layer.chunked
        return visible_keys(query, positions, layer.window, chunked=chunked, spans=spans)
    device = block.new.device
    query = torch.arange(block.kept + start, block.kept + stop, device=device)[:, None]
    key = torch.arange(low, high, device=device)
    visible = key <= query
    if layer.window is not None:
        visible &= key > query - layer.window
    return visible[None, None, None]


def attend_shared_kv(shared: SharedKV, call: Call) -> Tensor:
    """Attend to the keys that another layer shares.

    Args:
        call: of all new tokens of a prompt's block, or of its last ones.

    Returns:
        (batch, heads, q_len, value_dim).
    """
    if shared.stored is not None:
        return attend_codes(shared.layer, call, shared.stored, shared.visible).out
    if shared.block is None:
        return attend_unseen(call, shared.visible, explicit=call.needs_weights)
    earlier = shared.block.new.shape[1] - call.q_len
    new, kept = shared.block.new[:, earlier:], shared.block.kept + earlier
    return OwnBlock(call).attend(shared.layer, replace(shared.block, new=new, kept=kept), False)
