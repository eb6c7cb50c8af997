"""Turn a budget or a plan into the budget of each layer, and bytes into the largest budget in them.

Of a plan a run uses the tokens of its layers and the stages of its reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvtool.documents.plan import PlanDocument
from kvtool.errors import UsageError
from kvtool.model_shape import DTYPE_BYTES, LayerShape
from kvtool.planning.bytes import (
    Forecast,
    LayerBudget,
    Reading,
    Text,
    forecast,
    free_of,
    stored_bytes,
)
from kvtool.planning.rocketkv_stages import (
    LayerStages,
    pairs_of,
    planned_stages,
    sized_reader,
    tokens_left,
)
from kvtool.planning.search import largest_that_fits, least_allowed
from kvtool.planning.variants import Variant
from kvtool.policies.allocate.fixed import PlannedHeads, with_fixed_heads
from kvtool.policies.allocate.head_split import HeadSplit
from kvtool.policies.allocate.split import AllocatedSplit, tokens_for_prompt
from kvtool.policies.allocate.table import parse_allocator
from kvtool.policies.policy import Policy
from kvtool.sizes import DEFAULT_TOKENS, Budget


def in_dtype(layers: Sequence[LayerShape | None], dtype: str | None) -> list[LayerShape | None]:
    """Return the same layers with numbers of another dtype; None or an unknown one: as they are."""
    itemsize = DTYPE_BYTES.get(dtype or "")
    if itemsize is None:
        return list(layers)
    return [layer and replace(layer, itemsize=itemsize) for layer in layers]


def even_budgets(
    policy: Policy | None, tokens: int, layers: Sequence[LayerShape | None], text: Text
) -> list[LayerBudget]:
    """Return the budgets of layers that share a budget equally.

    Args:
        tokens: of each layer: stored, or read by a step where the policy's budget is that.

    Raises:
        UsageError: a budget too small for RocketKV's plan.
    """
    free, n, stored = free_of(layers), text.prompt, min(tokens, text.prompt)
    if policy is None or policy.reader is None or not free:
        return [LayerBudget(tokens)] * len(free)
    if policy.budget_is_traffic:
        stored = tokens_left(policy, tokens, n, text.new)
    return [_read_budget(policy, stored, tokens, n, free[0].key_dim, text.new)] * len(free)


def _read_budget(
    policy: Policy,
    stored: int,
    pairs: int,
    n: int,
    head_dim: int,
    new: int,
    stages: LayerStages | None = None,
) -> LayerBudget:
    """Return the budget of a layer that a reader reads; `pairs` where the budget is traffic."""
    assert policy.reader is not None, "the policy reads part of what it stores"
    length = n
    if not policy.budget_is_traffic:
        pairs, length = pairs_of(policy.reader), stored
    at_end = n if policy.select_only else stored
    reader = sized_reader(policy, pairs, length, at_end, head_dim, new, stages)
    return LayerBudget(stored, Reading(pairs, reader))


def planned_budgets(plan: PlanDocument, policy: Policy | None, n: int) -> list[LayerBudget]:
    """Return the budgets of a plan's free layers for a prompt of `n` tokens.

    Args:
        policy: None for one without numbers of its own, and the prompt that was planned for.
    """
    if policy is None:
        return [LayerBudget(plan.layers.tokens[i]) for i in plan.free_layers]
    tokens = tokens_for_prompt(plan, n)
    free = [tokens[i] for i in plan.free_layers]
    if policy.reader is None:
        return [LayerBudget(count) for count in free]
    new, head_dim, budgets = plan.target.max_new_tokens, plan.model.key_dim, []
    planned = planned_stages(plan, policy, n)
    for place, count in enumerate(free):
        stored, pairs, stages = min(count, n), count, None
        if planned is not None:
            pairs, stages = planned.pairs[place], planned.of_layer(place)
            stored = min(n, planned.kept[place]) if policy.two_stages else n
        elif policy.budget_is_traffic:
            stored = tokens_left(policy, pairs, n, new)
        budgets.append(_read_budget(policy, stored, pairs, n, head_dim, new, stages))
    return budgets


def planned_heads(policy: Policy, plan: PlanDocument) -> Policy:
    """Return the policy with the plan's split over heads, if it has one and the policy none.

    Raises:
        UsageError: the policy cannot split a budget over heads; a plan has budgets of heads, and
            the policy cannot hold them.
    """
    if plan.layers.heads is not None:
        planned = policy.head_split is not None and policy.head_split.fixed
        if planned or not policy.takes_budget:
            return policy
        heads = tuple(tuple(own) for own in plan.layers.heads if own is not None)
        return with_fixed_heads(policy, PlannedHeads(heads=heads, least=plan.layers.min_tokens))
    split = parse_allocator(plan.layers.allocator)
    if not isinstance(split, HeadSplit) or policy.head_split is not None:
        return policy
    keeps_equal = policy.when == "never" or policy.budget_is_traffic
    return policy if keeps_equal else replace(policy, heads=split)


def forecast_plan(
    plan: PlanDocument,
    policy: Policy | None,
    text: Text,
    layers: Sequence[LayerShape | None],
) -> Forecast:
    """Forecast what a cache that follows a plan holds and reads.

    Args:
        policy: None for one without numbers of its own.
        layers: what each layer of the model stores.
    """
    policy = policy and planned_heads(policy, plan)
    budgets = planned_budgets(plan, policy, text.prompt)
    return forecast(policy, layers, budgets, text)


def layer_budgets(
    variant: Variant, policy: Policy, layers: Sequence[LayerShape | None], text: Text
) -> list[LayerBudget]:
    """Return the budgets of the layers of free budget, as the cache fixes them for a prompt.

    Where a split follows from the prompt, it is the mean in every layer.

    Raises:
        UsageError: a budget that is too small for the policy.
    """
    budget = variant.budget
    if variant.plan is not None:
        return planned_budgets(variant.plan, policy, text.prompt)
    if budget is None:
        return even_budgets(policy, text.prompt, layers, text)
    if budget.bytes is not None:
        mean = tokens_for_bytes(policy, layers, text, budget.bytes)
    else:
        mean = budget.for_prompt(text.prompt)
        if mean < text.prompt:
            policy.check_budget(mean)
    free = len(free_of(layers))
    if policy.allocator is None or free == 0:
        return even_budgets(policy, mean, layers, text)
    split = AllocatedSplit(policy, free)
    if policy.allocator.metric is not None:
        return even_budgets(policy, mean, layers, text)
    return [LayerBudget(tokens) for tokens in split.for_prompt(mean, text.prompt)]


def tokens_for_bytes(
    policy: Policy, layers: Sequence[LayerShape | None], text: Text, size: int
) -> int:
    """Return the budget that holds no more than `size` bytes, equal in all layers.

    For a policy that stores everything, bytes only have to suffice, and the budget is the default
    of what is read. A policy that stores its budget holds no more whatever the prompt's length,
    except where KV heads keep whole prompts.

    Raises:
        UsageError: bytes too small for the policy.
    """
    widest = max((layer.window or 0 for layer in layers if layer is not None), default=0)

    def needed(tokens: int) -> int:
        longer = text
        if not policy.budget_is_traffic:  # the budget holds for any text, with every window full
            longer = replace(text, prompt=max(text.prompt, tokens, widest))
        return forecast(
            policy, layers, even_budgets(policy, tokens, layers, longer), longer
        ).storage

    if policy.stores_all:
        if needed(DEFAULT_TOKENS) > size:
            raise UsageError(
                f"budget {Budget(bytes=size)} is too small: `{policy}` stores everything, which "
                f"takes {needed(DEFAULT_TOKENS)} bytes"
            )
        return DEFAULT_TOKENS
    least, most = 1, max(1, 2 * size // _token_bytes(policy, layers))
    reader = policy.reader
    if reader is not None and policy.two_stages:
        most = max(text.full, reader.min_budget)
        least = least_allowed(needed, reader.min_budget, most)
    found = largest_that_fits(needed, size, least, most)
    if found is None:
        what = "one token" if least == 1 else f"a budget of {least}"
        raise UsageError(
            f"budget {Budget(bytes=size)} is too small: {what} in every layer takes "
            f"{needed(least)} bytes"
        )
    try:
        policy.check_budget(found)
    except UsageError as error:
        raise UsageError(f"budget {Budget(bytes=size)} is {found} tokens: {error}") from None
    return found


def _token_bytes(policy: Policy, layers: Sequence[LayerShape | None]) -> int:
    """Return the bytes of a token in all layers whose budget is free, 1 where there are none."""
    sizes = (layer.kv_heads * stored_bytes(layer, policy.codec) for layer in free_of(layers))
    return sum(sizes) or 1
