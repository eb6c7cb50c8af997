"""Estimate the bytes that a variant holds, and needs for a prompt, from the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvtool.documents.memory import CacheMemory, DeviceMemory
from kvtool.errors import UsageError
from kvtool.model_shape import LayerShape, layer_shapes
from kvtool.planning.budgets import even_budgets, planned_budgets, planned_heads, tokens_for_bytes
from kvtool.planning.bytes import LayerBudget, Text, check_dims, forecast, kv_bytes, tokens_held
from kvtool.planning.peak import SPARE, computing_bytes, reading_bytes
from kvtool.planning.rocketkv_stages import tokens_left
from kvtool.planning.variants import Variant
from kvtool.policies.allocate.split import AllocatedSplit
from kvtool.policies.policy import Policy, reads_whole
from kvtool.sizes import DEFAULT_BLOCK, Budget, parse_prefill


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
    layers, policy = layer_shapes(config, dtype), variant.policy
    check_dims(policy, layers)
    if variant.plan is not None:
        policy = planned_heads(policy, variant.plan)
    budgets = layer_budgets(variant, policy, layers, text)
    in_blocks = (parse_prefill(variant.prefill) or text.prompt) < text.prompt
    # the last token is never fed; only where a prompt of known length came at once has it a slot
    fed = text.new - 1 if in_blocks and text.new and policy.when == "never" else text.new
    found = forecast(policy, layers, budgets, replace(text, new=fed))
    stored = _of_all(layers, [_stored(policy, each, text) for each in budgets], text.prompt)
    reads = None
    if policy.budget_is_traffic:
        pairs = [each.reading.pairs if each.reading else each.tokens for each in budgets]
        reads = _of_all(layers, pairs, text.prompt)
    split = policy.head_split  # a plan that fixes the counts of heads is kept to the byte
    spare = SPARE if split is not None and not split.fixed else 1
    kv = int(found.keys_values * spare)
    held = int(found.storage * spare)
    host = _on_host(policy, layers, budgets, text)
    peak = memory.weights_bytes
    if peak is not None:
        peak += _peak(config, layers, variant, policy, stored, held, text)
        peak += host // max(1, len(budgets))  # of a layer, fetched to be attended to
        peak += host if memory.device == "cpu" else 0
    return CacheMemory(
        prompt_tokens=text.prompt,
        new_tokens=text.new,
        tokens=stored,
        reads=reads,
        kv_bytes=kv,
        state_bytes=held - kv,
        host_bytes=host,
        full_bytes=kv_bytes(layers, tokens_held(layers, text.full)) * text.sequences,
        peak_bytes=peak,
        fits=memory.holds(peak),
    )


def layer_budgets(
    variant: Variant, policy: Policy, layers: Sequence[LayerShape | None], text: Text
) -> list[LayerBudget]:
    """Return the budgets of the layers of free budget, as the cache fixes them for a prompt.

    Where a split follows from the prompt, it is the mean in every layer.

    Raises:
        UsageError: a budget that is too small for the policy.
    """
    if variant.plan is not None:
        return planned_budgets(variant.plan, policy, text.prompt)
    if variant.budget is None:
        return even_budgets(policy, text.prompt, layers, text)
    if variant.budget.bytes is not None:
        mean = tokens_for_bytes(policy, layers, text, variant.budget.bytes)
    else:
        mean = variant.budget.for_prompt(text.prompt)
        if mean < text.prompt:
            policy.check_budget(mean)
    free = sum(layer is not None and layer.window is None for layer in layers)
    allocator = policy.allocator
    if allocator is None or free == 0:
        return even_budgets(policy, mean, layers, text)
    split = AllocatedSplit(policy, free)
    if allocator.metric is not None:
        return even_budgets(policy, mean, layers, text)
    return [LayerBudget(tokens) for tokens in split.for_prompt(mean, text.prompt)]


def _stored(policy: Policy, budget: LayerBudget, text: Text) -> int:
    """Return the tokens of a prompt that a layer stores, per KV head in the mean."""
    keeps_all = policy.when == "never" or policy.select_only
    return text.prompt if keeps_all else min(budget.tokens, text.prompt)


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
    free = [layer for layer in layers if layer is not None and layer.window is None]
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
    return min(block or n, n)


def _peak(
    config: Any,
    layers: Sequence[LayerShape | None],
    variant: Variant,
    policy: Policy,
    stored: Sequence[int],
    held: int,
    text: Text,
) -> int:
    """Return the most that lives at a time: while the prompt is read, or while it is answered."""
    n, block = text.prompt, _block(variant, policy, stored, text.prompt)
    ends = policy.two_stages and block < n and not policy.select_only  # is cut at the prompt's end
    waits = variant.cuts_at_the_end or ends
    more = 0 if policy.cuts is None else policy.spare  # slots of tokens that are cut together
    slots, first = [min(n, tokens + more) for tokens in stored], stored[0]
    reading = reading_bytes(policy, layers, slots, n, block, waits=waits)
    seen = n if waits else max(slots) + block
    computing = computing_bytes(
        config, layers, policy, text, block=block, keys=min(seen, n), first=first
    )
    seen = max(slots) + text.new
    answering = computing_bytes(config, layers, policy, text, block=1, keys=seen, first=first)
    return max(reading * text.sequences + computing, held + answering)


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
    layers, kept = layer_shapes(config, dtype), None
    if variant.budget is not None:
        vocabulary = config.get_text_config(decoder=True).vocab_size
        kept = _tokens(variant, variant.budget, layers, vocabulary, prompt)
        _check(variant, kept, prompt)
        if variant.policy.budget_is_traffic:
            kept = _stored_of_read(variant, kept, prompt)
    return kv_bytes(layers, tokens_held(layers, prompt, kept), variant.policy.codec)


def check_bytes(config: Any, dtype: str, variants: Sequence[Variant]) -> None:
    """Refuse codecs that cannot store the model's heads, and budgets in bytes that are too small.

    Too small are those that hold no token, or only those that the policy always keeps.

    Raises:
        UsageError: the first such codec or budget.
    """
    layers = layer_shapes(config, dtype)
    for variant in variants:
        check_dims(variant.policy, layers)
        if variant.budget is not None and variant.budget.bytes is not None:
            bytes_held(config, dtype, variant, prompt=0)


def _tokens(
    variant: Variant,
    budget: Budget,
    layers: list[LayerShape | None],
    vocabulary: int,
    prompt: int,
) -> int:
    """Return the tokens or pairs of each layer without a window, as the cache fixes them."""
    if budget.bytes is None:
        return budget.for_prompt(prompt)
    if all(layer is None or layer.window is not None for layer in layers):
        return prompt
    text = Text(prompt, vocabulary=vocabulary)
    return tokens_for_bytes(variant.policy, layers, text, budget.bytes)


def _stored_of_read(variant: Variant, pairs: int, prompt: int) -> int:
    """Return what is stored of a prompt where the budget is what a decoded token reads."""
    if variant.policy.select_only:
        return prompt
    return tokens_left(variant.policy, pairs, prompt, 0)


def _check(variant: Variant, kept: int, prompt: int) -> None:
    """Refuse what a budget means here, if the policy's protected tokens fill it."""
    budget = variant.budget
    if budget is None or budget.tokens is not None:
        return  # checked already
    try:
        variant.policy.check_budget(kept)
    except UsageError as error:
        means = f"{budget} of {prompt} tokens" if budget.ratio else f"{budget} is {kept} tokens"
        raise UsageError(f"{variant.name}: {means}: {error}") from None
