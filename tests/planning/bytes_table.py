"""What plans for bytes promise and what runs hold, counted from tensors, as a table.

    python -m tests.planning.bytes_table    # writes the page of `kvtool/planning` anew, about 2 min

The bundled model, as it ships, reads a prompt of 600 random tokens and 16 more, under the plan of
each policy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

import kvtool
from kvtool.documents.memory import ModelShape
from kvtool.documents.plan import Target
from kvtool.errors import UsageError
from kvtool.generation import decode_step, prefill
from kvtool.models.load import load
from kvtool.planning.make_plan import make_plan
from kvtool.policies.allocate.uniform import Uniform
from kvtool.policies.table import BASES
from kvtool.sizes import DEFAULT_TOKENS, Budget
from tests.models.bundled import shipped
from tests.models_for_tests import any_cache, cutting

PAGE = Path(__file__).parents[2] / "kvtool" / "planning" / "reference.md"
TARGETS = ("768KiB", "2MiB", "6MiB")
PROMPT, NEW = 600, 16
POLICIES = [cutting(name) for name in BASES if name != "full"]
CODED = ("h2o+int8", "snapkv+fp8", "h2o+int4", "h2o+k8v4")
SMALLER = ("128KiB", "256KiB", "768KiB")
WHOLE = ("full", "full+int8", "full+fp8", "full+k8v4", "full+int4")
BOTH = ("keydiff+int8", "roco+int8", "expected+k8v4", "kvzip+int4")
CASES = [(name, target) for name in POLICIES for target in TARGETS]
CASES += [(name, target) for name in CODED for target in SMALLER]
CASES += [(name, "6MiB") for name in WHOLE] + [("full+int8", "256KiB")]
CASES += [(name, "256KiB") for name in BOTH]
_BEGIN, _END = "<!-- table -->\n", "<!-- end of the table -->\n"


@dataclass(frozen=True)
class Measured:
    """A policy under a target in bytes.

    Attributes:
        budget: the planned tokens, or pairs that are read, of a layer; None: refused.
        planned, held: bytes; where it is refused, what it would take.
        above: bytes that the next larger budget holds, one token or pair a layer; None: the prompt
            is stored whole already.
    """

    policy: str
    target: str
    budget: int | None
    planned: int
    held: int | None = None
    above: int | None = None


def plan_for(model, policy, **target):
    """A plan for the prompt and the new tokens."""
    shape = ModelShape.of(model.config, name="reference", dtype="float32")
    asked = Target(context=PROMPT + NEW, max_new_tokens=NEW, **target)
    return make_plan(shape, Uniform(), asked, policy=policy).document


def held_by(model, policy, plan, *, batch=1, new=NEW) -> int:
    """Most bytes that a run holds, from the end of its prompt to its last token."""
    cache = any_cache(model, policy, plan=plan)
    ids = torch.randint(5, 400, (batch, PROMPT), generator=torch.Generator().manual_seed(0))
    prefill(model, cache, ids, new_tokens=new)
    most = 0
    for step in range(new + 1):
        report = cache.report()
        most = max(most, report.allocated_bytes + report.state_bytes)
        if step < new:
            decode_step(model, cache, ids[:, step])
    return most


def promise(model, name: str, target: str) -> Measured:
    """What the plan says, without a run."""
    policy, plan = kvtool.parse_policy(name), plan_in(model, name, target)
    if plan is None:
        whole = {"tokens": DEFAULT_TOKENS} if policy.takes_budget else {"ratio": 1}
        return Measured(name, target, None, plan_for(model, policy, **whole).totals.bytes)
    budget = sum(plan.layers.tokens) // len(plan.layers.tokens)
    if policy.two_stages and plan.rocketkv is not None:
        budget = plan.rocketkv.token_budget
    return Measured(name, target, budget, plan.totals.storage.bytes)


def plan_in(model, name: str, target: str):
    """A plan for bytes; None: they are too few."""
    try:
        return plan_for(model, kvtool.parse_policy(name), bytes=Budget.parse(target).bytes)
    except UsageError:
        return None


def measure(model, name: str, target: str) -> Measured:
    """Plan, run, and run the next larger budget."""
    row, policy = promise(model, name, target), kvtool.parse_policy(name)
    if row.budget is None:
        return row
    above = None
    if policy.takes_budget and not policy.stores_all and row.budget < PROMPT:
        above = held_by(model, policy, plan_for(model, policy, tokens=row.budget + 1))
    return replace(row, held=held_by(model, policy, plan_in(model, name, target)), above=above)


def measure_all() -> list[Measured]:
    """Every policy of the table that has a budget at every target, and codecs at smaller ones."""
    model = kvtool.attach(load(str(shipped())).model)
    return [measure(model, *case) for case in CASES]


def markdown(rows: list[Measured]) -> str:
    """The table of the page."""
    lines = [
        "| policy | target | budget | planned bytes | bytes from tensors | the next budget holds |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(line, rows)]) + "\n"


def line(row: Measured) -> str:
    """A policy under a target, as a line of the table."""
    if row.budget is None:
        cells = ["refused", f"would take {row.planned}", "-", "-"]
    else:
        above = "the whole prompt is stored" if row.above is None else str(row.above)
        cells = [str(row.budget), str(row.planned), str(row.held), above]
    target = f"{row.target} ({Budget.parse(row.target).bytes})"
    return f"| `{row.policy}` | {target} | {' | '.join(cells)} |"


def table_of(page: str) -> str:
    """The table in a page."""
    return page.split(_BEGIN)[1].split(_END)[0]


if __name__ == "__main__":
    text = PAGE.read_text()
    before, _, rest = text.partition(_BEGIN)
    after = rest.partition(_END)[2]
    PAGE.write_text(before + _BEGIN + markdown(measure_all()) + _END + after)
