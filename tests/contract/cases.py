"""Whom the battery sweeps: the policy table's own lines, and no list of names.

A base that is added to `kvtool/policies/table.py` is in `cases()` by that line alone. Parameters
that are larger than the battery's short texts are made small by their name, whatever policy has
them; the budget is the battery's, or the smallest that the policy takes if that is more.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property

from kvtool import UsageError, parse_policy
from kvtool.policies.policy import Policy
from kvtool.policies.table import BASES, CODECS, MODIFIERS, Entry, describe

BUDGET = 20
SMALL = {
    "window": 4,
    "queries": 6,
    "kernel": 3,
    "lag": 5,
    "length": 5,
    "steps": 6,
    "buffer": 7,
    "every": 7,
    "prompt": False,  # kept whole it fills the budget
    "chunk": 11,
    "min_context": 2,
    "m": 5,
    "calibration_size": 9,
    # thresholds that no query's cosine comes so near to that rounding decides
    "theta1": 0.45,
    "theta2": 0.6,
    # any other one is far above what this model is expected to attend to: a token that stands twice
    # has equal scores in the first layer, and rounding decides (tests/cache/test_moments.py has it)
    "epsilon": 0,
}
PLANNED_ONLY = ("optimal",)  # comes in a plan, and is refused without one


@dataclass(frozen=True)
class Case:
    """A policy as the battery runs it.

    Attributes:
        text: the policy string.
        kind: what it is there for: a `base`, a `modifier`, the same `again` on a base with another
            kind of budget, a `pair` of modifiers.
    """

    text: str
    kind: str

    @cached_property
    def policy(self) -> Policy:
        return parse_policy(self.text)

    @property
    def full(self) -> str:
        """What keeps everything in the same form."""
        return "full" if self.policy.codec is None else f"full+{self.policy.codec.name}"

    @cached_property
    def entry(self) -> Entry:
        """The base's line in the table."""
        return entries()[self.policy.name]

    @property
    def bounded(self) -> bool:
        """Whether it takes a budget."""
        return not self.entry.budget_kind.startswith("none")

    @property
    def reads(self) -> bool:
        """Whether the budget is what a step reads."""
        return "read per decoded token" in self.entry.budget_kind

    @property
    def repeats(self) -> bool:
        """Whether a prompt is repeated before it is cut, so that only kvtool feeds it."""
        return self.policy.repetition is not None

    @property
    def appends(self) -> bool:
        """Whether what is generated is appended to what a budget left of the prompt."""
        return "appended" in self.entry.budget_kind and self.policy.when == "prompt"

    @cached_property
    def budget(self) -> int | None:
        """The battery's budget, or the smallest that the policy takes, if larger."""
        if not self.bounded:
            return None
        tokens = BUDGET
        while not self._takes(tokens):
            tokens += 1
        return tokens

    def _takes(self, tokens: int) -> bool:
        try:
            self.policy.check_budget(tokens)
        except UsageError:
            return False
        return True

    def __str__(self) -> str:
        return self.text


def entries() -> dict[str, Entry]:
    """The table as it is now, by name."""
    return _entries(tuple(BASES), tuple(MODIFIERS))


@cache
def _entries(_bases: tuple[str, ...], _modifiers: tuple[str, ...]) -> dict[str, Entry]:
    return {entry.name: entry for entry in describe()}


def small(spelled: str) -> str:
    """A name of the table with those of its parameters made small that have to be.

    Args:
        spelled: as `Entry.goes_on` has it: a name, and settings that it must have.
    """
    name, _, given = spelled.partition("(")
    given = given.removesuffix(")")
    changed = [
        key for key, own in entries()[name].parameters.items() if SMALL.get(key, own) is not own
    ]
    settings = [f"{key}={str(SMALL[key]).lower()}" for key in changed]
    settings = [given] * bool(given) + settings
    return name + (f"({','.join(settings)})" if settings else "")


def base_cases() -> list[Case]:
    """Every base of the table as it is."""
    return [Case(small(name), "base") for name in BASES]


def modifier_cases() -> list[Case]:
    """Every modifier on one base of each kind of budget, the one that takes most modifiers."""
    found = []
    for name in _free(MODIFIERS):
        kinds: dict[str, str] = {}
        for base in _bases():
            if base in entries()[name].goes_on:
                kinds.setdefault(entries()[base.partition("(")[0]].budget_kind, base)
        texts = [f"{small(base)}+{small(name)}" for base in kinds.values()]
        like = name in list(CODECS)[1:]  # stored and read like the first one
        found.append(Case(texts[0], "again" if like else "modifier"))
        found += [Case(text, "again") for text in texts[1:]]
    return found


def pair_cases() -> list[Case]:
    """Few policies that hold every pair of modifiers which go together on any base.

    A greedy cover: a policy starts with the first pair that is left, on the next base that takes
    it, and takes on whatever else still fits.
    """
    names, bases = _free(MODIFIERS), {base: small(base) for base in _bases()}
    takes = {name: set(entries()[name].goes_on) for name in names}
    on = {
        (one, other): [
            text
            for base, text in bases.items()
            if base in takes[one] & takes[other] and _parses(text, (one, other))
        ]
        for one, other in itertools.combinations(names, 2)
    }
    left = [pair for pair, takers in on.items() if takers]
    found: list[Case] = []
    while left:
        takers = on[left[0]]
        base, taken = takers[len(found) % len(takers)], list(left[0])
        while fitting := [name for name in names if _covers(name, taken, left, base)]:
            taken.append(max(fitting, key=lambda name: len(_new_pairs(name, taken, left))))
        left = [pair for pair in left if not set(pair) <= set(taken)]
        found.append(Case("+".join([base, *map(small, taken)]), "pair"))
    return found


def cases() -> list[Case]:
    """All that the battery sweeps."""
    return base_cases() + modifier_cases() + pair_cases()


def _free(names: Iterable[str]) -> list[str]:
    return [name for name in names if name not in PLANNED_ONLY]


def _bases() -> list[str]:
    """Bases that take modifiers, as the table spells them, those that take most first."""
    takes = Counter(base for entry in entries().values() for base in entry.goes_on)
    return [base for base, _ in takes.most_common()]


def _new_pairs(name: str, taken: list[str], left: list[tuple[str, str]]) -> list:
    """Pairs that are left, of a name and one that is taken."""
    return [pair for pair in left if name in pair and set(pair) - {name} <= set(taken)]


def _covers(name: str, taken: list[str], left: list[tuple[str, str]], base: str) -> bool:
    """Whether a modifier brings a new pair and still fits."""
    new = name not in taken and bool(_new_pairs(name, taken, left))
    return new and _parses(base, (*taken, name))


@cache
def _parses(base: str, modifiers: tuple[str, ...]) -> bool:
    try:
        parse_policy("+".join([base, *map(small, modifiers)]))
    except UsageError:
        return False
    return True
