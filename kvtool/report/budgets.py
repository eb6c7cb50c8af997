"""Scores against the budget: a line per policy, the full cache dotted across."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from kvtool.documents.results import ResultsDocument, TaskResult
from kvtool.report.metrics import headline
from kvtool.report.panels import (
    FULL_LINE,
    Look,
    add_legend,
    covered,
    dodge,
    draw_points,
    looks,
    new_panels,
    score_axis,
    whisker,
    widen_covered,
)
from kvtool.report.variants import (
    Family,
    budget_size,
    families,
    fed_like_full,
    results_of,
    task_names,
    wrap,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STEP = 1.07  # from one policy to the next, as a factor
_TAKEN = 0.6  # of the space between two budgets, at most
_UNITS = {
    "tokens": "budget (tokens)",
    "ratio": "budget (share of the prompt)",
    "bytes": "budget (bytes)",
}


def budget_panels(document: ResultsDocument) -> list[tuple[str, str]]:
    """Return the tasks and units of budgets for which scores against budgets can be drawn."""
    units = {
        budget_size(variant.budget)[0]
        for variant in document.variants
        if variant.budget is not None
    }
    return [
        (task, unit)
        for task in task_names(document)
        for unit in _UNITS
        if unit in units and any(r.value is not None for r in results_of(document, task))
    ]


def budget_figure(document: ResultsDocument) -> Figure:
    """Return a panel per task: a line per policy over its budgets, whiskers 95 % intervals."""
    wanted = budget_panels(document)
    look = looks(document)
    figure, panels = new_panels(len(wanted))
    for panel, (task, unit) in zip(panels, wanted, strict=True):
        results = {result.variant: result for result in results_of(document, task)}
        places, ticks = _places(document, unit)
        found = families(document)
        lines = [_line(family, results, unit) for family in found]
        colours = [look[family.label].colour for family in found]
        pieces = covered(lines, colours)
        for family, line, hidden, colour in zip(found, lines, pieces, colours, strict=True):
            named = dict(_sizes(family, unit))
            place = {size: (places[named[size]], y) for size, y in line.items() if y is not None}
            widen_covered(panel, place, hidden, colour)
            _budget_line(panel, document, family, look[family.label], results, places)
        _whole_lines(panel, found, look, results)
        sample = next(iter(results.values()))
        _budget_axis(panel, ticks, _budgets(document, unit), unit)
        score_axis(panel, list(results.values()))
        panel.set_title(task)
        panel.set_ylabel(headline(sample))
    add_legend(figure, panels)
    return figure


def _places(document: ResultsDocument, unit: str) -> tuple[dict[str, float], dict[float, str]]:
    """Return the x of each variant, and the ticks: budgets, or policies if there is one budget.

    Policies of the same budget are drawn side by side.
    """
    swept, sizes = [], {}
    for family in families(document):
        for variant in family.variants:
            if variant.budget is not None and (size := budget_size(variant.budget))[0] == unit:
                swept.append((family, variant))
                sizes[variant.name] = float(size[1])
    ticks = sorted(set(sizes.values()))
    if len(ticks) > 1:
        closest = min(after / before for before, after in pairwise(ticks))
        step = min(_STEP, closest ** (_TAKEN / len(sizes) * len(ticks)))
        moved = dodge(list(sizes.values()), near=1.0, step=step)
        places = dict(zip(sizes, moved, strict=True))
        return places, {sizes[variant.name]: str(variant.budget) for _, variant in swept}
    ranks = {variant.name: float(rank) for rank, (_, variant) in enumerate(swept)}
    return ranks, {ranks[variant.name]: family.label for family, variant in swept}


def _line(family: Family, results: dict[str, TaskResult], unit: str) -> dict[float, float | None]:
    """Return a policy's scores by budget of this unit."""
    return {size: results[name].value for size, name in _sizes(family, unit) if name in results}


def _sizes(family: Family, unit: str) -> list[tuple[float, str]]:
    """Return the budgets of this unit and the names of their variants."""
    sized = [
        (budget_size(variant.budget), variant.name)
        for variant in family.variants
        if variant.budget is not None
    ]
    return [(float(size), name) for (kind, size), name in sized if kind == unit]


def _budget_line(
    panel: Axes,
    document: ResultsDocument,
    family: Family,
    look: Look,
    results: dict[str, TaskResult],
    places: dict[str, float],
) -> None:
    swept = [variant for variant in family.variants if variant.name in places]
    if not swept:
        return
    found = [results.get(variant.name) for variant in swept]
    draw_points(
        panel,
        [places[variant.name] for variant in swept],
        [None if result is None else result.value for result in found],
        [None if result is None else whisker(result) for result in found],
        look,
        family.long_label,
        hollow=not all(fed_like_full(document, result) for result in found if result is not None),
    )


def _whole_lines(
    panel: Axes, found: list[Family], look: dict[str, Look], results: dict[str, TaskResult]
) -> None:
    """Draw what has no budget across: the full cache, and it in fewer bits, each with its marker.

    Markers are drawn beside each other, because such scores are often equal.
    """
    whole = [
        (family, result.value)
        for family in found
        if family.variants[0].budget is None
        and (result := results.get(family.variants[0].name)) is not None
        and result.value is not None
    ]
    for rank, (family, value) in enumerate(whole):
        if family.is_full:
            panel.axhline(value, label=family.label, **FULL_LINE)
            continue
        own = look[family.label]
        x = [i / (len(whole) + 1) for i in range(len(whole) + 2)]
        panel.plot(
            x,
            [value] * len(x),
            transform=panel.get_yaxis_transform(),
            color=own.colour,
            linestyle="-.",
            linewidth=0.8,
            marker=own.marker,
            markevery=[rank + 1],
            label=family.label,
        )


def _budgets(document: ResultsDocument, unit: str) -> list[str]:
    found = dict.fromkeys(
        variant.budget for variant in document.variants if variant.budget is not None
    )
    return [str(budget) for budget in found if budget_size(budget)[0] == unit]


def _budget_axis(panel: Axes, ticks: dict[float, str], budgets: list[str], unit: str) -> None:
    places = sorted(ticks)
    labels = [ticks[place] for place in places]
    if len(budgets) > 1:
        panel.set_xscale("log", base=2)
        panel.set_xlim(places[0] / 1.3, places[-1] * 1.3)
        panel.set_xticks(places, labels)
        panel.set_xlabel(_UNITS[unit])
    else:
        panel.set_xlim(-0.6, len(places) - 0.4)
        panel.set_xticks(places, [wrap(label, 18) for label in labels], rotation=35, ha="right")
        panel.set_xlabel(f"policy, budget {budgets[0]}")
    panel.minorticks_off()
    panel.grid(axis="y")
