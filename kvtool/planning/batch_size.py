"""Find how many prompts at a time fit into a memory, from the configuration alone.

Counted are keys, values, positions and the score's numbers: what all layers hold, and the block of
the prompt that runs through one of them. Weights, activations and stored evicted tokens are not.
Where heads keep different counts, stores are filled to 7/8 at least, and counted as such.
"""

from __future__ import annotations

from typing import Any

from kvtool.errors import KvtoolError
from kvtool.model_shape import LayerShape, layer_shapes
from kvtool.planning.budgets import even_budgets, forecast_plan
from kvtool.planning.bytes import Text, forecast, tokens_held
from kvtool.planning.peak import SPARE, reading_bytes
from kvtool.planning.variants import Variant
from kvtool.policies.allocate.split import AllocatedSplit, PlannedSplit
from kvtool.sizes import parse_prefill


def prompt_bytes(config: Any, dtype: str, variant: Variant, n: int, new: int) -> int:
    """Return the most bytes that one prompt takes while it is read and continued.

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
    layers = layer_shapes(config, dtype)
    kept = _kept(variant, layers, n)
    block = parse_prefill(variant.prefill) or n
    policy = variant.policy
    before = reading_bytes(policy, layers, kept, n, block, waits=variant.cuts_at_the_end)
    spare = SPARE if policy.head_split is not None else 1
    return max(before, int(_held(variant, layers, n, new) * spare))


def _held(variant: Variant, layers: list[LayerShape | None], n: int, new: int) -> int:
    """Return what is held of a prompt from the end of its prompt on."""
    text = Text(n, new)
    if variant.plan is not None and variant.budget is not None:
        return forecast_plan(variant.plan, variant.policy, text, layers).storage
    tokens = n if variant.budget is None else variant.budget.for_prompt(n)
    budgets = even_budgets(variant.policy, tokens, layers, text)
    return forecast(variant.policy, layers, budgets, text).storage


def largest_batch(config: Any, dtype: str, variant: Variant, n: int, new: int, memory: int) -> int:
    """Return how many prompts fit.

    Args:
        memory: bytes.

    Raises:
        KvtoolError: not even one.
    """
    alone = prompt_bytes(config, dtype, variant, n, new)
    if alone > memory:
        raise KvtoolError(
            f"a memory of {memory} bytes is too small: one row of {n} + {new} tokens takes {alone}"
        )
    return memory // alone


def _kept(variant: Variant, layers: list[LayerShape | None], n: int) -> list[int]:
    """Return the tokens of each layer when the prompt has been read."""
    free = sum(layer is not None and layer.window is None for layer in layers)
    if variant.budget is None:
        of_free = [n] * free
    elif variant.plan is not None:
        of_free = PlannedSplit(variant.plan).for_prompt(0, n)
    elif variant.budget.bytes is not None:
        raise KvtoolError(
            f"a budget of {variant.budget} is that of all rows, so no batch follows from it",
            hint="give the budget in tokens or as a share",
        )
    else:
        mean = variant.budget.for_prompt(n)
        allocator = variant.policy.allocator
        even = allocator is None or allocator.metric is not None  # whose sum is known beforehand
        of_free = (
            [mean] * free if even else AllocatedSplit(variant.policy, free).for_prompt(mean, n)
        )
    tokens = iter(of_free)
    return [
        min(n, next(tokens)) if layer is not None and layer.window is None else held
        for layer, held in zip(layers, tokens_held(layers, n), strict=True)
    ]
