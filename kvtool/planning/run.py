"""What a run makes of a plan: the tokens and stages it goes by, and the bytes it will hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvtool.documents.plan import PlanDocument
from kvtool.errors import UsageError
from kvtool.planning.forecast import Text
from kvtool.planning.held import forecast_plan, in_dtype
from kvtool.planning.stages import PlannedStages, goes_by_stages, planned_stages
from kvtool.policies.allocate.planned import tokens_for_prompt
from kvtool.policies.policy import Policy


@dataclass(frozen=True)
class PlanInUse:
    """A plan for prompts of one length.

    Attributes:
        sequences: prompts at a time.
        tokens: of every layer.
        stages: RocketKV's, where the policy goes by them.
        held: bytes that will be held at most.
    """

    rows: int
    tokens: list[int]
    stages: PlannedStages | None
    held: int


def use_plan(
    plan: PlanDocument, policy: Policy, *, prompt: int, new: int, rows: int = 1, dtype: str | None
) -> PlanInUse:
    """Return what a run goes by.

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
        What a user should be told, one line each.

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
