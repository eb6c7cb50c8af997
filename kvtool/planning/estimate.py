"""Estimate the bytes that a variant holds, and needs for a prompt, from the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvtool.documents.memory import CacheMemory, DeviceMemory
from kvtool.errors import KvtoolError, UsageError
from kvtool.model_shape import LayerShape, layer_shapes
from kvtool.planning.budgets import layer_budgets, planned_heads, tokens_for_bytes
from kvtool.planning.bytes import (
    LayerBudget,
    Text,
    check_dims,
    forecast,
    free_of,
    kv_bytes,
    tokens_held,
)
from kvtool.planning.peak import SPARE, computing_bytes, reading_bytes, repeating_bytes
from kvtool.planning.variants import Variant
from kvtool.policies.policy import Policy, reads_whole
from kvtool.sizes import DEFAULT_BLOCK, longest_block, parse_prefill


@dataclass(frozen=True)
class _Counted:
    """What a variant holds of a text.

    Attributes:
        stored: tokens of the prompt that each layer stores.
        slots: the same while the prompt is read.
        kv, held: bytes of keys and values, and of all, at most from the end of the prompt on.
        block: tokens of the prompt that run through the model at a time.
        waits: whether layers are cut only once all of them have read the prompt.
        reading, cutting: bytes of one sequence while the prompt is read, and while it is cut.
    """

    layers: list[LayerShape | None]
    policy: Policy
    budgets: list[LayerBudget]
    stored: list[int]
    slots: list[int]
    kv: int
    held: int
    block: int
    waits: bool
    reading: int
    cutting: int


def _count(config: Any, dtype: str, variant: Variant, text: Text) -> _Counted:
    layers, policy, n = layer_shapes(config, dtype), variant.policy, text.prompt
    check_dims(policy, layers)
    if variant.plan is not None:
        policy = planned_heads(policy, variant.plan)
    budgets = layer_budgets(variant, policy, layers, text)
    in_blocks = (parse_prefill(variant.prefill) or n) < n
    # the last token is never fed; only where a prompt of known length came at once has it a slot
    fed = text.new - 1 if in_blocks and text.new and policy.when == "never" else text.new
    found = forecast(policy, layers, budgets, replace(text, new=fed))
    keeps_all = policy.when == "never" or policy.select_only
    stored = _of_all(layers, [n if keeps_all else min(each.tokens, n) for each in budgets], n)
    split = policy.head_split  # a plan that fixes the counts of heads is kept to the byte
    spare = SPARE if split is not None and not split.fixed else 1
    block = _block(variant, policy, stored, n)
    ends = policy.two_stages and block < n and not policy.select_only  # is cut at the prompt's end
    waits = variant.cuts_at_the_end or ends
    more = 0 if policy.cuts is None else policy.spare  # slots of tokens that are cut together
    slots = [min(n, tokens + more) for tokens in stored]
    if policy.repetition is not None and not waits:
        slots = _of_all(layers, [min(n, each.tokens + block) for each in budgets], n)
        own, attended, competing = repeating_bytes(policy, layers, slots, n, block)
        most = own + attended, own + competing
    else:
        most = (reading_bytes(policy, layers, slots, n, block, waits=waits),) * 2
    kv, held = int(found.keys_values * spare), int(found.storage * spare)
    return _Counted(layers, policy, budgets, stored, slots, kv, held, block, waits, *most)


def row_bytes(model: Any, variant: Variant, tokens: int, new: int) -> int:
    """Forecast what a model's cache holds of one prompt and its answer, policy state included."""
    config, dtype = model.config, str(model.dtype).removeprefix("torch.")
    text = Text(tokens, new, 1, config.get_text_config(decoder=True).vocab_size)
    unknown = DeviceMemory(device="", free_bytes=None, weights_bytes=None)
    found = estimate_memory(config, dtype, variant, text, unknown)
    return found.kv_bytes + found.state_bytes


def estimate_memory(
    config: Any, dtype: str, variant: Variant, text: Text, memory: DeviceMemory
) -> CacheMemory:
    """Forecast what a variant holds of a prompt and its answer, and estimate what it needs.

    Args:
        config: a transformers configuration.
        dtype: of the cache, by name; `auto` is the checkpoint's own.
        text: the prompt, the answer and the sequences.
        memory: what is free, and what the weights take of it.

    Raises:
        UsageError: a budget that is too small for the policy; heads that its codec cannot store.
    """
    cut = text.cut_by(variant.policy)
    found = _count(config, dtype, variant, cut)
    layers, policy, budgets = found.layers, found.policy, found.budgets
    reads = None
    if policy.budget_is_traffic:
        pairs = [each.reading.pairs if each.reading else each.tokens for each in budgets]
        reads = _of_all(layers, pairs, text.prompt)
    host = _on_host(policy, layers, budgets, cut)
    peak = memory.weights_bytes
    if peak is not None:
        peak += _peak(config, found, cut)
        peak += host // max(1, len(budgets))  # of a layer, fetched to be attended to
        peak += host if memory.device == "cpu" else 0
    return CacheMemory(
        prompt_tokens=text.prompt,
        new_tokens=text.new,
        tokens=found.stored,
        reads=reads,
        kv_bytes=found.kv,
        state_bytes=found.held - found.kv,
        host_bytes=host,
        full_bytes=kv_bytes(layers, tokens_held(layers, text.full)) * text.sequences,
        peak_bytes=peak,
        fits=memory.holds(peak),
    )


def _of_all(layers: Sequence[LayerShape | None], of_free: Sequence[int], n: int) -> list[int]:
    """Put what windows keep of `n` tokens among the numbers of the free layers."""
    rest = iter(of_free)
    return [
        next(rest) if layer is not None and layer.window is None else held
        for layer, held in zip(layers, tokens_held(layers, n), strict=True)
    ]


def _on_host(
    policy: Policy,
    layers: Sequence[LayerShape | None],
    budgets: Sequence[LayerBudget],
    text: Text,
) -> int:
    if policy.on_evict is None:
        return 0
    free = free_of(layers)
    grows = text.new if policy.when == "always" else 0
    return text.sequences * sum(
        policy.on_evict.host_bytes(layer, max(0, text.prompt + grows - budget.tokens))
        for layer, budget in zip(free, budgets, strict=True)
    )


def _block(variant: Variant, policy: Policy, stored: Sequence[int], n: int) -> int:
    """Return the tokens of a prompt that run through the model at a time."""
    block = parse_prefill(variant.prefill)
    if reads_whole(policy, planned=variant.plan is not None):
        block = None
    if policy.score.layer_tokens == "same":  # whose logits are judged block by block
        block = min(block or DEFAULT_BLOCK, max(1, min(stored) // 2))
    block = min(block or n, n)
    return block if policy.repetition is None else longest_block(n, block)


def reading_of(config: Any, dtype: str, variant: Variant, text: Text) -> int:
    """Forecast the bytes of keys, values and numbers while prompts are read, at most."""
    found = _count(config, dtype, variant, text)
    return max(found.reading, found.cutting) * text.sequences


def _peak(config: Any, found: _Counted, text: Text) -> int:
    """Return the most that lives at a time: while the prompt is read, or while it is answered."""
    n, given, first = text.prompt, (config, found.layers, found.policy, text), found.stored[0]
    whole = found.waits or found.policy.repetition is not None  # a head may keep all
    seen = n if whole else min(n, max(found.slots) + found.block)
    computing = computing_bytes(*given, block=found.block, keys=seen, first=first)
    turn = text.later if found.block == n else min(text.later, found.block)
    keys = max(found.slots) + text.new
    answering = computing_bytes(*given, block=max(1, turn), keys=keys, first=first)
    reading = max(found.reading * text.sequences + computing, found.cutting * text.sequences)
    return max(reading, found.held + answering)


def bytes_held(config: Any, dtype: str, variant: Variant, prompt: int) -> int:
    """Return the bytes of the keys and values of one prompt when it has been read.

    Layers with a sliding window hold at most their window. Answers are not counted.

    Args:
        config: a transformers configuration.
        dtype: of the cache, by name; `auto` is the checkpoint's own.
        prompt: tokens.

    Raises:
        UsageError: the policy's protected tokens alone fill what the budget means here, or bytes
            are too few.
    """
    vocabulary = config.get_text_config(decoder=True).vocab_size
    try:
        found = _count(config, dtype, variant, Text(prompt, vocabulary=vocabulary))
    except UsageError as error:
        by_share = variant.budget is not None and variant.budget.ratio is not None
        of = f"{variant.budget} of {prompt} tokens: " if by_share else ""
        raise UsageError(f"{variant.name}: {of}{error}") from None
    return kv_bytes(found.layers, found.stored, variant.policy.codec)


def check_bytes(config: Any, dtype: str, variants: Sequence[Variant]) -> None:
    """Refuse codecs that cannot store the model's heads, and budgets in bytes that are too small.

    Too small are those that hold no token, or only those that the policy always keeps.

    Raises:
        UsageError: the first such codec or budget.
    """
    layers = layer_shapes(config, dtype)
    text = Text(0, vocabulary=config.get_text_config(decoder=True).vocab_size)
    free = free_of(layers)
    for variant in variants:
        check_dims(variant.policy, layers)
        if free and variant.budget is not None and variant.budget.bytes is not None:
            tokens_for_bytes(variant.policy, layers, text, variant.budget.bytes)


def prompt_bytes(config: Any, dtype: str, variant: Variant, n: int, new: int) -> int:
    """Return the most bytes that one prompt takes while it is read and continued.

    Counted are keys, values, positions and the score's numbers. Weights, activations and stored
    evicted tokens are not.

    Args:
        config: a transformers configuration.
        dtype: of the cache, by name.
        n: tokens of the prompt.
        new: tokens that are decoded.

    Raises:
        KvtoolError: a budget in bytes, which is one of the whole batch; a reader, whose tables
            are not counted.
    """
    if variant.policy.reader is not None:
        raise KvtoolError(
            f"`{variant.policy.name}` stores tables beside its keys, "
            "which no batch is computed for",
            hint="give the batch itself: batch: [1, 4, 16]",
        )
    if variant.plan is None and variant.budget is not None and variant.budget.bytes is not None:
        raise KvtoolError(
            f"a budget of {variant.budget} is that of all rows, so no batch follows from it",
            hint="give the budget in tokens or as a share",
        )
    found = _count(config, dtype, variant, Text(n, new))
    return max(found.reading, found.cutting, found.held)


def largest_batch(config: Any, dtype: str, variant: Variant, n: int, new: int, memory: int) -> int:
    """Return how many prompts fit into a memory in bytes; arguments and errors as `prompt_bytes`.

    Raises:
        KvtoolError: not even one.
    """
    alone = prompt_bytes(config, dtype, variant, n, new)
    if alone > memory:
        raise KvtoolError(
            f"a memory of {memory} bytes is too small: one row of {n} + {new} tokens takes {alone}"
        )
    return memory // alone
