"""The policy and budget that settings and a plan choose, and what a user is told of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtool.calls.settings import PromptSettings
from kvtool.errors import UsageError
from kvtool.models.notes import handful_note
from kvtool.sizes import DEFAULT_BUDGET, DEFAULT_TOKENS, Budget
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from kvtool.documents.plan import PlanDocument, RocketKVSection, Target
    from kvtool.policies.policy import Policy


def given_policy(settings: PromptSettings) -> Policy | None:
    """Read the policy that is asked for, with its allocator; None if there is none."""
    if settings.policy is None:
        return None
    from kvtool.policies.grammar import parse_policy

    policy = parse_policy(settings.policy)
    if settings.allocator is None:
        return policy
    from kvtool.policies.with_allocator import with_allocator

    return with_allocator(policy, settings.allocator, str(settings.policy))


def choose_policy(
    settings: PromptSettings, plan: PlanDocument | None, watcher: Watcher
) -> tuple[Policy, Budget | None]:
    """Read policy and budget, and fill in what was not given.

    Raises:
        UsageError: a budget that is too small; a codec that cannot store the model's heads.
    """
    size = None if settings.budget is None else Budget.parse(settings.budget)
    if plan is not None:
        size = plan.target.budget
    if settings.policy is None and size is not None:
        raise UsageError("--budget needs a policy", hint=f"--policy h2o+caote --budget {size}")
    chosen = given_policy(settings)
    if chosen is None:
        from kvtool.policies.policy import Policy
        from kvtool.policies.scores.full import Full

        watcher.note("policy: full (everything is kept; choose another with --policy)")
        return Policy(Full()), None
    _check_heads(settings, chosen)
    if not chosen.takes_budget:
        if size is not None:
            watcher.note(f"note: policy `{chosen}` keeps everything; --budget {size} has no effect")
        return chosen, None
    if plan is not None:
        _take_plan(settings, plan, chosen, watcher)
        return chosen, size
    if size is None:
        size = DEFAULT_BUDGET
        unit = "pairs of key and value that a token reads" if chosen.budget_is_traffic else "tokens"
        watcher.note(f"budget: {size} {unit} per layer and KV head")
    if size.tokens is not None:
        chosen.check_budget(size.tokens)
        watcher.note_any(handful_note(size.tokens))
    if size.bytes is not None and chosen.stores_all:
        watcher.note(
            f"budget: {size} are for what is stored, which is everything; a token reads "
            f"{DEFAULT_TOKENS} pairs of key and value per layer and KV head"
        )
    return chosen, size


def _check_heads(settings: PromptSettings, policy: Policy) -> None:
    """Refuse a codec that cannot store the model's heads, of which only the sizes are read."""
    if policy.codec is None:
        return
    from kvtool.model_shape import layer_shapes
    from kvtool.planning.bytes import check_dims

    check_dims(policy, layer_shapes(settings.source().config()))


def _take_plan(
    settings: PromptSettings, plan: PlanDocument, policy: Policy, watcher: Watcher
) -> None:
    """Say what is taken from a plan, and refuse one that does not fit the run."""
    from kvtool.planning.derived import check_derived
    from kvtool.planning.held import check_run

    check_derived(plan, settings.source().config())
    budget = plan.target.budget
    if not policy.budget_is_traffic:
        policy.check_budget(min(plan.layers.tokens[i] for i in plan.free_layers))
        watcher.note(f"budget: as planned, {budget} split by {plan.layers.allocator}")
    elif policy.reader is not None and policy.reader.planned and plan.rocketkv is not None:
        watcher.note(f"budget: as planned, {_stages(plan.rocketkv, plan.target, policy)}")
    else:
        watcher.note(f"budget: as planned, {budget}, which is what a token reads")
    for line in check_run(plan, policy, _run_dtype(settings)):
        watcher.note(line)


def _stages(section: RocketKVSection, target: Target, policy: Policy) -> str:
    """Say which of RocketKV's stages are taken from a plan."""
    first = ""
    if policy.two_stages:
        split = "" if section.split_factor is None else f"split factor {section.split_factor:.4g}, "
        stage1 = section.stage1(target.max_new_tokens)
        first = f"{split}stage 1 keeps {stage1} of {section.context} tokens, "
    scaled = ", counts scaled to the prompt" if target.ratio is not None else ""
    return (
        f"{first}pages of {section.page_size}, {section.head_dims} channels, "
        f"{section.top_k} tokens attended{scaled}"
    )


def _run_dtype(settings: PromptSettings) -> str:
    """Return the dtype that the model will run in here."""
    if settings.loaded is not None:
        return str(settings.loaded.model.dtype).removeprefix("torch.")
    from kvtool.model_shape import stored_dtype
    from kvtool.models.placement import resolve_device, resolve_dtype

    device = resolve_device(settings.device or "auto", settings.device_map)
    dtype = resolve_dtype(settings.dtype or "auto", device)
    if dtype != "auto":
        return dtype
    config = settings.source().config()
    return stored_dtype(config, dtype)
