"""Scores against the budget: a line per policy, the full cache dashed across."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvtool.documents.results import ResultsDocument, TaskResult
from kvtool.report.metrics import headline
from kvtool.report.panels import add_legend, log_y, new_panels
from kvtool.report.style import Look, looks
from kvtool.report.variants import Family, budget_size, families, results_of, task_names, wrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_UNITS = {"tokens": "budget (tokens)", "ratio": "budget (share of the prompt)", "bytes": "budget"}


def budget_panels(document: ResultsDocument) -> list[tuple[str, str]]:
    """Return the tasks and units of budgets for which scores against budgets can be drawn."""
    units = {
        budget_size(variant.budget)[0] for variant in document.arms if variant.budget is not None
    }
    return [
        (task, unit)
        for task in task_names(document)
        for unit in _UNITS
        if unit in units and any(r.value is not None for r in results_of(document, task))
    ]


def budget_figure(document: ResultsDocument) -> Figure:
    """Return a panel per task: a line per policy over its budgets, whiskers one standard error."""
    wanted = budget_panels(document)
    look = looks(document)
    figure, panels = new_panels(len(wanted))
    for panel, (task, unit) in zip(panels, wanted, strict=True):
        results = {result.arm: result for result in results_of(document, task)}
        places, ticks = _places(document, unit)
        for family in families(document):
            _budget_line(panel, family, look[family.label], results, places)
        sample = next(iter(results.values()))
        _budget_axis(panel, ticks, _budgets(document, unit), unit)
        _score_axis(panel, list(results.values()))
        panel.set_title(task)
        panel.set_ylabel(headline(sample))
    add_legend(figure, panels)
    return figure


def _places(document: ResultsDocument, unit: str) -> tuple[dict[str, float], dict[float, str]]:
    """Return the x of each variant, and the ticks: budgets, or policies if there is one budget."""
    swept, sizes = [], {}
    for family in families(document):
        for variant in family.variants:
            if variant.budget is not None and (size := budget_size(variant.budget))[0] == unit:
                swept.append((family, variant))
                sizes[variant.name] = float(size[1])
    if len(set(sizes.values())) > 1:
        return sizes, {sizes[variant.name]: str(variant.budget) for _, variant in swept}
    ranks = {variant.name: float(rank) for rank, (_, variant) in enumerate(swept)}
    return ranks, {ranks[variant.name]: family.label for family, variant in swept}


def _budget_line(
    panel: Axes,
    family: Family,
    look: Look,
    results: dict[str, TaskResult],
    places: dict[str, float],
) -> None:
    for variant in family.variants:
        value = results[variant.name].value if variant.name in results else None
        if variant.budget is None and value is not None:
            dashes = "--" if family.is_full else "-."
            panel.axhline(
                value, color=look.colour, linestyle=dashes, linewidth=1.2, label=family.label
            )
    swept = [variant for variant in family.variants if variant.name in places]
    if not swept:
        return
    found = [results.get(variant.name) for variant in swept]
    panel.errorbar(
        [places[variant.name] for variant in swept],
        [math.nan if r is None or r.value is None else r.value for r in found],
        yerr=[math.nan if r is None or r.stderr is None else r.stderr for r in found],
        color=look.colour,
        marker=look.marker,
        capsize=2.5,
        elinewidth=1.0,
        label=family.label,
    )


def _budgets(document: ResultsDocument, unit: str) -> list[str]:
    found = dict.fromkeys(variant.budget for variant in document.arms if variant.budget is not None)
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


def _score_axis(panel: Axes, results: list[TaskResult]) -> None:
    """Take a log scale where a perplexity explodes, so that the other variants stay apart."""
    values = [result.value for result in results if result.value is not None]
    if results[0].lower_is_better and min(values) > 0 and max(values) / min(values) > 20:
        log_y(panel)
