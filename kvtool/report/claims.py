"""What a run says of a claim, in words and as a table."""

from __future__ import annotations

from collections import Counter

from kvtool.documents.claim import ClaimRow, ClaimVerdict
from kvtool.documents.results import ResultsDocument
from kvtool.report import digits
from kvtool.report.page_tables import Cell, Header, Row, Table

_HEADERS = ("than", "task", "budgets", "of", "difference", "95 % interval", "n")


def claim_in_words(found: ClaimVerdict) -> str:
    """Say the verdict, and in how many comparisons it is so.

    A comparison is one pair of policies on one task, over all its budgets.
    """
    counts: Counter[str] = Counter(row.verdict for row in found.compared)
    order = ("holds", "fails", "undecided")
    told = ", ".join(f"{name} in {counts[name]}" for name in order if counts[name])
    sizes = sorted({row.n for row in found.compared})
    n = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    verdict = f"{found.verdict} at this n" if found.verdict == "undecided" else found.verdict
    missed = sum(row.verdict != "holds" for row in found.controls)
    control = f"; {missed} of {len(found.controls)} controls do not hold" if missed else ""
    return f"{verdict} ({told} of {len(found.compared)}; n={n}{control})"


def claim_lines(document: ResultsDocument) -> list[str]:
    """Return the claim with its verdict and a line for each comparison; empty without a claim."""
    if document.claim is None:
        return []
    if document.claim_verdict is None:
        return [f"claim: {document.claim.says}: nothing of it was measured"]
    found = document.claim_verdict
    lines = [f"claim: {document.claim.says}: {claim_in_words(found)}"]
    return lines + [
        f"  {row.task}: {row.arm} - {row.than} {row_in_words(row)}" for row in found.rows
    ]


def row_in_words(row: ClaimRow) -> str:
    """Say a difference, its interval, and what follows for the claim."""
    said = f"{digits.signed(row.difference, row.best)}"
    interval = digits.interval(row.low, row.high, row.best)
    at = f" at {at_budgets(row)}" if row.budgets else ""
    return f"{said} {interval or 'without an interval'}{at}: {says(row)}"


def at_budgets(row: ClaimRow) -> str:
    """Name the budgets compared at: `64, 256`, or `64 more than at 256`."""
    named = ", ".join(row.budgets)
    return f"{named} more than at {', '.join(row.than_at)}" if row.than_at else named


def than_value(row: ClaimRow) -> str:
    """Write the other's score, or the difference at the other budgets."""
    return (digits.signed if row.than_at else digits.score)(row.than_value, row.best)


def says(row: ClaimRow) -> str:
    """Say the verdict on one comparison, and what would decide it."""
    bound = "" if row.margin is None else f" (claimed: at most {row.margin:g} % below)"
    bound += " (control)" if row.control else ""
    if row.deciding is not None:
        return f"undecided{bound}, about {row.deciding} samples would decide"
    return row.verdict + bound


def claim_table(found: ClaimVerdict) -> Table:
    """Return a row for each comparison."""
    named = [Header(title, look="words") for title in _HEADERS[:3]]
    numbers = [Header(title) for title in _HEADERS[3:]]
    headers = [Header("arm"), *named, *numbers, Header("says", look="words")]
    return Table(headers, list(map(_row, found.rows)))


def _row(row: ClaimRow) -> Row:
    words = [Cell(text, look="words") for text in (row.than, row.task, at_budgets(row))]
    interval = digits.interval(row.low, row.high, row.best) or digits.MISSING
    told = (than_value(row), digits.signed(row.difference, row.best))
    numbers = [Cell(text) for text in (*told, interval, str(row.n))]
    look = {"holds": "better", "fails": "worse"}.get(row.verdict, "words")
    return Row(row.arm, [*words, *numbers, Cell(says(row), look=look)])
