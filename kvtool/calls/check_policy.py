"""Check a policy by its contract in one Python call: for authors of scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvtool.errors import KvtoolError, PolicyError, in_one_line
from kvtool.policies.grammar import parse_policy
from kvtool.policies.parts import Read, Score
from kvtool.policies.policy import Policy, compose
from kvtool.transformers_versions import check_transformers

if TYPE_CHECKING:
    from kvtool.calls.policy_checks import Subject


@dataclass(frozen=True)
class Checked:
    """One clause of the contract and what became of it.

    Attributes:
        detail: what is wrong, or why it was skipped.
    """

    name: str
    outcome: Literal["passed", "failed", "skipped"]
    detail: str = ""


@dataclass(frozen=True)
class PolicyReport:
    """What `check_policy` found.

    Attributes:
        policy: as it is spelled.
        budget: tokens with which it ran; None where it takes none.
    """

    policy: str
    budget: int | None
    checks: tuple[Checked, ...]

    @property
    def failed(self) -> tuple[Checked, ...]:
        """Return the checks that failed."""
        return tuple(each for each in self.checks if each.outcome == "failed")

    @property
    def passed(self) -> bool:
        """Return whether no check failed."""
        return not self.failed


def check_policy(policy: Policy | Score | Read | str, *, raises: bool = True) -> PolicyReport:
    """Check a policy by the contract that every policy of kvtool keeps.

    It runs on a small random model, without a network, in a few seconds.

    Args:
        policy: a score or reader of your own, a policy made of it, or a policy string.
        raises: whether failures end in an error; else they are in the report.

    Raises:
        PolicyError: checks that failed, all of them.
        UsageError: something that is no policy.
    """
    whole = compose(policy, []) if isinstance(policy, (Score, Read)) else parse_policy(policy)
    report = PolicyReport(str(whole), *_run_all(whole))
    if raises and report.failed:
        named: dict[str, list[str]] = {}
        for each in report.failed:
            named.setdefault(each.detail, []).append(each.name)
        failures = "; ".join(f"{', '.join(names)}: {detail}" for detail, names in named.items())
        raise PolicyError(
            f"{report.policy} fails {len(report.failed)} of {len(report.checks)} checks: {failures}"
        )
    return report


def _run_all(policy: Policy) -> tuple[int | None, tuple[Checked, ...]]:
    from kvtool.calls.policy_checks import Subject, attached_model, small_budget

    check_transformers()
    budget = small_budget(policy)
    return budget, tuple(_outcomes(Subject(policy, budget, attached_model())))


def _outcomes(subject: Subject) -> Iterator[Checked]:
    from kvtool.calls.policy_checks import CHECKS, Broken, Skip

    for name, run in CHECKS.items():
        try:
            run(subject)
        except Skip as skip:
            yield Checked(name, "skipped", str(skip))
        except (Broken, KvtoolError) as error:
            yield Checked(name, "failed", " ".join(str(error).split()))
        except MemoryError:
            raise
        except Exception as error:  # any that a part raises: a line of the report
            yield Checked(name, "failed", in_one_line(error))
        else:
            yield Checked(name, "passed")
