"""Conditions that a run must meet: a least score, a largest drop below the full cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvtool.documents.results import GateResult, TaskResult
from kvtool.errors import UsageError
from kvtool.evaluation.run.collect import is_baseline
from kvtool.evaluation.tasks.task import covers


@dataclass(frozen=True)
class Gate:
    """Exactly one of `least` and `max_drop` for the tasks that `task` names.

    Attributes:
        task: a task, a suite or a glob.
        least: the worst headline allowed, in the task's own scale (the largest one, where smaller
            is better).
        max_drop: how much worse than the full cache a headline may be, in percent of it.
    """

    task: str
    least: float | None = None
    max_drop: float | None = None


def parse_least(text: str) -> Gate:
    """Read `TASK=VALUE`.

    Raises:
        UsageError: not of that form.
    """
    task, _, number = text.rpartition("=")
    with suppress(ValueError):
        if task:
            return Gate(task.strip(), least=float(number))
    raise UsageError(f"--fail-under must be TASK=VALUE, got `{text}`", hint="--fail-under niah=0.9")


def check_gates(gates: Sequence[Gate], tasks: Sequence[tuple[str, float | None, bool]]) -> None:
    """Refuse gates that no task can meet or miss.

    Args:
        tasks: of the tasks that run: name, best value, whether smaller is better.

    Raises:
        UsageError: a gate about no task of this run, or above the best value of a task.
    """
    for gate in gates:
        covered = [task for task in tasks if covers(gate.task, task[0])]
        if not covered:
            raise UsageError(
                f"gate on `{gate.task}`: no such task in this run",
                hint=f"tasks: {', '.join(task[0] for task in tasks)}",
            )
        for name, best, reversed_scale in covered:
            if best is not None and not reversed_scale and (gate.least or 0) > best:
                raise UsageError(
                    f"gate `{gate.task}` {gate.least:g} cannot be met: `{name}` is scored from 0 "
                    f"to {best:g}"
                )
        if gate.max_drop is not None and gate.max_drop < 0:
            raise UsageError(f"--max-drop must be 0 or more, got {gate.max_drop:g}")


def judge(gates: Sequence[Gate], results: Sequence[TaskResult]) -> list[GateResult]:
    """Hold every compressed result against the gates; the full cache only where it runs alone.

    A result that is missing, or whose full cache is, fails its gate. A largest drop for all tasks
    (`*`) leaves out those where percent of the full cache mean nothing, such as seconds, and texts
    that were fed in other blocks than to the full cache.
    """
    full = {result.task: result for result in results if is_baseline(result.variant)}
    compressed = [result for result in results if not is_baseline(result.variant)]
    verdicts = []
    for gate in gates:
        for result in compressed or results:
            alike = gate.max_drop is None or result.fed_like(full.get(result.task, result))
            if gate.task == "*" and not (result.droppable and alike):
                continue
            if covers(gate.task, result.task):
                verdicts.append(_judge(gate, result))
    return verdicts


def _judge(gate: Gate, result: TaskResult) -> GateResult:
    sign = -1 if result.lower_is_better else 1
    about = {"variant": result.variant, "task": result.task}
    if gate.least is not None:
        value = result.value
        passed = value is not None and sign * value >= sign * gate.least
        return GateResult(gate="least", value=value, limit=gate.least, passed=passed, **about)
    drop, limit = _drop(result, sign), gate.max_drop or 0.0
    passed = drop is not None and drop <= limit
    return GateResult(gate="max_drop", value=drop, limit=limit, passed=passed, **about)


def _drop(result: TaskResult, sign: int) -> float | None:
    """Return how much worse than the full cache, in percent; negative where it is better."""
    if result.delta is None or result.value is None:
        return None
    full = result.value - result.delta
    worse = -sign * result.delta
    if full == 0:
        return 100.0 if worse > 0 else 0.0
    return 100 * worse / abs(full)
