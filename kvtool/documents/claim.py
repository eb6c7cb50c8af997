"""A claim about policies that a run can bear out or not, and what the run says of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, FiniteFloat, NonNegativeFloat, PositiveInt

from kvtool.documents.document import MOST, WAS_ARM, RecipeSection, Section, listed
from kvtool.errors import UsageError


class ClaimedPair(RecipeSection):
    """One policy that is said to score above another at the same budgets.

    With a `margin` (percent of the other's score) it is said to stay at most so far below.
    `budgets` are those of the run that count, all where it is empty. With `than_at` the difference
    there is said to be larger than the one at these other budgets. A `control` is no part of the
    claim: it has to hold for the run to say anything.
    """

    variant: Annotated[str, Field(min_length=1), WAS_ARM]
    than: Annotated[str, Field(min_length=1)]
    margin: Annotated[NonNegativeFloat, Field(le=100)] | None = None
    budgets: Annotated[list[int | str], Field(max_length=MOST), BeforeValidator(listed)] = Field(
        default_factory=list
    )
    than_at: Annotated[list[int | str], Field(max_length=MOST), BeforeValidator(listed)] = Field(
        default_factory=list
    )
    control: bool = False


class Claim(RecipeSection):
    """What is said, by whom, and which comparisons it comes to.

    `paper` is the number of those who say it, `others` what third parties measured.
    """

    says: Annotated[str, Field(min_length=1)]
    paper: str | None = None
    others: str | None = None
    pairs: Annotated[list[ClaimedPair], Field(min_length=1, max_length=MOST)]


def check_claim(claim: Claim, policies: Sequence[str], budgets: Sequence[str]) -> None:
    """Refuse a claim about what the run does not compare.

    Args:
        policies, budgets: of the run, as tables spell them.

    Raises:
        UsageError: a pair names another policy or budget, one policy twice, or `than_at` with a
            margin or without other `budgets`.
    """
    for i, pair in enumerate(claim.pairs):
        if why := _wrong(pair, policies, budgets):
            raise UsageError(f"claim.pairs.{i}{why}", hint="--unset claim")


def _wrong(pair: ClaimedPair, policies: Sequence[str], budgets: Sequence[str]) -> str | None:
    """Say what is wrong with a pair: the key, and what would do."""
    if pair.variant == pair.than:
        return f": `{pair.variant}` is compared with itself; name two policies"
    for key, named, known in (
        *(("variant", [pair.variant], policies), ("than", [pair.than], policies)),
        *(("budgets", pair.budgets, budgets), ("than_at", pair.than_at, budgets)),
    ):
        for each in named:
            if str(each) not in known:
                return f".{key}: `{each}` is none of {', '.join(known)}"
    both = {*map(str, pair.budgets)} & {*map(str, pair.than_at)}
    if pair.than_at and (pair.margin is not None or not pair.budgets or both):
        return (
            ".than_at: names budgets beside others in `budgets`, and no margin, as in "
            "`budgets: [64], than_at: [256]`"
        )
    return None


class ClaimRow(Section):
    """One pair on one task: the mean difference over its budgets, sample by sample.

    `than_value` is the other's score; where there is a `than_at` it is the difference at those
    budgets, and `difference` what the one at `budgets` has on top of it. `low` and `high` are the
    ends of the 95 % interval of `difference`, None where there is none.
    """

    variant: Annotated[str, WAS_ARM]
    than: str
    task: str
    budgets: list[str]
    margin: float | None
    n: PositiveInt
    than_value: FiniteFloat
    difference: FiniteFloat
    low: FiniteFloat | None
    high: FiniteFloat | None
    lower_is_better: bool
    best: float | None
    deciding: PositiveInt | None
    control: bool
    verdict: Literal["holds", "fails", "undecided"]
    than_at: list[str] = Field(default_factory=list)


class ClaimVerdict(Section):
    """What a run says of a claim, controls left out.

    `holds`: in one comparison or more, and it fails in none; `fails`: the other way round; `holds
    in part`: some of each; `undecided`: neither anywhere.
    """

    verdict: Literal["holds", "fails", "holds in part", "undecided"]
    rows: list[ClaimRow]

    @property
    def compared(self) -> list[ClaimRow]:
        """Return the comparisons that the claim is about."""
        return [row for row in self.rows if not row.control]

    @property
    def controls(self) -> list[ClaimRow]:
        """Return the comparisons that have to hold for the others to say anything."""
        return [row for row in self.rows if row.control]
