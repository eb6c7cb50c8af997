"""Arms held against each other, in words and as a table of the page."""

from __future__ import annotations

from kvtool.documents.results import ResultsDocument
from kvtool.documents.verdict import Difference
from kvtool.evaluation.paired import LEAST_PAIRS, unseen
from kvtool.report import digits
from kvtool.report.page_tables import Cell, Header, Row, Table

_AGAINST = {"base": "its base", "best": "the best of this budget", "asked": "as asked"}
_LOOKS = {"better": "better", "worse": "worse"}


def differences_in_words(document: ResultsDocument) -> list[tuple[str, str, str]]:
    """Return for each pair its task, its two arms, and what the interval allows to say."""
    return [
        (each.task, f"{each.arm} - {each.against}", said(each, _best(document, each)))
        for each in document.differences
    ]


def said(found: Difference, best: float | None) -> str:
    """Say a difference, its interval and how much of it is noise.

    Args:
        best: value of a perfect score.
    """
    told = digits.signed(found.difference, best)
    if found.low is None:
        return f"{told}, no interval: fewer than {LEAST_PAIRS} samples (n={found.n})"
    interval = digits.interval(found.low, found.high, best)
    return f"{told} {interval}: {standing_in_words(found)} (n={found.n})"


def standing_in_words(found: Difference) -> str:
    """Say what an interval allows to say, and how many samples would decide the rest."""
    if found.low == found.high == 0:
        return f"no sample differs, up to {digits.share(unseen(found.n))} could, unseen"
    if found.deciding is None:
        return found.standing
    return f"{found.standing}, about {found.deciding} samples would decide"


def differences_table(document: ResultsDocument) -> Table:
    """Return a row for each pair: the difference, its interval, what that says."""
    rows = [_row(each, _best(document, each)) for each in document.differences]
    named = [Header(title, look="words") for title in ("task", "against", "which is")]
    numbers = [Header(title) for title in ("difference", "95 % interval", "n")]
    return Table([Header("arm"), *named, *numbers, Header("says", look="words")], rows)


def _row(found: Difference, best: float | None) -> Row:
    words = [Cell(text, look="words") for text in (found.task, found.against)]
    words.append(Cell(_AGAINST[found.because], look="words"))
    interval = digits.interval(found.low, found.high, best) or digits.MISSING
    numbers = [Cell(digits.signed(found.difference, best)), Cell(interval), Cell(str(found.n))]
    says = Cell(standing_in_words(found), look=_LOOKS.get(found.standing, "words"))
    return Row(found.arm, [*words, *numbers, says])


def _best(document: ResultsDocument, found: Difference) -> float | None:
    result = document.of(found.arm, found.task)
    return None if result is None else result.best
