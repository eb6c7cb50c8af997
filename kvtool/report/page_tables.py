"""The tables of the page: the same numbers as on the terminal, and every metric per task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtool.documents.results import CellEntry, ResultsDocument, TaskResult, VariantEntry
from kvtool.evaluation.run.wrong import WrongAnswer
from kvtool.report import formats
from kvtool.report.costs import Spent, relative, spent_by_variant, spent_on
from kvtool.report.metrics import headline, meaning, title
from kvtool.report.needles import is_needle
from kvtool.report.variants import FULL, families, full_variant, results_of, task_names

_MOST_CELLS = 24
_MOST_LETTERS = 240  # of an answer


@dataclass(frozen=True)
class Note:
    """A word in small print after a number; `look` is a class of the style sheet."""

    text: str
    look: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    notes: tuple[Note, ...] = ()
    look: str = ""


@dataclass(frozen=True)
class Header:
    """The title of a column, and a line below it; `look` is a class of the style sheet."""

    title: str
    below: str = ""
    look: str = ""


_COST = [
    Header("held", "buffers, state"),
    Header("× smaller", "held"),
    Header("K/V"),
    Header("of full"),
    Header("policy state"),
    Header("prefill", "s"),
    Header("decode", "tokens/s"),
    Header("× full"),
]


@dataclass(frozen=True)
class Row:
    """A row of a table; `first` draws a line above it."""

    head: str
    cells: list[Cell]
    first: bool = False


@dataclass(frozen=True)
class Table:
    """A table of a page; the first header stands over the heads of the rows."""

    headers: list[Header]
    rows: list[Row]


def summary(document: ResultsDocument) -> Table:
    """Return the scores of all arms, a column for each task and each mean of a suite."""
    tasks, suites = task_names(document), _suites(document)

    def scores(arm: VariantEntry) -> list[Cell]:
        row = [_score(document.of(arm.name, task), arm) for task in tasks]
        return [*row, *(_average(document, suite, arm) for suite in suites)]

    headers = [_task_header(document, task) for task in tasks]
    headers += [Header(suite, f"mean of {len(_mean_of(document, suite))}") for suite in suites]
    return Table([Header("arm"), *headers], _rows(document, scores))


def means(document: ResultsDocument) -> list[tuple[str, str]]:
    """Return each suite with the tasks that its mean is of."""
    return [(suite, ", ".join(_mean_of(document, suite))) for suite in _suites(document)]


def costs(document: ResultsDocument) -> Table | None:
    """Return what the arms cost, or None where no task measured it."""
    spent = spent_by_variant(document)
    if not spent:
        return None
    rows = _rows(document, lambda arm: _cost(arm.name, spent, document))
    return Table([Header("arm"), *_COST], rows)


def task(document: ResultsDocument, name: str) -> Table:
    """Return every metric of one task, its samples and its cost."""
    results = {result.arm: result for result in results_of(document, name)}
    names = dict.fromkeys(m.name for result in results.values() for m in result.metrics)
    others = [n for n in names if any(n != result.metric for result in results.values())]
    measured = {arm: spent_on([result]) for arm, result in results.items()}
    spent = {arm: cost for arm, cost in measured.items() if cost is not None}

    def cells(arm: VariantEntry) -> list[Cell]:
        result = results.get(arm.name)
        row = [_score(result, arm), *(_metric(result, other) for other in others)]
        row.append(Cell(str(result.n) if result else formats.MISSING))
        failed = result.failed if result else 0
        row.append(Cell(str(failed), look="failed" if failed else ""))
        return [*row, *(_cost(arm.name, spent, document) if spent else [])]

    named = [Header(title(other), other) for other in others]
    headers = [Header("arm"), _task_header(document, name), *named, Header("n"), Header("failed")]
    return Table([*headers, *(_COST if spent else [])], _rows(document, cells))


def meanings(document: ResultsDocument, name: str) -> list[tuple[str, str]]:
    """Return each metric of one task in words, with the sentence that says what it measures."""
    results = results_of(document, name)
    names = dict.fromkeys(metric.name for result in results for metric in result.metrics)
    return [(title(each), meaning(each)) for each in dict.fromkeys([results[0].metric, *names])]


def cells(document: ResultsDocument, name: str) -> Table | None:
    """Return the headline per cell, unless there are too many to read but as a picture."""
    by_arm = {
        result.arm: {_place(cell.at): (result, cell) for cell in result.cells}
        for result in results_of(document, name)
        if not is_needle(result)
    }
    places = list(dict.fromkeys(place for found in by_arm.values() for place in found))
    if not 1 < len(places) <= _MOST_CELLS:
        return None

    def row(arm: VariantEntry) -> list[Cell]:
        found = by_arm.get(arm.name, {})
        return [_cell(*found[p]) if p in found else Cell(formats.MISSING) for p in places]

    return Table([Header("arm"), *map(Header, places)], _rows(document, row))


def wrong(answers: Sequence[WrongAnswer]) -> Table:
    """Return wrong answers beside their references."""
    rows = []
    for each in answers:
        where = each.sample if each.question is None else f"{each.sample}, question {each.question}"
        wanted = " or ".join(_shortened(reference) for reference in each.references)
        words = [Cell(text, look="words") for text in (where, _shortened(each.answer), wanted)]
        rows.append(Row(each.arm, [*words, Cell(formats.score(each.score, each.best))]))
    named = [Header(title, look="words") for title in ("sample", "answer", "reference")]
    return Table([Header("arm"), *named, Header("score")], rows)


def _shortened(text: str) -> str:
    """Strip a text, and leave out what comes after so many characters."""
    text = text.strip()
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]} …"


def gates(document: ResultsDocument) -> Table:
    """Return every condition and whether it is met."""
    rows = []
    for gate in document.gates:
        value = formats.MISSING if gate.value is None else formats.plain(gate.value)
        outcome = Cell("passed", look="better") if gate.passed else Cell("FAILED", look="failed")
        words = [Cell(text, look="words") for text in (gate.task, formats.gate_name(gate))]
        numbers = [Cell(value), Cell(formats.plain(gate.limit))]
        rows.append(Row(gate.arm, [*words, *numbers, outcome]))
    named = [Header(title, look="words") for title in ("task", "gate")]
    return Table([Header("arm"), *named, *map(Header, ("value", "limit", ""))], rows)


def _rows(document: ResultsDocument, cells: Callable[[VariantEntry], list[Cell]]) -> list[Row]:
    """Return a row per arm, a line above each policy."""
    return [
        Row(arm.name, cells(arm), first=arm is family.variants[0])
        for family in families(document)
        for arm in family.variants
    ]


def _task_header(document: ResultsDocument, name: str) -> Header:
    some = results_of(document, name)[0]
    return Header(name, headline(some))


def _suites(document: ResultsDocument) -> list[str]:
    return list(dict.fromkeys(average.suite for average in document.averages))


def _mean_of(document: ResultsDocument, suite: str) -> list[str]:
    averages = [average for average in document.averages if average.suite == suite]
    return list(dict.fromkeys(task for average in averages for task in average.tasks))


def _score(result: TaskResult | None, arm: VariantEntry) -> Cell:
    if result is None:
        return Cell(formats.MISSING)
    notes = []
    if (pair := result.paired) is None:
        notes.append(Note(formats.stderr(result.stderr, result.best)))
    if result.delta is not None and arm.policy != FULL:
        notes.append(Note(formats.signed(result.delta, result.best), formats.tone(result)))
    if pair is not None:
        notes.append(Note(formats.interval(pair.low, pair.high, result.best)))
    if result.failed:
        notes.append(Note(f"!{result.failed}", "failed"))
    return Cell(
        formats.score(result.value, result.best), tuple(note for note in notes if note.text)
    )


def _metric(result: TaskResult | None, name: str) -> Cell:
    found = next((m for m in result.metrics if m.name == name), None) if result else None
    if found is None or found.value is None:
        return Cell(formats.MISSING)
    notes = () if found.stderr is None else (Note(f"±{formats.plain(found.stderr)}"),)
    return Cell(formats.plain(found.value), notes)


def _place(at: dict[str, int | float | str]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in at.items())


def _cell(result: TaskResult, cell: CellEntry) -> Cell:
    error = Note(formats.stderr(cell.stderr, result.best))
    return Cell(formats.score(cell.value, result.best), (error,))


def _average(document: ResultsDocument, suite: str, arm: VariantEntry) -> Cell:
    found = [a for a in document.averages if (a.suite, a.arm) == (suite, arm.name)]
    if not found:
        return Cell(formats.MISSING)
    average = found[0]
    some = results_of(document, average.tasks[0])[0]
    notes: tuple[Note, ...] = ()
    if average.delta is not None and arm.policy != FULL:
        tone = formats.tone(some.model_copy(update={"delta": average.delta}))
        notes = (Note(formats.signed(average.delta, some.best), tone),)
    return Cell(formats.score(average.value, some.best), notes)


def _cost(arm: str, spent: dict[str, Spent], document: ResultsDocument) -> list[Cell]:
    cost = spent.get(arm)
    if cost is None:
        return [Cell(formats.MISSING)] * len(_COST)
    full = full_variant(document)
    baseline = spent.get(full.name) if full else None
    ratio, smaller = relative("decode_rate", cost, baseline), cost.times_smaller(baseline)
    return [
        Cell(formats.size(cost.held_bytes)),
        Cell(formats.MISSING if smaller is None else formats.times(smaller)),
        Cell(formats.size(cost.kv_bytes)),
        Cell(formats.share(cost.kv_share)),
        Cell(formats.size(cost.state_bytes)),
        Cell(formats.plain(cost.prefill_s)),
        Cell(formats.MISSING if cost.decode_rate is None else formats.plain(cost.decode_rate)),
        Cell(formats.MISSING if ratio is None else formats.times(ratio)),
    ]
