"""Refuse a plan in which one number contradicts the others.

A plan says many things twice: a person reads them, a program follows from them. This module makes
each such number anew, from the model's configuration and from the numbers that a run obeys, and
compares. A number that is missing is not compared.

`totals` and the costs of RocketKV's stages may be those of the stages that `plan-budget` computes,
too. Whoever edits a stage need not know what it comes to, and the run says what it holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from kvtool.documents.document import Section
from kvtool.documents.memory import ModelShape
from kvtool.documents.plan import Cost, PlanDocument, RocketKVSection, compression_ratio
from kvtool.errors import UsageError
from kvtool.identity import config_hash
from kvtool.model_shape import DTYPE_BYTES, LayerShape, layer_shapes
from kvtool.planning.make_plan import Drafts, PlannableLayers, costs, totals_of
from kvtool.planning.rocketkv_stages import RocketKVPlan, split_factor
from kvtool.policies.allocate.table import parse_allocator
from kvtool.policies.allocate.uniform import Uniform
from kvtool.policies.grammar import parse_policy

if TYPE_CHECKING:
    from kvtool.policies.policy import Policy

_CLOSE = 1e-6  # how far a share may be off, as a part of it
_REMAKE = "make the plan anew: kvtool plan-budget .."
_EDIT = f"leave out `totals` to run other tokens, or {_REMAKE}"
_LATER = ("vocabulary", "trained_length")  # which older plans lack


def check_derived(plan: PlanDocument, config: Any, known: Iterable[Policy] = ()) -> None:
    """Refuse a plan with a number that its other numbers and the model do not give.

    Args:
        config: of the model that the plan was made for.
        known: policies that have been read already, among them perhaps the plan's.

    Raises:
        UsageError: another model, or the first such number.
    """
    check_plan(plan, config)
    _check_model(plan, config)
    exact = layer_shapes(config, plan.model.dtype)
    _check_heads(plan, exact)
    readings = list(_readings(plan.model, exact))
    _check_windows(plan, readings)
    policy = _policy(plan, known)
    own = None if policy is False else _as_planned(plan, policy or None, exact)
    _check_stages(plan, own)
    if plan.totals is None or policy is False:
        return
    if own is not None and _needs_no_profile(plan):
        why = f"allocator `{plan.layers.allocator}`, `target` and `layers.min_tokens`"
        _compare(("layers",), plan.layers, [own.layers], why, only=("tokens",))
    _check_totals(plan, policy or None, own, readings)
    _check_size(plan, policy or None, exact)


def check_plan(plan: PlanDocument, config: Any) -> None:
    """Refuse a plan that was made for another model.

    Raises:
        UsageError: another configuration.
    """
    if plan.model.config_hash != config_hash(config):
        raise UsageError(
            f"the plan was made for model `{plan.model.id}`, whose configuration is another one",
            hint="make the plan anew: kvtool plan-budget -m MODEL ..",
        )


def _check_model(plan: PlanDocument, config: Any) -> None:
    given = plan.model
    if given.dtype is not None and given.dtype not in DTYPE_BYTES:
        try:
            layer_shapes(config, given.dtype)
        except (AttributeError, TypeError):
            raise UsageError(
                f"the plan's `model.dtype` is {given.dtype}, which is no dtype", hint=_REMAKE
            ) from None
    dtypes = [given.dtype] if given.dtype is not None else [None, *DTYPE_BYTES]
    right = [
        ModelShape.of(config, name=given.id, revision=given.revision, dtype=dtype)
        for dtype in dtypes
    ]
    kept = tuple(key for key in ModelShape.model_fields if key not in (*_LATER, "dtype"))
    _compare(("model",), given, right, "the model's configuration and `model.dtype`", only=kept)
    _compare(("model",), given, right, "the model's configuration", only=_LATER, optional=True)


def _readings(
    model: ModelShape, exact: list[LayerShape | None]
) -> Iterator[list[LayerShape | None]]:
    """Yield what layers store: by the configuration, and as plans from a profile count it."""
    yield exact
    for sizes in (None, [0 if layer is None else layer.bytes for layer in exact]):
        try:
            even = model.layer_shapes(sizes)
        except UsageError:
            continue
        if even != exact:
            yield even


def _check_windows(plan: PlanDocument, readings: Sequence[list[LayerShape | None]]) -> None:
    """Refuse tokens of layers whose number is the model's own, whatever the plan says."""
    n = plan.target.prompt_tokens
    fixed = [PlannableLayers.of(plan.model, n, shapes).fixed for shapes in readings]
    for i in fixed[0]:
        given, right = plan.layers.tokens[i], [each[i] for each in fixed]
        if given not in right:
            kind = plan.model.layer_types[i]
            raise UsageError(
                f"the plan's `layers.tokens.{i}` is {given}, and a layer of kind `{kind}` keeps "
                f"{right[0]} tokens, whatever the budget",
                hint=f"put {right[0]} there",
            )


def _check_heads(plan: PlanDocument, exact: list[LayerShape | None]) -> None:
    """Refuse budgets of more or fewer KV heads than a layer has."""
    for i, own in enumerate(plan.layers.heads or []):
        shape = exact[i]
        if own is not None and shape is not None and len(own) != shape.kv_heads:
            raise UsageError(
                f"the plan's `layers.heads.{i}` has {len(own)} KV heads, and the model "
                f"{shape.kv_heads}",
                hint=_REMAKE,
            )


def _policy(plan: PlanDocument, known: Iterable[Policy]) -> Policy | Literal[False] | None:
    """Return the policy that a plan is for, None for none, False for one that is not known here."""
    if plan.policy is None:
        return None
    read = next((policy for policy in known if str(policy) == plan.policy), None)
    if read is not None:
        return read
    try:
        return parse_policy(plan.policy, imports=False)
    except UsageError:
        return False


def _needs_no_profile(plan: PlanDocument) -> bool:
    return parse_allocator(plan.layers.allocator).metric is None


def _drafts(plan: PlanDocument, policy: Policy | None, shapes: list[LayerShape | None]) -> Drafts:
    """Return what `plan-budget` would make of the same request, split evenly without a profile."""
    allocator = parse_allocator(plan.layers.allocator) if _needs_no_profile(plan) else Uniform()
    least: int | None = plan.layers.min_tokens
    if policy is not None and plan.layers.min_tokens < policy.min_budget:
        least = None  # the prompt is shorter than that, or the plan was edited
    layers = PlannableLayers.of(plan.model, plan.target.prompt_tokens, shapes)
    given = (plan.model, allocator, plan.target, None, policy, least)
    return Drafts(*given, layers)


def _total(plan: PlanDocument) -> int:
    """Return the tokens of the free layers together, or the pairs that they read."""
    budget, n, count = plan.target.budget, plan.target.prompt_tokens, len(plan.free_layers)
    if budget.bytes is None:
        return budget.for_prompt(n) * count
    planned = sum(plan.layers.tokens[i] for i in plan.free_layers)
    if plan.rocketkv is not None and planned == n * count:
        return max(planned, plan.rocketkv.token_budget * count)
    return planned


def _as_planned(
    plan: PlanDocument, policy: Policy | None, shapes: list[LayerShape | None]
) -> PlanDocument | None:
    """Return the plan without totals that `plan-budget` makes for as many tokens, None for none."""
    try:
        return _drafts(plan, policy, shapes).of(_total(plan)).document
    except UsageError:
        if plan.edited:
            return None
        raise


def _check_stages(plan: PlanDocument, own: PlanDocument | None) -> None:
    section = plan.rocketkv
    if section is None:
        return
    dense = section.context <= section.token_budget
    if section.dense != dense:
        said, derived = (str(each).lower() for each in (section.dense, dense))
        raise UsageError(
            f"the plan's `rocketkv.dense` is {said}, and `context` {section.context} and "
            f"`token_budget` {section.token_budget} make it {derived}",
            hint=_REMAKE,
        )
    right: list[tuple[Cost | None, Cost | None]] = [_costs_of(plan, section)]
    if own is not None and own.rocketkv is not None:
        if dense and not plan.edited:
            why = "`target`, under which everything is read,"
            _compare(("rocketkv",), section, [own.rocketkv], why, optional=True)
        right.append((own.rocketkv.storage, own.rocketkv.traffic))
    why = "the sizes of `rocketkv`"
    for place, name in enumerate(("storage", "traffic")):
        given, costs = (
            getattr(section, name),
            [c for pair in right if (c := pair[place]) is not None],
        )
        if given is not None:
            _compare(("rocketkv", name), given, costs, why)


def _costs_of(plan: PlanDocument, section: RocketKVSection) -> tuple[Cost, Cost]:
    """Return what the stages of the section store and read."""
    new, ratio = (
        plan.target.max_new_tokens,
        compression_ratio(section.context, section.token_budget),
    )
    split = section.split_factor
    stages = RocketKVPlan(
        context=section.context,
        token_budget=section.token_budget,
        dense=section.dense,
        compression_ratio=ratio,
        split_factor=split_factor(ratio) if split is None else split,
        stage1_tokens=section.stage1(new),
        prompt_tokens=section.stage1(new) - new,
        page_size=section.page_size,
        head_dims=section.head_dims,
        top_k=section.top_k,
    )
    return costs(stages, plan.model.head_dim)


def _check_totals(
    plan: PlanDocument,
    policy: Policy | None,
    own: PlanDocument | None,
    readings: Sequence[list[LayerShape | None]],
) -> None:
    """Compare with what tokens and stages come to, by any way of counting that plans know."""
    if plan.totals is None:
        return
    plans = [plan]
    if own is not None and own.rocketkv != plan.rocketkv:
        plans.append(plan.model_copy(update={"rocketkv": own.rocketkv}))
    right = []
    for each in plans:
        for layers in readings:
            right.append(totals_of(each, policy, layers))
            if _difference(plan.totals, right[-1], optional=True) is None:
                return
    whose = "`layers.tokens`" if policy is None else f"`layers.tokens` and policy `{policy}`"
    _compare(("totals",), plan.totals, right, whose, optional=True, hint=_EDIT)


def _check_size(plan: PlanDocument, policy: Policy | None, shapes: list[LayerShape | None]) -> None:
    """Refuse a target in bytes that would hold more tokens than the plan gives out."""
    size, count = plan.target.bytes, len(plan.free_layers)
    everything = policy is not None and (policy.stores_all or not policy.takes_budget)
    planned = sum(plan.layers.tokens[i] for i in plan.free_layers)
    if size is None or everything or planned >= plan.target.prompt_tokens * count:
        return
    drafts = _drafts(plan, policy, shapes)
    try:
        needed = drafts.forecast(drafts.of(planned + 2 * count).document).storage
    except UsageError:
        return
    if needed <= size:
        raise UsageError(
            f"the plan's `target.bytes` is {size}, which leaves room: with 2 tokens more in each "
            f"layer the cache would hold {needed} bytes",
            hint=_REMAKE,
        )


def _compare(
    at: Sequence[str],
    given: Section,
    right: Sequence[Section],
    why: str,
    *,
    only: Sequence[str] | None = None,
    optional: bool = False,
    hint: str = _REMAKE,
) -> None:
    """Refuse a part of a plan that equals none of those that are right.

    Args:
        at: the keys that lead to it.
        why: what the right ones follow from.
        only: keys that are compared; None: all.
        optional: whether keys may be null.
    """
    found = [_difference(given, each, only, optional) for each in right]
    differences = [each for each in found if each is not None]
    if len(differences) < len(found):
        return
    keys, said, derived = differences[0]
    raise UsageError(
        f"the plan's `{'.'.join([*at, *keys])}` is {said}, and {why} make it {derived}", hint=hint
    )


def _difference(
    given: Section, right: Section, only: Sequence[str] | None = None, optional: bool = False
) -> tuple[list[str], object, object] | None:
    """Return the way to the first value that differs, with both; None where all are the same."""
    for name in type(given).model_fields if only is None else only:
        said, derived = getattr(given, name), getattr(right, name)
        if isinstance(said, Section) and isinstance(derived, Section):
            inner = _difference(said, derived)
            if inner is not None:
                return [name, *inner[0]], inner[1], inner[2]
        elif isinstance(said, list) and isinstance(derived, list) and len(said) == len(derived):
            for i, pair in enumerate(zip(said, derived, strict=True)):
                if pair[0] != pair[1]:
                    return [name, str(i)], *pair
        elif isinstance(said, float) and isinstance(derived, float):
            if not math.isclose(said, derived, rel_tol=_CLOSE, abs_tol=0):
                return [name], said, derived
        elif said != derived and not (said is None and optional):
            return [name], said, derived
    return None
