"""Scores as lines over the bytes that a cache holds, and over the budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import isnan, nan
from typing import TYPE_CHECKING

from kvtool.documents.results import ResultsDocument, TaskResult, VariantEntry
from kvtool.report import formats
from kvtool.report.metrics import headline
from kvtool.report.panels import (
    FRONT,
    FULL_LINE,
    Look,
    add_legend,
    covered,
    dodge,
    draw_points,
    looks,
    neighbours,
    new_panels,
    pareto_front,
    score_axis,
    whisker,
    widen_covered,
)
from kvtool.report.variants import (
    FULL,
    Family,
    families,
    fed_like_full,
    results_of,
    task_names,
    wrap,
)
from kvtool.sizes import budget_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NEAR = 1.06  # bytes that differ less are set side by side
_STEP_OF_BYTES = 1.035  # as a factor, at least
_APART = 0.016  # of the axis
_MOST_TICKS = 5
_STEP = 1.07  # from one policy to the next, as a factor
_TAKEN = 0.6  # of the space between two budgets, at most
_UNITS = {
    "tokens": "budget (tokens)",
    "ratio": "budget (share of the prompt)",
    "bytes": "budget (bytes)",
}


@dataclass(frozen=True)
class HeldPoint:
    """What a variant holds, or its budget, and its score on one task.

    Attributes:
        bytes: buffers of keys and values and the policy's own numbers, the mean of the samples; in
            a picture over budgets, the budget.
        value: NaN where it has no score.
        whisker: the ends of its 95 % interval.
        comparable: whether it was fed like the full cache, so that both compare.
    """

    variant: VariantEntry
    bytes: float
    value: float
    whisker: tuple[float, float] | None = None
    comparable: bool = True


Lines = list[tuple[Family, list[HeldPoint]]]
"""The points of each policy."""


def _draw_lines(
    panel: Axes,
    document: ResultsDocument,
    lines: Lines,
    place: Mapping[str, float],
    x: Mapping[str, float],
) -> None:
    """Draw a line for each policy; `place` is where variants compare, `x` where they are drawn."""
    look = looks(document)
    pieces = covered(
        [{place[each.variant.name]: each.value for each in found} for _, found in lines],
        [look[family.label].colour for family, _ in lines],
    )
    for (family, found), hidden in zip(lines, pieces, strict=True):
        if family.is_full and found:
            panel.axhline(found[0].value, label=family.label, **FULL_LINE)
            panel.plot([x[found[0].variant.name]], [found[0].value], "*", color="black", zorder=4)
        if family.is_full or not found:
            continue
        known = [each for each in found if not isnan(each.value)]
        line = {place[each.variant.name]: (x[each.variant.name], each.value) for each in known}
        widen_covered(panel, line, hidden, look[family.label].colour)
        draw_points(
            panel,
            [x[each.variant.name] for each in found],
            [each.value for each in found],
            [each.whisker for each in found],
            look[family.label],
            family.long_label,
            hollow=not all(each.comparable for each in found),
        )


def held_tasks(document: ResultsDocument) -> list[str]:
    """Return the tasks in which a variant under a budget has a score and its bytes."""
    return [
        task
        for task in task_names(document)
        if any(point.variant.policy != FULL for point in held_points(document, task))
    ]


def held_points(document: ResultsDocument, task: str) -> list[HeldPoint]:
    """Return the point of each variant that was measured, policy by policy."""
    variants = {variant.name: variant for variant in document.variants}
    return [
        HeldPoint(
            variants[result.variant],
            result.cost.held_bytes,
            result.value,
            whisker(result),
            comparable=fed_like_full(document, result),
        )
        for result in results_of(document, task)
        if result.cost is not None and result.value is not None and result.cost.held_bytes > 0
    ]


def front_of(points: list[HeldPoint], *, lower_is_better: bool) -> list[HeldPoint]:
    """Return the Pareto front of those that compare, bytes ascending."""
    known = [point for point in points if point.comparable]
    pairs = [(point.bytes, point.value) for point in known]
    return [known[i] for i in pareto_front(pairs, lower_is_better=lower_is_better)]


def held_figure(document: ResultsDocument) -> Figure:
    """Return a panel per task: a line per policy over its bytes, the front, the full cache."""
    tasks = held_tasks(document)
    figure, panels = new_panels(len(tasks))
    for panel, task in zip(panels, tasks, strict=True):
        results = results_of(document, task)
        points = held_points(document, task)
        _draw_bytes(panel, document, points, results[0])
        score_axis(panel, results)
        panel.set_title(task)
        panel.set_ylabel(headline(results[0]))
        panel.set_xlabel(f"bytes held: {_of_what(results)}")
    add_legend(figure, panels)
    return figure


def _of_what(results: list[TaskResult]) -> str:
    costs = [result.cost for result in results if result.cost is not None]
    filled = any(cost.allocated_bytes is None for cost in costs)  # by an earlier version
    aside = "; without host memory" if any(cost.host_bytes for cost in costs) else ""
    return f"{'filled slots' if filled else 'buffers'} and policy state{aside}"


def _draw_bytes(
    panel: Axes, document: ResultsDocument, points: list[HeldPoint], some: TaskResult
) -> None:
    panel.set_xscale("log", base=2)
    held = [point.bytes for point in points]
    step = max(_STEP_OF_BYTES, (max(held) / min(held)) ** _APART)
    moved = dodge(held, near=_NEAR, step=step)
    x = {point.variant.name: place for point, place in zip(points, moved, strict=True)}
    _draw_front(panel, front_of(points, lower_is_better=some.lower_is_better), x)
    by_name = {point.variant.name: point for point in points}
    lines = [
        (family, [by_name[each.name] for each in family.variants if each.name in by_name])
        for family in families(document)
    ]
    groups = neighbours(held, near=_NEAR)  # where nearly equal bytes compare
    place = {points[i].variant.name: held[group[0]] for group in groups for i in group}
    _draw_lines(panel, document, lines, place, x)
    _bytes_axis(panel, list(x.values()))


def _draw_front(panel: Axes, front: list[HeldPoint], x: dict[str, float]) -> None:
    """Draw the Pareto front as a broad step behind the lines."""
    panel.step(
        [x[point.variant.name] for point in front],
        [point.value for point in front],
        where="post",
        color=FRONT,
        linewidth=6,
        solid_capstyle="round",
        zorder=1,
        label="Pareto front",
    )


def _bytes_axis(panel: Axes, places: list[float]) -> None:
    """Mark powers of two, few enough that they do not touch; the ends where there are none."""
    low, high = min(places) / 1.15, max(places) * 1.15
    panel.set_xlim(low, high)
    powers = [2.0**i for i in range(64) if low <= 2.0**i <= high]
    ends = sorted({min(places), max(places)})
    shown = powers[:: -(-len(powers) // _MOST_TICKS)] if len(powers) > 1 else ends
    panel.set_xticks(shown, [formats.size(int(power)).replace(".0 ", "\n") for power in shown])
    panel.minorticks_off()
    panel.grid(axis="both")


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
    figure, panels = new_panels(len(wanted))
    for panel, (task, unit) in zip(panels, wanted, strict=True):
        results = {result.variant: result for result in results_of(document, task)}
        places, ticks = _places(document, unit)
        lines = [(each, _sized(document, each, unit, results)) for each in families(document)]
        sizes = {each.variant.name: each.bytes for _, found in lines for each in found}
        _draw_lines(panel, document, lines, sizes, places)
        _whole_lines(panel, families(document), looks(document), results)
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


def _sized(
    document: ResultsDocument, family: Family, unit: str, results: Mapping[str, TaskResult]
) -> list[HeldPoint]:
    """Return the points of a policy under its budgets of a unit."""
    found = []
    for variant in family.variants:
        if variant.budget is None or (size := budget_size(variant.budget))[0] != unit:
            continue
        point, result = HeldPoint(variant, float(size[1]), nan), results.get(variant.name)
        if result is not None:
            value = nan if result.value is None else result.value
            given = value, whisker(result), fed_like_full(document, result)
            point = HeldPoint(variant, point.bytes, *given)
        found.append(point)
    return found


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
