"""The tables of the page: the same numbers as on the terminal, and every metric per task."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvtool.documents.results import ArmEntry, CellEntry, ResultsDocument, TaskResult
from kvtool.report import digits
from kvtool.report.markup import Markup, element
from kvtool.report.needles import is_needle
from kvtool.report.spent import Spent, relative, spent_by_variant, spent_on
from kvtool.report.variants import FULL, families, full_variant, results_of, task_names

_MOST_CELLS = 24
_COST = ("K/V", "of full", "policy state", "prefill s", "decode tokens/s", "× full")


def summary(document: ResultsDocument) -> list[Markup]:
    """Return a table of arms by tasks, which tasks a mean is of, and what the arms cost."""
    tasks = task_names(document)
    suites = list(dict.fromkeys(average.suite for average in document.averages))
    means = [_mean_of(document, suite) for suite in suites]

    def scores(arm: ArmEntry) -> list[Markup]:
        row = [_score(document.of(arm.name, task), arm) for task in tasks]
        return [*row, *(_average(document, suite, arm) for suite in suites)]

    headers = [_header(*_task_header(document, task)) for task in tasks]
    headers += [
        _header(suite, f"mean of {len(mean)}") for suite, mean in zip(suites, means, strict=True)
    ]
    parts = [_table(["arm", *headers], _rows(document, scores))]
    for suite, mean in zip(suites, means, strict=True):
        parts.append(element("p", f"{suite}: the plain mean of {', '.join(mean)}.", class_="soft"))
    if spent := spent_by_variant(document):
        rows = _rows(document, lambda arm: _cost(arm.name, spent, document))
        parts.append(_table(["arm", *_COST], rows))
    return parts


def task(document: ResultsDocument, name: str) -> Markup:
    """Return every metric of one task, its samples and its cost."""
    results = {result.arm: result for result in results_of(document, name)}
    names = dict.fromkeys(m.name for result in results.values() for m in result.metrics)
    others = [n for n in names if any(n != result.metric for result in results.values())]
    costs = {arm: spent_on([result]) for arm, result in results.items()}
    spent = {arm: cost for arm, cost in costs.items() if cost is not None}
    headers = ["arm", _header(*_task_header(document, name)), *others, "n", "failed"]

    def cells(arm: ArmEntry) -> list[Markup]:
        result = results.get(arm.name)
        row = [_score(result, arm), *(_metric(result, other) for other in others)]
        row.append(_number(str(result.n) if result else digits.MISSING))
        failed = result.failed if result else 0
        row.append(element("td", str(failed), class_="failed") if failed else _number("0"))
        return [*row, *(_cost(arm.name, spent, document) if spent else [])]

    return _table([*headers, *(_COST if spent else ())], _rows(document, cells))


def cells(document: ResultsDocument, name: str) -> Markup | str:
    """Return the headline per cell, unless there are too many to read but as a picture."""
    by_arm = {
        result.arm: {_place(cell.at): (result, cell) for cell in result.cells}
        for result in results_of(document, name)
        if not is_needle(result)
    }
    places = list(dict.fromkeys(place for found in by_arm.values() for place in found))
    if not 1 < len(places) <= _MOST_CELLS:
        return ""

    def row(arm: ArmEntry) -> list[Markup]:
        found = by_arm.get(arm.name, {})
        return [_cell(*found[p]) if p in found else _number(digits.MISSING) for p in places]

    return _table(["arm", *places], _rows(document, row))


def gates(document: ResultsDocument) -> Markup:
    """Return every condition and whether it is met."""
    rows = []
    for gate in document.gates:
        value = digits.MISSING if gate.value is None else digits.plain(gate.value)
        outcome, look = ("passed", "better") if gate.passed else ("FAILED", "failed")
        rows.append(
            element(
                "tr",
                element("th", gate.arm, scope="row"),
                element("td", gate.task, class_="words"),
                element("td", digits.gate_name(gate), class_="words"),
                _number(value),
                _number(digits.plain(gate.limit)),
                element("td", outcome, class_=look),
            )
        )
    return _table(["arm", "task", "gate", "value", "limit", ""], rows)


def _table(headers: list[str | Markup], rows: list[Markup] | Iterator[Markup]) -> Markup:
    head = element("tr", [element("th", header, scope="col") for header in headers])
    table = element("table", element("thead", head), element("tbody", rows))
    return element("div", table, class_="scroll", tabindex="0")


def _rows(document: ResultsDocument, cells: Callable[[ArmEntry], list[Markup]]) -> Iterator[Markup]:
    """Yield a row per arm, a line above each policy."""
    for family in families(document):
        for arm in family.variants:
            first = {"class_": "first"} if arm is family.variants[0] else {}
            yield element("tr", element("th", arm.name, scope="row"), cells(arm), **first)


def _header(title: str, below: str) -> Markup:
    return Markup(element("span", title) + element("br") + element("small", below))


def _task_header(document: ResultsDocument, name: str) -> tuple[str, str]:
    some = results_of(document, name)[0]
    return name, f"{some.metric} {digits.direction(some)}"


def _mean_of(document: ResultsDocument, suite: str) -> list[str]:
    averages = [average for average in document.averages if average.suite == suite]
    return list(dict.fromkeys(task for average in averages for task in average.tasks))


def _score(result: TaskResult | None, arm: ArmEntry) -> Markup:
    if result is None:
        return _number(digits.MISSING)
    parts = [digits.score(result.value, result.best)]
    if result.stderr is not None:
        parts.append(element("small", f" {digits.stderr(result.stderr, result.best)}"))
    if result.delta is not None and arm.policy != FULL:
        parts.append(_delta(digits.signed(result.delta, result.best), digits.tone(result)))
    if result.failed:
        parts.append(element("span", f" !{result.failed}", class_="failed"))
    return element("td", parts)


def _delta(text: str, tone: str) -> Markup:
    return element("small", f" {text}", **({"class_": tone} if tone else {}))


def _metric(result: TaskResult | None, name: str) -> Markup:
    found = next((m for m in result.metrics if m.name == name), None) if result else None
    if found is None or found.value is None:
        return _number(digits.MISSING)
    told = "" if found.stderr is None else f" ±{digits.plain(found.stderr)}"
    return element("td", digits.plain(found.value), element("small", told))


def _place(at: dict[str, int | float | str]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in at.items())


def _cell(result: TaskResult, cell: CellEntry) -> Markup:
    told = digits.stderr(cell.stderr, result.best)
    return element("td", digits.score(cell.value, result.best), element("small", f" {told}"))


def _average(document: ResultsDocument, suite: str, arm: ArmEntry) -> Markup:
    found = [a for a in document.averages if (a.suite, a.arm) == (suite, arm.name)]
    if not found:
        return _number(digits.MISSING)
    average = found[0]
    some = results_of(document, average.tasks[0])[0]
    parts = [digits.score(average.value, some.best)]
    if average.delta is not None and arm.policy != FULL:
        tone = digits.tone(some.model_copy(update={"delta": average.delta}))
        parts.append(_delta(digits.signed(average.delta, some.best), tone))
    return element("td", parts)


def _cost(arm: str, spent: dict[str, Spent], document: ResultsDocument) -> list[Markup]:
    cost = spent.get(arm)
    if cost is None:
        return [_number(digits.MISSING)] * len(_COST)
    full = full_variant(document)
    ratio = relative("decode_rate", cost, spent.get(full.name) if full else None)
    return [
        _number(digits.size(cost.kv_bytes)),
        _number(digits.share(cost.kv_share)),
        _number(digits.size(cost.state_bytes)),
        _number(digits.plain(cost.prefill_s)),
        _number(digits.MISSING if cost.decode_rate is None else digits.plain(cost.decode_rate)),
        _number(digits.MISSING if ratio is None else digits.times(ratio)),
    ]


def _number(text: str) -> Markup:
    return element("td", text)
