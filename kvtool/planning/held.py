"""Estimate the bytes that a run with a budget or a plan will hold, and find the budget for bytes.

Of a plan a run uses the tokens of its layers and the stages of its reader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvtool.documents.plan import PlanDocument
from kvtool.errors import UsageError
from kvtool.model_shape import DTYPE_BYTES, LayerShape
from kvtool.planning.bytes import (
    Forecast,
    LayerBudget,
    Reading,
    Text,
    forecast,
    stored_bytes,
)
from kvtool.planning.rocketkv import (
    PlannedStages,
    goes_by_stages,
    pairs_of,
    planned_stages,
    sized_reader,
    tokens_left,
)
from kvtool.policies.allocate.fixed import PlannedHeads, with_fixed_heads
from kvtool.policies.allocate.head_split import HeadSplit
from kvtool.policies.allocate.split import tokens_for_prompt
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
    free = [layer for layer in layers if layer is not None and layer.window is None]
    if policy is None or policy.reader is None or not free:
        return [LayerBudget(tokens)] * len(free)
    stored, pairs, length = min(tokens, text.prompt), tokens, text.prompt
    if policy.budget_is_traffic:
        stored = tokens_left(policy, pairs, text.prompt, text.new)
    else:
        pairs, length = pairs_of(policy.reader), stored
    at_end = text.prompt if policy.select_only else stored
    reader = sized_reader(policy, pairs, length, at_end, free[0].key_dim, text.new)
    return [LayerBudget(stored, Reading(pairs, reader))] * len(free)


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
        stored, pairs, length = min(count, n), count, n
        if not policy.budget_is_traffic:
            pairs, length = pairs_of(policy.reader), stored
        elif planned is None:
            stored = tokens_left(policy, pairs, n, new)
        else:
            pairs = planned.pairs[place]
            stored = min(n, planned.kept[place]) if policy.two_stages else n
        at_end = n if policy.select_only else stored
        stages = None if planned is None else planned.of_layer(place)
        reader = sized_reader(policy, pairs, length, at_end, head_dim, new, stages)
        budgets.append(LayerBudget(stored, Reading(pairs, reader)))
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
    layers: Sequence[LayerShape | None] | None = None,
) -> Forecast:
    """Forecast what a cache that follows a plan holds and reads.

    Args:
        policy: None for one without numbers of its own.
        layers: those of the plan's model if None.
    """
    layers = plan.model.layer_shapes() if layers is None else layers
    policy = policy and planned_heads(policy, plan)
    budgets = planned_budgets(plan, policy, text.prompt)
    return forecast(policy, layers, budgets, text)


def largest(fits: Callable[[int], bool], least: int, most: int) -> int | None:
    """Return the largest number that fits such that the next does not; None: not even the least.

    Found by halving, so that of several such numbers it is one.
    """
    if fits(most):
        return most
    if not fits(least):
        return None
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def least_allowed(attempt: Callable[[int], object], least: int, most: int) -> int:
    """Return the smallest number that is not refused with a `UsageError`, `most` if all are."""
    while least < most:
        middle = (least + most) // 2
        try:
            attempt(middle)
            most = middle
        except UsageError:
            least = middle + 1
    return least


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
    found = largest(lambda tokens: needed(tokens) <= size, least, most)
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
    free = [layer for layer in layers if layer is not None and layer.window is None]
    return sum(layer.kv_heads * stored_bytes(layer, policy.codec) for layer in free) or 1


@dataclass(frozen=True)
class PlanInUse:
    """A plan for prompts of one length.

    Attributes:
        sequences: prompts at a time.
        tokens: of every layer.
        stages: RocketKV's, where the policy uses them.
        held: bytes that will be held at most.
    """

    rows: int
    tokens: list[int]
    stages: PlannedStages | None
    held: int


def use_plan(
    plan: PlanDocument, policy: Policy, *, prompt: int, new: int, rows: int = 1, dtype: str | None
) -> PlanInUse:
    """Return the sizes that a run uses.

    Args:
        prompt: tokens of the longest prompt.
        new: tokens that are generated at most.
        sequences: prompts at a time.
        dtype: of the cache, by name; None: the plan's.
    """
    stages = planned_stages(plan, policy, prompt)
    text = Text(prompt, new, rows, plan.model.vocabulary)
    held = _held(plan, policy, dtype, text)
    return PlanInUse(rows, tokens_for_prompt(plan, prompt), stages, held)


def beyond_plan(plan: PlanDocument, used: PlanInUse, prompt: int, new: int) -> str | None:
    """Say what a run holds after a "prompt of ..", None where it is no more than planned.

    Args:
        prompt: tokens of the longest prompt.
        new: tokens that are generated at most.
    """
    target, promised = plan.target, plan.planned_bytes
    more_rows = used.rows > target.batch
    if not more_rows and (promised is None or used.held <= promised):
        return None
    run = f" in {used.rows} rows" if more_rows else ""
    planned = f" in {_rows(target.batch)}" if more_rows else ""
    whose = "the plan is" if promised is None else f"the plan's {promised} are"
    return (
        f"prompt of {prompt} tokens and up to {new} new ones{run}, {used.held} bytes are held; "
        f"{whose} for {target.prompt_tokens} and {target.max_new_tokens}{planned}"
    )


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def check_run(plan: PlanDocument, policy: Policy, dtype: str | None = None) -> list[str]:
    """Refuse a run that a plan's bytes rule out, and say where its totals are not those of the run.

    Args:
        dtype: of the cache, by name; None: not known yet.

    Returns:
        Notes for the user, one line each.

    Raises:
        UsageError: a policy whose own sizes are not the plan's; a target in bytes that the run
            would exceed.
    """
    _check_least(plan, policy)
    if not policy.takes_budget:
        return []
    other_dtype = None not in (dtype, plan.model.dtype) and dtype != plan.model.dtype
    other_policy = plan.policy is None or plan.policy != str(policy)
    held = _held(plan, policy, dtype)
    target, planned = plan.target, plan.planned_bytes
    if target.bytes is not None and held > target.bytes:
        in_plans_dtype = _held(plan, policy, None)
        if other_dtype and in_plans_dtype <= target.bytes:
            raise UsageError(
                f"the plan's {target.budget} are for {plan.model.dtype}, and in {dtype} the run "
                f"would hold {held} bytes",
                hint=f"--dtype {plan.model.dtype}, or make the plan anew: kvtool plan-budget .. "
                f"--dtype {dtype}",
            )
        whose = "no policy in particular" if plan.policy is None else f"policy `{plan.policy}`"
        whose = whose if other_policy else "other tokens and stages than it has"
        raise UsageError(
            f"the plan's {target.budget} are for {whose}, and `{policy}` would hold {held} bytes",
            hint=f"make the plan anew: kvtool plan-budget .. -p '{policy}'",
        )
    notes = []
    if other_dtype:
        notes.append(f"note: the plan is for {plan.model.dtype}, and this run is in {dtype}")
    if plan.policy is not None and other_policy:
        notes.append(
            f"note: the plan's totals are those of `{plan.policy}`, and this is `{policy}`"
        )
    if planned is not None and planned != held and (notes or not other_policy):
        notes = notes or ["note: the plan's totals are not those of its tokens and stages"]
        notes[-1] += f": held are {held} bytes, not {planned}"
    return notes


def _held(plan: PlanDocument, policy: Policy, dtype: str | None, text: Text | None = None) -> int:
    target = plan.target
    planned = Text(target.prompt_tokens, target.max_new_tokens, target.batch)
    planned = replace(planned, vocabulary=plan.model.vocabulary)
    layers = in_dtype(plan.model.layer_shapes(), dtype)
    return forecast_plan(plan, policy, text or planned, layers).storage


def _check_least(plan: PlanDocument, policy: Policy) -> None:
    """Refuse sizes in a policy string that are not those of the plan's stages.

    Raises:
        UsageError: the first such size.
    """
    section = plan.rocketkv
    if section is None or not goes_by_stages(policy):
        return
    sizes = (
        ("split", policy.score, section.split_factor),
        ("page", policy.reader, section.page_size),
        ("k1", policy.reader, section.head_dims),
        ("k", policy.reader, section.top_k),
    )
    for name, part, planned in sizes:
        own = getattr(part, name, None)
        if None not in (own, planned) and own != planned:
            raise UsageError(
                f"policy `{policy}` has {name} {own}, and the plan {planned}",
                hint=f"leave out {name}={own}, or make the plan anew: kvtool plan-budget .. "
                f"-p '{policy}'",
            )
