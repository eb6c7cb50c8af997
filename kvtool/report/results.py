"""Build the tables of a results document, which a terminal, the page and a notebook show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvtool.documents.results import CellEntry, ResultsDocument, TaskResult, VariantEntry
from kvtool.evaluation.costs import UNTESTED, Spent, is_tested, relative, spent_by_variant, spent_on
from kvtool.report import formats
from kvtool.report.metrics import headline, meaning, title
from kvtool.report.needles import is_needle, needle_grids, scale
from kvtool.report.table import Cell, Column, Note, Row, Table, row
from kvtool.report.variants import (
    FULL,
    families,
    full_variant,
    results_of,
    suite,
    task_names,
    wrap,
)

if TYPE_CHECKING:
    from kvtool.evaluation.run.wrong import WrongAnswer

_MOST_CELLS = 24
_MOST_LETTERS = 240  # of an answer
_HEAD = Column("variant", words=True)
_COST = [
    Column(title, below, folds=True, group="cost of all tasks")
    for title, below in (
        ("K/V", "of full"),
        ("held", "smaller"),
        ("policy", "state"),
        ("prefill", "s"),
        ("decode", "tokens/s"),
        ("written", "tokens"),
        ("evicted", "in"),
    )
]
_STATE = 3  # the place of the policy's state, for which a terminal is too narrow


def summary(document: ResultsDocument) -> Table:
    """Return the scores of all variants, a column for each task and each mean of a suite."""
    tasks, suites = task_names(document), _suites(document)

    def scores(variant: VariantEntry) -> list[Cell]:
        row = [_score(document.of(variant.name, task), variant) for task in tasks]
        return [*row, *(_average(document, name, variant) for name in suites)]

    columns = [_task_column(document, task) for task in tasks]
    columns += [
        Column(name, f"mean of {len(_mean_of(document, name))}", folds=True, group=f"suite {name}")
        for name in suites
    ]
    return Table([_HEAD, *columns], _rows(document, scores))


def summary_with_costs(document: ResultsDocument) -> Table:
    """Return the scores of all variants and their costs, as narrow as a terminal wants them."""
    scores, spent = summary(document), costs(document)
    if spent is None:
        return scores
    return scores.beside(spent.pick([i for i in range(len(spent.columns)) if i != _STATE]))


def means(document: ResultsDocument) -> list[tuple[str, str]]:
    """Return each suite with the tasks that its mean is of."""
    return [(name, ", ".join(_mean_of(document, name))) for name in _suites(document)]


def costs(document: ResultsDocument, spent: dict[str, Spent] | None = None) -> Table | None:
    """Return what the variants cost, or None where no task measured it.

    Args:
        spent: by variant; None: over all tasks.
    """
    spent = spent_by_variant(document) if spent is None else spent
    rows = _rows(document, lambda variant: _cost(variant.name, spent, document))
    return Table([_HEAD, *_COST], rows) if spent else None


def task(document: ResultsDocument, name: str) -> Table:
    """Return every metric of one task, its samples and its cost."""
    results = {result.variant: result for result in results_of(document, name)}
    names = dict.fromkeys(m.name for result in results.values() for m in result.metrics)
    others = [n for n in names if any(n != result.metric for result in results.values())]

    def cells(variant: VariantEntry) -> list[Cell]:
        result = results.get(variant.name)
        metrics = [_score(result, variant), *(_metric(result, other) for other in others)]
        failed = result.failed if result else 0
        count = Cell(str(result.n) if result else formats.MISSING)
        return [*metrics, count, Cell(str(failed), look="failed" if failed else "")]

    named = [Column(title(other), other) for other in others]
    columns = [_HEAD, _task_column(document, name), *named, Column("n"), Column("failed")]
    scores = Table(columns, _rows(document, cells))
    measured = {variant: spent_on([result]) for variant, result in results.items()}
    spent = costs(document, {name: cost for name, cost in measured.items() if cost is not None})
    return scores if spent is None else scores.beside(spent)


def meanings(document: ResultsDocument, name: str) -> list[tuple[str, str]]:
    """Return each metric of one task in words, with the sentence that says what it measures."""
    results = results_of(document, name)
    names = dict.fromkeys(metric.name for result in results for metric in result.metrics)
    return [(title(each), meaning(each)) for each in dict.fromkeys([results[0].metric, *names])]


def cells(document: ResultsDocument, name: str) -> Table | None:
    """Return the headline per cell, unless there are too many to read but as a picture."""
    by_variant = {
        result.variant: {_place(cell.at): (result, cell) for cell in result.cells}
        for result in results_of(document, name)
        if not is_needle(result)
    }
    places = list(dict.fromkeys(place for found in by_variant.values() for place in found))
    if not 1 < len(places) <= _MOST_CELLS:
        return None

    def parts(variant: VariantEntry) -> list[Cell]:
        found = by_variant.get(variant.name, {})
        return [_part(*found[p]) if p in found else Cell(formats.MISSING) for p in places]

    return Table([_HEAD, *map(Column, places)], _rows(document, parts))


def wrong(answers: Sequence[WrongAnswer]) -> Table:
    """Return wrong answers beside their references."""
    rows = []
    for each in answers:
        where = each.sample if each.question is None else f"{each.sample}, question {each.question}"
        wanted = " or ".join(map(_shortened, each.references))
        score = formats.score(each.score, each.best)
        rows.append(row(each.variant, where, _shortened(each.answer), wanted, score))
    named = [Column(title, words=True) for title in ("sample", "answer", "reference")]
    return Table([_HEAD, *named, Column("score")], rows)


def _shortened(text: str) -> str:
    """Strip a text, and cut it to a number of characters."""
    text = text.strip()
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]} …"


def gates(document: ResultsDocument) -> Table:
    """Return every condition and whether it is met."""
    rows = []
    for gate in document.gates:
        value = formats.MISSING if gate.value is None else formats.plain(gate.value)
        outcome = Cell("passed", look="better") if gate.passed else Cell("FAILED", look="failed")
        limit = formats.plain(gate.limit)
        rows.append(row(formats.gate_name(gate), gate.variant, gate.task, value, limit, outcome))
    named = [Column(title, words=True, folds=True) for title in ("gate", "variant", "task")]
    return Table([*named, *map(Column, ("value", "limit", ""))], rows)


def needles(document: ResultsDocument, task: str) -> list[Table]:
    """Return a heat map for each variant: depths down, lengths across."""
    grids, found = needle_grids(document, task), []
    for result in results_of(document, task):
        if (grid := grids.get(result.variant)) is None:
            continue
        best = scale(result)
        columns = [Column(str(length), folds=True) for length in grid.lengths]
        rows = [
            Row(f"{depth:g}%", [_shaded(value, best) for value in row])
            for depth, row in zip(grid.depths, grid.values, strict=True)
        ]
        mean = formats.score(result.value, result.best)
        caption = f"{wrap(result.variant, 28)}\n{result.task} {mean}"
        found.append(Table([Column("depth"), *columns], rows, caption, dense=True))
    return found


def _shaded(value: float | None, best: float) -> Cell:
    if value is None:
        return Cell(formats.MISSING)
    return Cell(f"{value:.{2 if best <= 1 else 0}f}", share=value / best)


def _rows(document: ResultsDocument, cells: Callable[[VariantEntry], list[Cell]]) -> list[Row]:
    """Return a row per variant, a line above each policy."""
    return [
        Row(variant.name, cells(variant), first=variant is family.variants[0])
        for family in families(document)
        for variant in family.variants
    ]


def _task_column(document: ResultsDocument, name: str) -> Column:
    some = results_of(document, name)[0]
    lines = name.replace("/", "\n", 1)
    return Column(
        name,
        headline(some),
        short=f"{lines}\n{some.metric} {formats.direction(some)}",
        folds=True,
        group=f"suite {suite(name)}",
    )


def _suites(document: ResultsDocument) -> list[str]:
    return list(dict.fromkeys(average.suite for average in document.averages))


def _mean_of(document: ResultsDocument, name: str) -> list[str]:
    averages = [average for average in document.averages if average.suite == name]
    return list(dict.fromkeys(task for average in averages for task in average.tasks))


def _score(result: TaskResult | None, variant: VariantEntry) -> Cell:
    if result is None:
        return Cell(formats.MISSING)
    pair, best = result.paired, result.best
    notes = [Note(formats.stderr(result.stderr, best))] if pair is None else []
    if variant.policy != FULL:
        notes.append(Note(formats.signed(result.delta, best), formats.tone(result)))
    if pair is not None:
        notes.append(Note(formats.interval(pair.low, pair.high, best)))
    if not is_tested(result, variant):
        notes.append(Note(UNTESTED, "dim"))
    if result.failed:
        notes.append(Note(f"!{result.failed}", "failed"))
    return _cell(formats.score(result.value, best), *notes)


def _cell(text: str, *notes: Note) -> Cell:
    """Return a cell with those of the notes that say something."""
    return Cell(text, tuple(note for note in notes if note.text))


def _metric(result: TaskResult | None, name: str) -> Cell:
    found = next((m for m in result.metrics if m.name == name), None) if result else None
    if found is None or found.value is None:
        return Cell(formats.MISSING)
    notes = () if found.stderr is None else (Note(f"±{formats.plain(found.stderr)}"),)
    return Cell(formats.plain(found.value), notes)


def _place(at: dict[str, int | float | str]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in at.items())


def _part(result: TaskResult, cell: CellEntry) -> Cell:
    error = Note(formats.stderr(cell.stderr, result.best))
    return _cell(formats.score(cell.value, result.best), error)


def _average(document: ResultsDocument, name: str, variant: VariantEntry) -> Cell:
    mine = (
        each for each in document.averages if (each.suite, each.variant) == (name, variant.name)
    )
    average = next(mine, None)
    if average is None:
        return Cell(formats.MISSING)
    some = results_of(document, average.tasks[0])[0]
    text = formats.score(average.value, some.best)
    if variant.policy == FULL:
        return Cell(text)
    tone = formats.tone(some.model_copy(update={"delta": average.delta}))
    return _cell(text, Note(formats.signed(average.delta, some.best), tone))


def _cost(variant: str, spent: dict[str, Spent], document: ResultsDocument) -> list[Cell]:
    cost = spent.get(variant)
    if cost is None:
        return [Cell(formats.MISSING)] * len(_COST)
    full = full_variant(document)
    baseline = spent.get(full.name) if full else None
    decoded = formats.MISSING if cost.decode_rate is None else formats.plain(cost.decode_rate)
    evicted = formats.MISSING if cost.evicted is None else f"{cost.evicted:.0%}"
    return [
        _cell(formats.size(cost.kv_bytes), Note(formats.share(cost.share(cost.kv_bytes)))),
        _cell(formats.size(cost.held_bytes), Note(_times(cost.times_smaller(baseline)))),
        Cell(formats.size(cost.state_bytes)),
        Cell(formats.plain(cost.prefill_s)),
        _cell(decoded, Note(_times(relative("decode_rate", cost, baseline)))),
        Cell(f"{cost.written:.1f}"),
        Cell(evicted),
    ]


def _times(ratio: float | None) -> str:
    return "" if ratio is None else formats.times(ratio)
