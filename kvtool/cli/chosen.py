"""The policy and budget that options and a plan choose, and what a user is told of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtool.cli.prompt import note_handful
from kvtool.cli.prompt_options import PromptOptions
from kvtool.cli.terminal import Terminal
from kvtool.errors import UsageError
from kvtool.sizes import DEFAULT_BUDGET, DEFAULT_TOKENS, Budget

if TYPE_CHECKING:
    from kvtool.documents.plan import PlanDocument, RocketKVSection, Target
    from kvtool.policies.policy import Policy


def given_policy(options: PromptOptions) -> Policy | None:
    """Read the policy that is asked for, with its allocator; None if there is none."""
    if options.policy is None:
        return None
    from kvtool.policies.grammar import parse_policy

    policy = parse_policy(options.policy)
    if options.allocator is None:
        return policy
    from kvtool.policies.with_allocator import with_allocator

    return with_allocator(policy, options.allocator, options.policy)


def choose_policy(
    options: PromptOptions, plan: PlanDocument | None, terminal: Terminal
) -> tuple[Policy, Budget | None]:
    """Read policy and budget, fill in what was not given, and refuse a budget that is too small."""
    size = None if options.budget is None else Budget.parse(options.budget)
    if plan is not None:
        size = plan.target.budget
    if options.policy is None and size is not None:
        raise UsageError("--budget needs a policy", hint=f"--policy h2o+caote --budget {size}")
    chosen = given_policy(options)
    if chosen is None:
        from kvtool.policies.policy import Policy
        from kvtool.policies.scores.full import Full

        terminal.note("policy: full (everything is kept; choose another with --policy)")
        return Policy(Full()), None
    if not chosen.takes_budget:
        if size is not None:
            terminal.note(
                f"note: policy `{chosen}` keeps everything; --budget {size} has no effect"
            )
        return chosen, None
    if plan is not None:
        _take_plan(options, plan, chosen, terminal)
        return chosen, size
    if size is None:
        size = DEFAULT_BUDGET
        unit = "pairs of key and value that a token reads" if chosen.budget_is_traffic else "tokens"
        terminal.note(f"budget: {size} {unit} per layer and KV head")
    if size.tokens is not None:
        chosen.check_budget(size.tokens)
        note_handful(size.tokens, terminal)
    if size.bytes is not None and chosen.stores_all:
        terminal.note(
            f"budget: {size} are for what is stored, which is everything; a token reads "
            f"{DEFAULT_TOKENS} pairs of key and value per layer and KV head"
        )
    return chosen, size


def _take_plan(
    options: PromptOptions, plan: PlanDocument, policy: Policy, terminal: Terminal
) -> None:
    """Say what is taken from a plan, and refuse one that does not fit the run."""
    from kvtool.planning.run import check_run

    budget = plan.target.budget
    if not policy.budget_is_traffic:
        policy.check_budget(min(plan.layers.tokens[i] for i in plan.free_layers))
        terminal.note(f"budget: as planned, {budget} split by {plan.layers.allocator}")
    elif policy.reader is not None and policy.reader.planned and plan.rocketkv is not None:
        terminal.note(f"budget: as planned, {_stages(plan.rocketkv, plan.target, policy)}")
    else:
        terminal.note(f"budget: as planned, {budget}, which is what a token reads")
    for line in check_run(plan, policy, _run_dtype(options)):
        terminal.note(line)


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


def _run_dtype(options: PromptOptions) -> str:
    """Return the dtype that the model will run in here."""
    from kvtool.model_shape import stored_dtype
    from kvtool.models.load import load_config
    from kvtool.models.placement import resolve_device, resolve_dtype

    device = resolve_device(options.device or "auto", options.device_map)
    dtype = resolve_dtype(options.dtype or "auto", device)
    if dtype != "auto":
        return dtype
    config = load_config(
        options.model, revision=options.revision, trust_remote_code=options.trust_remote_code
    )
    return stored_dtype(config, dtype)
