"""Attention of a block by the kernel that fits: fused, flash, Triton, or weights in full.

Queries go in chunks, so that nothing of size prompt x prompt is ever held.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.cache.steps.attend import call_weights, call_weights_lse
from kvtool.cache.steps.attend_triton import can_count, can_run, count_block
from kvtool.cache.steps.block import Block, RowWatcher, store_block
from kvtool.cache.steps.call import Call
from kvtool.cache.steps.last_rows import last_of_prompt, last_rows
from kvtool.cache.steps.moments import add_queries
from kvtool.cache.steps.rope_shift import shift_block
from kvtool.cache.steps.shared_kv import SharedKV, share_kv
from kvtool.cache.steps.sum_block import can_sum, sum_block
from kvtool.cache.steps.view import make_rows
from kvtool.cache.storage.calibration import Calibration
from kvtool.cache.storage.last_queries import LastQueries
from kvtool.cache.storage.layer import SlotLayer
from kvtool.cache.storage.query_window import QueryWindow
from kvtool.kernels.kind import Family
from kvtool.maths.attention import visible_keys, weighted_values
from kvtool.policies.attention_rows import AttentionRows

_EXPLICIT_ROWS = 128  # queries whose weights are held at a time
_MASKED_ROWS = 1024  # queries whose boolean mask is held at a time


@dataclass(frozen=True)
class OwnBlock:
    """A block that kvtool attends by itself."""

    call: Call

    @property
    def positions(self) -> Tensor | None:
        """(batch, q_len), -1 = padding; None: nothing is padded."""
        return self.call.positions

    @property
    def value(self) -> Tensor:
        """Values as they are attended, (batch, heads of the attention, slots, value_dim)."""
        return self.call.value

    @property
    def raw(self) -> tuple[Tensor, Tensor]:
        """Keys and values as they are stored, (batch, kv_heads, slots, dim)."""
        return self.call.raw_key, self.call.raw_value

    def placed(self, layer: SlotLayer, block: Block) -> OwnBlock:
        """The same with keys and queries at their places among the kept tokens."""
        return OwnBlock(shift_block(layer, self.call, block)) if layer.parts else self

    def attend(self, layer: SlotLayer, block: Block, observed: bool) -> Tensor:
        """Attend, and show all rows to whoever observes: (batch, heads, q_len, value_dim)."""
        call, calibration = self.call, Calibration.of(layer)
        if call.context.shares_kv:
            share_kv(SharedKV(layer, call.key, call.context, block))
        if calibration is not None:
            calibration.set_scale(call.scale, call.softcap)
            calibration.begin_block(call.query, call.value.shape[-1], block.new)
        corrected = calibration is not None and calibration.active
        summed = observed and not (corrected or block.kept or layer.policy.observes_rows)
        known = call.columns if summed else None
        if known is None or call.attended is None:
            return self._attend(layer, block, observed, corrected)
        if not known.give(layer, block):
            self._attend(layer, block, observed, corrected)
            known.note(layer, block)
        return call.attended

    def _attend(self, layer: SlotLayer, block: Block, observed: bool, corrected: bool) -> Tensor:
        call = self.call
        odd = corrected or _odd(layer, call)
        if observed and not odd and can_count(layer, call, Family.ROWS):
            return count_block(layer, call, block, observed)
        needs_norms = observed or call.context.norms is not None
        if needs_norms and not corrected and can_sum(layer, call, block):
            return sum_block(layer, call, block)
        if not (observed or corrected):
            return attend_plain(layer, call, block) if call.attended is None else call.attended
        return explicit_block(layer, call, block, observed)

    def last_rows(self, layer: SlotLayer, block: Block) -> AttentionRows:
        """Weights of the last queries of the prompt, or the sum of their votes."""
        return last_rows(layer, self.call, block)

    def show_queries(self, layer: SlotLayer, block: Block) -> None:
        """Show the block's queries to a policy that looks back from them, or goes by all."""
        add_queries(layer, self.call, block)
        window = QueryWindow.of(layer)
        if window is not None:
            window.see(self.call.query, block.new, self.call.scale, self.call.softcap)

    def postpone(self, layer: SlotLayer, block: Block) -> Block | None:
        """Take in a block of a prompt that is cut once.

        Returns:
            None where the prompt goes on: it is stored whole, and its last queries are kept. At its
            end the block, counting the kept queries as its own.
        """
        last = LastQueries.of(layer)
        if last is None:
            return block
        if not self.call.context.last:
            last.keep(*last_of_prompt(layer, self.call, block))
            store_block(layer, block, *self.raw)
            return None
        if last.positions is None:
            return block
        positions = last.positions
        count = (positions >= 0).sum(1)[:, None, None] if layer.padded else positions.shape[1]
        return replace(block, view=replace(block.view, block=block.view.block + count))


def attend_plain(layer: SlotLayer, call: Call, block: Block) -> Tensor:
    """Attend a block whose weights nobody wants: (batch, heads, q_len, value_dim)."""
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


def explicit_block(layer: SlotLayer, call: Call, block: Block, observed: bool) -> Tensor:
    """Attend a block by weights in full, chunk by chunk, which are shown to whoever observes."""
    parts = []
    valid = block.new >= 0 if layer.padded else None
    plain = not (layer.padded or _odd(layer, call))
    causal = plain and layer.window is None  # all but the chunk's own keys are visible
    watch = RowWatcher(layer, block) if observed else None
    calibration = Calibration.of(layer)
    if calibration is not None and not calibration.active:
        calibration = None
    for start, stop in _chunks(layer, call.q_len, _EXPLICIT_ROWS):
        low, high = _reach(layer, call, block, start, stop)
        visible = _visible(layer, call, block, start, stop, low, high)
        query, key = call.query[:, :, start:stop], call.key[:, :, low:high]
        unsure = visible[..., block.kept + start :] if causal else visible
        if calibration is None:
            weights = call_weights(call, query, key, unsure)
            parts.append(weighted_values(weights, call.value[:, :, low:high]))
        else:
            weights, lse = call_weights_lse(call, query, key, unsure)
            out = weighted_values(weights, call.value[:, :, low:high])
            parts.append(calibration.correct_block(query, out, lse, start))
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
