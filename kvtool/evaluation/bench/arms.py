"""The arms of a comparison: one policy under one budget each, read from text."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtool.errors import UsageError
from kvtool.sizes import DEFAULT_BUDGET, Budget, parse_prefill

if TYPE_CHECKING:
    from kvtool.documents.plan import PlanDocument
    from kvtool.policies.policy import Policy

BASELINE = "full"


@dataclass(frozen=True)
class Arm:
    """One policy under one budget.

    Attributes:
        budget: None for policies that keep everything.
        prefill: `full` or `block:M`.
        plan: budgets of the layers, as the JSON of a plan whose target is `budget`.
    """

    policy: Policy
    budget: Budget | None
    prefill: str = "full"
    plan: str | None = None

    @property
    def name(self) -> str:
        """How files and tables call the arm, such as `h2o+caote@256`."""
        budget = "" if self.budget is None else f"@{self.budget}"
        block = "" if self.prefill == "full" or self.budget is None else f",{self.prefill}"
        planned = "" if self.plan is None else ",plan"
        return f"{self.policy}{budget}{planned}{block}"

    @property
    def folder(self) -> str:
        """The name as a folder can carry it."""
        return re.sub(r"[^A-Za-z0-9.+@=,%_-]", "_", self.name)


def plan_of(arm: Arm) -> PlanDocument | None:
    """Return the plan of an arm, None if its budget does not come from one."""
    from kvtool.documents.plan import PlanDocument

    return None if arm.plan is None else PlanDocument(**json.loads(arm.plan))


def make_arms(
    policies: list[str],
    budgets: list[str],
    *,
    prefill: str = "full",
    baseline: bool = True,
    plan: PlanDocument | None = None,
    imports: bool = True,
) -> list[Arm]:
    """Return every policy under every budget, the full cache first.

    Args:
        plan: takes the place of the budgets.
        imports: whether a module that a policy is named by is imported.

    Raises:
        UsageError: a policy or budget that cannot be read, a budget that protected tokens fill.
    """
    from kvtool.policies.grammar import parse_policy

    block = parse_prefill(prefill)
    prefill = "full" if block is None else f"block:{block}"
    sizes = [Budget.parse(budget) for budget in budgets] or [DEFAULT_BUDGET]
    arms = [Arm(parse_policy(BASELINE), None, prefill)] if baseline else []
    for text in policies:
        policy = parse_policy(text, imports=imports)
        if not policy.takes_budget:
            arms.append(Arm(policy, None, prefill))
            continue
        if plan is not None:
            if not policy.budget_is_traffic:
                policy.check_budget(min(plan.layers.tokens[i] for i in plan.free_layers))
            text = json.dumps(plan.to_data(), sort_keys=True)
            arms.append(Arm(policy, plan.target.budget, prefill, text))
            continue
        for size in sizes:
            if size.tokens is not None:
                policy.check_budget(size.tokens)
            arms.append(Arm(policy, size, prefill))
    arms = list(dict.fromkeys(arms))
    if not arms:
        raise UsageError("no policy to evaluate", hint="--policy streaming,h2o,h2o+caote")
    return arms
