"""Scores against the bytes that a cache holds, where evicting and reading compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtool.documents.results import ResultsDocument, TaskResult, VariantEntry
from kvtool.report import formats
from kvtool.report.metrics import headline
from kvtool.report.panels import (
    FRONT,
    FULL_LINE,
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
    families,
    fed_like_full,
    results_of,
    task_names,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NEAR = 1.06  # bytes that differ less are set side by side
_STEP = 1.035  # as a factor, at least
_APART = 0.016  # of the axis
_MOST_TICKS = 5


@dataclass(frozen=True)
class HeldPoint:
    """What a variant holds and scores on one task.

    Attributes:
        bytes: buffers of keys and values and the policy's own numbers, the mean of the samples.
        whisker: the ends of its 95 % interval.
        comparable: whether it was fed like the full cache, so that both compare.
    """

    variant: VariantEntry
    bytes: float
    value: float
    whisker: tuple[float, float] | None
    comparable: bool


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
        _draw(panel, document, points, results[0])
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


def _draw(
    panel: Axes, document: ResultsDocument, points: list[HeldPoint], some: TaskResult
) -> None:
    panel.set_xscale("log", base=2)
    held = [point.bytes for point in points]
    step = max(_STEP, (max(held) / min(held)) ** _APART)
    moved = dodge(held, near=_NEAR, step=step)
    x = {point.variant.name: place for point, place in zip(points, moved, strict=True)}
    _draw_front(panel, front_of(points, lower_is_better=some.lower_is_better), x)
    by_name = {point.variant.name: point for point in points}
    look = looks(document)
    drawn = [
        (family, [by_name[each.name] for each in family.variants if each.name in by_name])
        for family in families(document)
    ]
    drawn = [(family, found) for family, found in drawn if found]
    place = _places(points)
    pieces = covered(
        [{place[each.variant.name]: each.value for each in found} for _, found in drawn],
        [look[family.label].colour for family, _ in drawn],
    )
    for (family, found), hidden in zip(drawn, pieces, strict=True):
        if family.is_full:
            panel.axhline(found[0].value, label=family.label, **FULL_LINE)
            panel.plot([x[found[0].variant.name]], [found[0].value], "*", color="black", zorder=4)
            continue
        line = {place[each.variant.name]: (x[each.variant.name], each.value) for each in found}
        widen_covered(panel, line, hidden, look[family.label].colour)
        draw_points(
            panel,
            [x[point.variant.name] for point in found],
            [point.value for point in found],
            [point.whisker for point in found],
            look[family.label],
            family.long_label,
            hollow=not all(point.comparable for point in found),
        )
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


def _places(points: list[HeldPoint]) -> dict[str, float]:
    """Return where the line of each variant is compared with others: at nearly equal bytes."""
    groups = neighbours([point.bytes for point in points], near=_NEAR)
    return {points[i].variant.name: points[group[0]].bytes for group in groups for i in group}


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
