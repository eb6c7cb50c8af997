"""A plan as a table with bars for a terminal, its ways as a table, and a plan as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from kvtool.documents.plan import PlanDocument, RocketKVSection, Target, Way
from kvtool.planning.budgets import planned_budgets
from kvtool.planning.rocketkv_stages import goes_by_stages
from kvtool.policies.grammar import read_spelling
from kvtool.report import formats
from kvtool.report.panels import drawing, new_figure, save, whole_ticks
from kvtool.report.table import Cell, Column, Row, Table
from kvtool.report.terminal import FittingTables, rich_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 24  # letters of the longest bar
_TOGETHER = 3  # equal layers in a row share a line
_EIGHTHS = " ▏▎▍▌▋▊▉"
_FREE, _FIXED = "#0072B2", "#777777"


def plan_table(plan: PlanDocument) -> RenderableType:
    """Return what layers store with bars, equal ones together, the totals, and RocketKV's sizes."""
    stored, prompt, rows = stored_tokens(plan), plan.target.prompt_tokens, []
    heads = plan.layers.heads
    for first, last in _equal_layers(plan, stored):
        kind, tokens = plan.model.layer_types[first], stored[first]
        fixed = first not in plan.free_layers
        share = kind.removesuffix("_attention") if fixed else formats.share(tokens / prompt)
        own = [] if heads is None else [_span(heads[first])]
        cells = list(map(Cell, (f"{tokens:,}", *own, share, bar(tokens / max(stored)))))
        name = str(first) if first == last else f"{first}-{last}"
        rows.append(Row(name, cells, look="dim" if fixed else ""))
    names = ("layers", "tokens", *(["by head"] if heads else []), "of prompt")
    columns = [*map(Column, names), Column("", words=True)]
    table = rich_table(Table(columns, rows))
    parts: list[RenderableType] = [Text(heading(plan), style="bold"), table]
    if plan.ways is not None:
        parts = [*ways_tables(plan, plan.ways), Text(), *parts]
    if plan.rocketkv is not None and _has_stages(plan):
        parts.append(Text(_rocketkv(plan.rocketkv)))
    return Group(*parts)


def _span(heads: list[int] | None) -> str:
    """Say the fewest and the most tokens of the KV heads of a layer."""
    if heads is None:
        return formats.MISSING
    low, high = min(heads), max(heads)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _has_stages(plan: PlanDocument) -> bool:
    """Return whether the plan's policy runs in RocketKV's stages."""
    return plan.policy is not None and goes_by_stages(read_spelling(plan.policy))


def _equal_layers(plan: PlanDocument, stored: list[int]) -> list[tuple[int, int]]:
    """Return the first and last layer of each run of `_TOGETHER` or more equal ones, and others."""
    heads = plan.layers.heads or [None] * len(stored)
    layers = zip(plan.model.layer_types, stored, heads, strict=True)
    runs, first = list[tuple[int, int]](), 0
    for _, run in groupby(layers):
        end = first + len(list(run))
        long = end - first >= _TOGETHER
        runs += [(first, end - 1)] if long else [(i, i) for i in range(first, end)]
        first = end
    return runs


def layer_table(plan: PlanDocument) -> Table:
    """Return the type of every layer, and the tokens that it stores."""
    stored, prompt, heads = stored_tokens(plan), plan.target.prompt_tokens, plan.layers.heads
    rows = []
    for i, (kind, tokens) in enumerate(zip(plan.model.layer_types, stored, strict=True)):
        own = [] if heads is None else [_span(heads[i])]
        said = (kind, str(tokens), *own, formats.share(tokens / prompt))
        rows.append(Row(str(i), list(map(Cell, said))))
    names = ("layer", "type", "tokens", *(["by head"] if heads else []), "of prompt")
    return Table(list(map(Column, names)), rows)


def stored_tokens(plan: PlanDocument) -> list[int]:
    """Return what each layer stores of the prompt, also where its budget is what is read."""
    stored = list(plan.layers.tokens)
    if plan.policy is None:
        return stored
    budgets = planned_budgets(plan, read_spelling(plan.policy), plan.target.prompt_tokens)
    for i, budget in zip(plan.free_layers, budgets, strict=True):
        stored[i] = budget.tokens
    return stored


def bar(share: float) -> str:
    """Draw a bar in eighths of a letter.

    >>> bar(0.5) == "█" * 12, bar(1 / 48)
    (True, '▌')
    """
    eighths = round(share * _WIDTH * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def heading(plan: PlanDocument) -> str:
    """Say what the plan is for and what it takes."""
    totals, target = plan.totals, plan.target
    rows = f" x {target.batch} rows" if target.batch > 1 else ""
    policy = "" if plan.policy is None else f"{plan.policy}, "
    asked = (
        f"{policy}{plan.layers.allocator}: {_target(target)} for prompts of "
        f"{target.prompt_tokens:,} tokens{rows}"
    )
    if totals is None:
        return f"{asked}: edited"
    size, share = formats.size(totals.bytes), formats.share(totals.share_of_full)
    if totals.storage is None or totals.traffic is None:
        return f"{asked}: {size}, {share} of a full cache"
    storage, traffic = totals.storage, totals.traffic
    reading = "" if totals.reading is None else f", {formats.size(totals.reading)} while it reads"
    if plan.policy is None:
        return (
            f"{asked}: {size}, {share} of a full cache, stored; with positions "
            f"{formats.size(storage.bytes)}, and a token reads {formats.size(traffic.bytes)}"
        )
    return (
        f"{asked}: holds {formats.size(storage.bytes)}, "
        f"{formats.share(storage.share_of_full)} of a full cache{reading}; a token reads "
        f"{formats.size(traffic.bytes)}, {formats.share(traffic.share_of_full)}"
    )


def _target(target: Target) -> str:
    budget = target.budget
    if budget.tokens is not None:
        return f"{budget.tokens:,} tokens per layer"
    return str(budget) if budget.bytes is None else formats.size(budget.bytes)


def _rocketkv(plan: RocketKVSection) -> str:
    start = f"rocketkv at {plan.token_budget:,} of {plan.context:,} tokens per step: "
    if plan.dense:
        return f"{start}everything fits, nothing is selected"
    split = "" if plan.split_factor is None else f" (split factor {plan.split_factor:.2f})"
    costs = ""
    if plan.storage is not None and plan.traffic is not None:
        stored, read = formats.share(plan.storage.exact), formats.share(plan.traffic.exact)
        costs = f"; stores {stored}, reads {read}"
    return (
        f"{start}stage 1 keeps {plan.prompt_tokens or plan.stage1_tokens:,} tokens of the prompt"
        f"{split}, stage 2 reads pages of {plan.page_size} in {plan.head_dims} channels and "
        f"attends to {plan.top_k:,}{costs}"
    )


def plan_figure(plan: PlanDocument) -> Figure:
    """Return a bar per layer, one for equal layers, the mean of the planned ones dashed across."""
    stored, free = stored_tokens(plan), plan.free_layers
    figure = new_figure(max(3.6, 0.16 * len(stored) + 1.6), 2.6)
    axes = figure.subplots()
    runs = _equal_layers(plan, stored)
    axes.bar(
        [(first + last) / 2 for first, last in runs],
        [stored[first] for first, _ in runs],
        color=[_FREE if first in free else _FIXED for first, _ in runs],
        width=[last - first + 0.8 for first, last in runs],
    )
    mean = sum(stored[i] for i in free) / len(free)
    axes.axhline(mean, color="black", linestyle="--", linewidth=1.0)
    axes.set_xlabel("layer")
    axes.set_ylabel("tokens per KV head")
    whole_ticks(axes.xaxis)
    axes.grid(axis="y")
    axes.set_title(heading(plan), wrap=True)
    return figure


def draw_plan(plan: PlanDocument, path: Path) -> None:
    """Write the picture of a plan, in the format of the suffix."""
    with drawing():
        save(plan_figure(plan), path)


MOST = 12
"""Ways that are shown; a plan as YAML or JSON has all."""

_COLUMNS = (
    Column("way", words=True),
    Column("keeps", "tokens"),
    Column("of the", "prompt"),
    Column("holds"),
    Column("peak"),
    Column("a token", "reads"),
    Column("answers lost", "known / later"),
)


def ways_tables(plan: PlanDocument, ways: Sequence[Way]) -> list[RenderableType]:
    """Return the ways that fit, what the columns mean, what does not fit, and the commands."""
    fitting = [way for way in ways if way.fits]
    shown, others = fitting[:MOST], fitting[MOST:]
    parts: list[RenderableType] = [Text(_ways_heading(plan, fitting), style="bold")]
    if shown:
        parts.append(FittingTables(Table(_COLUMNS, list(map(_way_row, shown)))))
    lines = [
        _peaks(plan, shown),
        f"Order: answers lost, by the worse of a known and a later question, {plan.ways_source}. "
        "Of ways within 5 points the one that keeps more comes first.",
    ]
    if any(way.key_bits <= 4 for way in shown):
        lines.append("* keys in 4 bits cost reasoning in steps; k8v4 keeps keys in 8 bits.")
    if others:
        lines.append(f"{len(others)} more ways fit, and are expected to lose more: -f yaml.")
    missing = [way for way in ways if not way.fits]
    if missing:
        named = (f"{way.policy} by {formats.size(way.excess)}" for way in missing)
        lines.append(f"Does not fit: {', '.join(named)}.")
    parts += [Text(line) for line in lines]
    if shown:
        parts.append(Text("Run one, with --prompt-file FILE for a text of yours:"))
    # a command has a line of its own, which is copied whole however long it is
    commands = (Text(f"  {way.command}", no_wrap=True, overflow="ignore") for way in shown)
    return [*parts, *commands]


def _ways_heading(plan: PlanDocument, fitting: Sequence[Way]) -> str:
    target, device = plan.target, plan.device
    rows = f" x {target.batch} rows" if target.batch > 1 else ""
    asked = f"prompts of {target.prompt_tokens:,} tokens{rows}"
    count = "1 way fits" if len(fitting) == 1 else f"{len(fitting) or 'no'} ways fit"
    if device is None:
        return f"{asked} in {formats.size(target.bytes or 0)}: {count}"
    memory, weights = formats.size(device.memory), formats.size(device.weights)
    return f"{asked} in {memory}, {weights} of them weights: {count}"


def _way_row(way: Way) -> Row:
    star = " *" if way.key_bits <= 4 else ""
    reads = formats.size(way.traffic)
    numbers = (
        f"{way.tokens:,}",
        formats.share(way.share),
        formats.size(way.bytes),
        formats.size(way.peak_bytes),
        reads,
        f"{_lost(way.loss.known)} / {_lost(way.loss.later)}",
    )
    return Row(f"{way.policy}{star}", list(map(Cell, numbers)))


def _lost(loss: float | None) -> str:
    return formats.MISSING if loss is None else f"{loss:.0%}"


def _peaks(plan: PlanDocument, shown: Sequence[Way]) -> str:
    included = "the weights" if plan.device is not None else "the cache, without weights"
    ways = {way.prefill for way in shown}
    read = "in blocks" if "block" in ways else "at once"
    most = max((way.peak.full for way in shown), default=0)
    at_once = f"; at once up to {formats.size(most)}" if "block" in ways else ""
    return f"Peak: {included} and what reading the prompt takes {read}, estimated{at_once}."
