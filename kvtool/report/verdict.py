"""The verdict of a comparison in words, and as tables of the page."""

from __future__ import annotations

from kvtool.documents.results import ResultsDocument
from kvtool.documents.verdict import Choice, Standing, Verdict
from kvtool.evaluation.paired import unseen
from kvtool.report import digits
from kvtool.report.page_tables import Cell, Header, Note, Row, Table
from kvtool.report.variants import variants_in_order

_MOST = 5  # undecided arms that are named
_TITLES = {"bytes": "bytes held", "traffic": "bytes read per token", "time": "time per token"}


def verdict_lines(document: ResultsDocument) -> list[str]:
    """Return the verdict line by line; empty where there is none to speak of."""
    verdict = document.verdict
    if verdict is None:
        return []
    if verdict.why is not None:
        return [f"no verdict: {verdict.why}"]
    lines = [f"verdict: the cheapest {rule(document)}"]
    return lines + [f"  by {title}: {said}" for title, said in choices_in_words(document)]


def rule(document: ResultsDocument) -> str:
    """Say what a variant of the verdict fulfils, and on which tasks."""
    verdict = document.verdict
    assert verdict is not None, "asked of a document with a verdict only"
    bound = f"within {verdict.within:g} % of the full cache"
    tasks = {result.task for result in document.results if result.droppable}
    left_out = sorted(tasks.difference(verdict.tasks))
    on = "" if len(verdict.tasks) == 1 else f" on each of {len(verdict.tasks)} tasks"
    but = f" (without {', '.join(left_out)}, where it scores nothing)" if left_out else ""
    return f"{bound}{on}{but}, by the paired 95 % interval of the score"


def choices_in_words(document: ResultsDocument) -> list[tuple[str, str]]:
    """Return each cost and what the verdict chooses by it; empty without a verdict."""
    verdict, found = document.verdict, []
    for choice in [] if verdict is None else verdict.choices:
        assert verdict is not None, "there are choices"
        parts = [_arm(verdict, choice), _cost(choice), _score(verdict.of(choice.arm or ""))]
        if choice.arm is not None and choice.undecided:
            parts.append(f"cheaper, undecided at this n: {_names(choice.undecided)}")
        found.append((_TITLES[choice.by], "; ".join(part for part in parts if part)))
    return found


def standings_table(document: ResultsDocument) -> Table | None:
    """Return how every arm stands, on the task that decides it; None without a verdict."""
    verdict = document.verdict
    if verdict is None or verdict.why is not None:
        return None
    rows = []
    for arm in variants_in_order(document):
        if (found := verdict.of(arm.name)) is None:
            continue
        told = digits.MISSING if found.difference is None else f"{found.difference:+.1f} %"
        against = Cell(told, () if found.why is None else (Note(found.why),))
        interval = digits.MISSING if found.low is None else _interval(found)
        cells = [Cell(found.standing), Cell(found.task), against, Cell(interval)]
        rows.append(Row(arm.name, [*cells, Cell(str(found.n))]))
    titles = ("arm", f"within {verdict.within:g} %", "task", "against full", "95 % interval", "n")
    return Table([Header(title) for title in titles], rows)


def _arm(verdict: Verdict, choice: Choice) -> str:
    """Name the choice, or say why there is none."""
    if choice.arm is not None:
        return choice.arm
    if choice.undecided:
        return f"undecided at this n: {_names(choice.undecided)}"
    if any(each.standing == "within" for each in verdict.arms):
        return f"none (no arm within {verdict.within:g} % is cheaper than the full cache)"
    return "none"


def _names(arms: list[str]) -> str:
    more = f" and {len(arms) - _MOST} more" if len(arms) > _MOST else ""
    return f"{', '.join(arms[:_MOST])}{more}"


def _cost(choice: Choice) -> str:
    """Say what the choice costs beside the full cache."""
    cost, full = choice.cost, choice.full
    if cost is None or not full:
        return ""
    if choice.by != "time":
        return f"{digits.size(cost)} of {digits.size(full)} ({digits.share(cost / full)})"
    told = f"{digits.plain(1 / cost)} tokens/s, {digits.times(full / cost)} as fast"
    if (speed := choice.speed) is None:
        return told
    noise = ", within the noise" if speed.low <= 1 else ""
    return f"{told} ({digits.times(speed.low)} to {digits.times(speed.high)}{noise})"


def _score(standing: Standing | None) -> str:
    """Say how sure it is that the choice is within bounds."""
    if standing is None or standing.difference is None:
        return ""
    found = (standing.difference, standing.low, standing.high)
    return score_in_words(standing.task, standing.n, *found)


def score_in_words(
    task: str, n: int, difference: float, low: float | None, high: float | None
) -> str:
    """Say a score against the full cache's, in percent of that, and how sure it is.

    >>> score_in_words("niah", 33, -1.26, -3.0, 0.5)
    'niah -1.3 % (-3.0 to +0.5, n=33)'
    """
    if low == high == 0:
        return (
            f"{task}: none of {n} samples differs (up to {digits.share(unseen(n))} could, unseen)"
        )
    interval = "no interval" if low is None else f"{low:+.1f} to {high:+.1f}"
    return f"{task} {difference:+.1f} % ({interval}, n={n})"


def _interval(standing: Standing) -> str:
    return f"{standing.low:+.1f} to {standing.high:+.1f}"
