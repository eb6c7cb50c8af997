"""The ways of a plan as a table for a terminal, each with the command that runs it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from kvtool.documents.plan import PlanDocument
from kvtool.documents.ways import Way
from kvtool.report import formats
from kvtool.report.table import Cell, Column, Row, Table
from kvtool.report.terminal import FittingTables

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
    parts: list[RenderableType] = [Text(_heading(plan, fitting), style="bold")]
    if shown:
        parts.append(FittingTables(Table(_COLUMNS, list(map(_row, shown)))))
    lines = [_peaks(plan, shown), _order(plan)]
    if any(_narrow_keys(way) for way in shown):
        lines.append(
            "* keys in 4 bits cost reasoning in steps and, where keys have biases as in Qwen2, up "
            "to 39% of the codes; k8v4 keeps keys in 8 bits."
        )
    if others:
        lines.append(f"{len(others)} more ways fit, and are expected to lose more: -f yaml.")
    missing = [way for way in ways if not way.fits]
    if missing:
        lines.append(f"Does not fit: {', '.join(map(_missing, missing))}.")
    parts += [Text(line) for line in lines]
    if shown:
        parts.append(Text("Run one, with --prompt-file FILE for a text of yours:"))
    return [*parts, *(_command(way) for way in shown)]


def _heading(plan: PlanDocument, fitting: Sequence[Way]) -> str:
    target, device = plan.target, plan.device
    rows = f" x {target.batch} rows" if target.batch > 1 else ""
    asked = f"prompts of {target.prompt_tokens:,} tokens{rows}"
    count = "1 way fits" if len(fitting) == 1 else f"{len(fitting) or 'no'} ways fit"
    if device is None:
        return f"{asked} in {formats.size(target.bytes or 0)}: {count}"
    memory, weights = formats.size(device.memory), formats.size(device.weights)
    return f"{asked} in {memory}, {weights} of them weights: {count}"


def _row(way: Way) -> Row:
    star = " *" if _narrow_keys(way) else ""
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


def _narrow_keys(way: Way) -> bool:
    return way.key_bits <= 4


def _peaks(plan: PlanDocument, shown: Sequence[Way]) -> str:
    included = "the weights" if plan.device is not None else "the cache, without weights"
    ways = {way.prefill for way in shown}
    read = "in blocks (--prefill block)" if "block" in ways else "at once"
    most = max((way.peak.full for way in shown), default=0)
    at_once = f"; at once up to {formats.size(most)}" if "block" in ways else ""
    return f"Peak: {included} and what reading the prompt takes {read}, estimated{at_once}."


def _order(plan: PlanDocument) -> str:
    return (
        f"Order: answers lost, by the worse of a known and a later question, {plan.ways_source}. "
        "Of ways within 5 points the one that keeps more comes first."
    )


def _missing(way: Way) -> str:
    return f"{way.policy} by {formats.size(way.excess)}"


def _command(way: Way) -> Text:
    """Return a command on a line of its own, which is copied whole however long it is."""
    return Text(f"  {way.command}", no_wrap=True, overflow="ignore")
