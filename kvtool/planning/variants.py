"""The variants of a comparison: one policy under one budget each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvtool.documents.files import as_folder
from kvtool.documents.plan import PlanDocument
from kvtool.errors import UsageError
from kvtool.policies.policy import Policy
from kvtool.policies.scores.full import Full
from kvtool.sizes import DEFAULT_BUDGET, Budget

BASELINE = "full"


@dataclass(frozen=True)
class Variant:
    """One policy under one budget.

    Attributes:
        budget: None for policies that keep everything.
        prefill: `full` or `block:M`.
        plan: budgets of the layers; its target is `budget`.
    """

    policy: Policy
    budget: Budget | None
    prefill: str = "full"
    plan: PlanDocument | None = field(default=None, hash=False)

    @property
    def name(self) -> str:
        """How files and tables call the variant, such as `h2o+caote@256`."""
        budget = "" if self.budget is None else f"@{self.budget}"
        block = "" if self.prefill == "full" or self.budget is None else f",{self.prefill}"
        planned = "" if self.plan is None else ",plan"
        return f"{self.policy}{budget}{planned}{block}"

    @property
    def folder(self) -> str:
        """The name as a folder can carry it."""
        return as_folder(self.name)

    @property
    def cuts_at_the_end(self) -> bool:
        """Whether layers are cut only once all of them have read a prompt."""
        allocator, heads = self.policy.allocator, self.policy.head_split
        measures = allocator is not None and allocator.metric is not None
        if self.policy.repetition is not None:
            return self.prefill == "full"
        return self.plan is None and self.budget is not None and (measures or heads is not None)


FULL_CACHE = Variant(Policy(Full()), None)


def make_variants(
    policies: Sequence[Policy],
    budgets: Sequence[Budget],
    *,
    prefill: str = "full",
    baseline: bool = True,
    plan: PlanDocument | None = None,
) -> list[Variant]:
    """Return every policy under every budget, each once, the full cache first.

    Args:
        prefill: `full` or `block:M`.
        plan: takes the place of the budgets.

    Raises:
        UsageError: no policy, a budget that protected tokens fill.
    """
    sizes = budgets or [DEFAULT_BUDGET]
    variants = [replace(FULL_CACHE, prefill=prefill)] if baseline else []
    for policy in policies:
        if not policy.takes_budget:
            variants.append(Variant(policy, None, prefill))
            continue
        if plan is not None:
            if not policy.budget_is_traffic:
                policy.check_budget(plan.smallest_budget)
            variants.append(Variant(policy, plan.target.budget, prefill, plan))
            continue
        for size in sizes:
            if size.tokens is not None:
                policy.check_budget(size.tokens)
            variants.append(Variant(policy, size, prefill))
    if not variants:
        raise UsageError("no policy to evaluate", hint="--policy streaming,h2o,h2o+caote")
    return list(dict.fromkeys(variants))
