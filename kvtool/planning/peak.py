"""The most memory that a run takes at a time: a bound for the cache, an estimate for the rest.

While a prompt is read, the layers before the running one hold what they keep, and the running one
holds its block beside what it keeps; that much is bounded. What a layer computes with is estimated
by the tensors of a Llama layer: the larger of its attention and its MLP, and the stream of hidden
states beside. What a device's own libraries take, and what its allocator leaves unused, is not in
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kvtool.model_shape import LayerShape
from kvtool.planning.bytes import Text, free_of, grown, of_layers, range_bytes, slot_bytes
from kvtool.policies.parts import Evidence
from kvtool.sizes import LONG_PROMPT

if TYPE_CHECKING:
    from kvtool.policies.codec.codec import Codec
    from kvtool.policies.policy import Policy

SPARE = 8 / 7
"""What is allocated for heads of unequal counts, over what they hold: they fill 7/8 at least."""

_ROWS = 128  # queries whose attention weights are computed at a time where they are looked at
_TILES = 4 * 2**20  # bytes of the tiles in which the weights of a whole prompt are summed
_FLOAT = 4  # bytes of a number of attention weights and of logits
_AROUND = 64  # tokens that go before a repetition: the instruction, and what leads to it
_PLACES = 24  # bytes of a token's id and position
_COMPETING = 48  # bytes of each slot of all layers while these compete (`Joint.tokens_of`)


def reading_bytes(
    policy: Policy,
    layers: Sequence[LayerShape | None],
    kept: Sequence[int],
    n: int,
    block: int,
    *,
    waits: bool,
) -> int:
    """Bound the bytes of keys, values and numbers of one sequence while its prompt is read.

    Args:
        kept: tokens of the prompt that each layer keeps.
        n: tokens of the prompt.
        block: tokens that are read at a time.
        waits: whether layers of free budget are cut only once all of them have read the prompt.
    """
    sizes = _slot_sizes(layers, policy, policy.codec)
    # with the block, in the model's dtype
    joined = sizes if policy.codec is None else _slot_sizes(layers, policy, None)
    whole_prompt = block >= n
    block = n if waits else min(block, n)
    whole = _appended(block, block, n - block)  # slots where a prompt is kept as it comes
    reading = [
        whole if k == n or (waits and layer is not None and layer.window is None) else k
        for k, layer in zip(kept, layers, strict=True)
    ]
    running = max(size * (k + block) for size, k in zip(joined, kept, strict=True))
    running += _moments_bytes(policy, layers, whole=whole_prompt)
    before = sum(size * k for size, k in zip(sizes, reading, strict=True)) + running
    return int(before * (SPARE if policy.head_split is not None else 1))


def repeating_bytes(
    policy: Policy, layers: Sequence[LayerShape | None], slots: Sequence[int], n: int, block: int
) -> tuple[int, int, int]:
    """Count the bytes of one sequence whose prompt is read, repeated and cut block by block.

    Args:
        slots: tokens that each layer holds before a cut, in the mean over all that compete.
        n: tokens of the prompt, all of which a layer may come to hold.
        block: of the longest block.

    Returns:
        What is stored, to the byte where no buffers grow; at most what one layer attends to: a copy
        of its slots beside a block or its repetition, in the model's dtype; and what the slots of
        all layers take beside their own while they compete.
    """
    sizes = _slot_sizes(layers, policy, policy.codec, more=1)
    ranges = of_layers(layers, lambda layer: range_bytes(layer, policy.codec))
    stored = sum(size * k for size, k in zip(sizes, slots, strict=True)) + sum(ranges)
    joined = max(of_layers(layers, lambda layer: layer.bytes))
    attended = joined * (min(n, sum(slots)) + block + _AROUND)
    heads = of_layers(layers, lambda layer: layer.kv_heads if layer.window is None else 0)
    competing = _COMPETING * sum(own * k for own, k in zip(heads, slots, strict=True))
    joint = policy.head_split is not None and policy.head_split.across_layers
    return stored, attended, competing if joint else 0


def _moments_bytes(policy: Policy, layers: Sequence[LayerShape | None], *, whole: bool) -> int:
    """Count what is held of queries: in full of the running layer, or of all if more blocks come.

    Args:
        whole: whether the prompt is one block.
    """
    asked, free = policy.moments, free_of(layers)
    if asked is None or not free:
        return 0
    held = [asked.held_bytes(layer, reading=not whole) for layer in free]
    return sum(held[1:]) + asked.held_bytes(free[0], reading=True)


def _slot_sizes(
    layers: Sequence[LayerShape | None], policy: Policy, codec: Codec | None, more: int = 0
) -> list[int]:
    """Return the bytes of a slot in all heads of each layer, with `more` numbers than usual."""
    numbers = len(policy.statistics) + more
    return of_layers(layers, lambda layer: layer.kv_heads * slot_bytes(layer, numbers, codec))


@lru_cache
def _appended(slots: int, step: int, tokens: int) -> int:
    """Return the slots of a full buffer once `tokens` more were appended by `step`s."""
    used, most = slots, slots + tokens
    while used < most:
        used = min(used + step, most)
        if used > slots:
            slots = grown(slots, used)
    return slots


def computing_bytes(
    config: Any,
    layers: Sequence[LayerShape | None],
    policy: Policy,
    text: Text,
    *,
    block: int,
    keys: int,
    first: int,
) -> int:
    """Estimate the bytes that a forward computes with, all sequences together.

    Args:
        config: a transformers configuration.
        block: tokens that run through the model at a time.
        keys: tokens that a layer attends to at most.
        first: tokens that the first layer keeps.
    """
    decoder = config.get_text_config(decoder=True)
    stored = [layer for layer in layers if layer is not None]
    hidden, itemsize = decoder.hidden_size, stored[0].itemsize
    attention = max(
        3 * layer.heads * layer.key_dim + 4 * layer.kv_heads * layer.key_dim for layer in stored
    )
    numbers = 3 * hidden + max(3 * _inner(decoder), attention) + 2 * stored[0].key_dim
    bytes_per_token = numbers * itemsize + _PLACES
    rows = _explicit_rows(policy, block, keys, first)
    heads = max(layer.heads for layer in stored)
    weights = 2 * rows * keys * heads * _FLOAT * text.sequences  # and their softmax
    if block == keys >= LONG_PROMPT and _summed_in_tiles(decoder, policy, stored):
        weights = min(weights, _TILES)
    repeated = keys * heads * stored[0].token_bytes if 1 < block < keys else 0  # beside a mask
    if repeated and policy.repetition is not None:  # whose weights are of the block and on it
        weights = 4 * min(_ROWS, block) * (block + _AROUND) * heads * _FLOAT * text.sequences
    attending = text.sequences * repeated + weights
    choosing = text.sequences * max(policy.score.choosing_bytes(each, keys) for each in stored)
    judged = block if policy.score.layer_tokens == "same" else 1
    logits = 2 * judged * (text.vocabulary or decoder.vocab_size) * _FLOAT
    return text.sequences * (block * bytes_per_token + logits) + max(attending, choosing)


def _summed_in_tiles(decoder: Any, policy: Policy, stored: Sequence[LayerShape]) -> bool:
    """Return whether the weights of a whole prompt are added to sums tile by tile, row by row."""
    plain = all(layer.window is None and layer.key_dim == layer.value_dim for layer in stored)
    capped = getattr(decoder, "attn_logit_softcapping", None) is not None
    asked = policy.observes_rows or policy.on_evict is not None
    return plain and not capped and not asked and policy.needs_all_rows


def _explicit_rows(policy: Policy, block: int, keys: int, first: int) -> int:
    """Count the queries whose attention weights exist at a time."""
    rows = 0
    if policy.needs_all_rows or policy.on_evict is not None:
        rows = min(block, max(_ROWS, policy.shown_queries))
    if policy.score.evidence is Evidence.LAST_ROWS and block > 1:
        rows = max(rows, min(policy.score.voters(first), block, keys))
    return rows


def _inner(decoder: Any) -> int:
    """Return the numbers of a token inside an MLP, of all experts that it is sent to."""
    dense = getattr(decoder, "intermediate_size", None) or 4 * decoder.hidden_size
    if isinstance(dense, (list, tuple)):
        dense = max(dense)
    expert = getattr(decoder, "moe_intermediate_size", None) or 0
    return max(dense, expert * (getattr(decoder, "num_experts_per_tok", None) or 1))
