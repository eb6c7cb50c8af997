"""A plan as a table with bars for a terminal, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtool.documents.plan import PlanDocument, RocketKVSection, Target
from kvtool.report import digits
from kvtool.report.style import drawing, new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 32  # letters of the longest bar
_EIGHTHS = " ▏▎▍▌▋▊▉"
_FREE, _FIXED = "#0072B2", "#777777"


def plan_table(plan: PlanDocument) -> RenderableType:
    """Return the tokens of every layer with bars, the totals, and RocketKV's sizes."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column("layer", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("of prompt", justify="right")
    table.add_column("")
    most = max(plan.layers.tokens)
    rows = zip(plan.model.layer_types, plan.layers.tokens, plan.layers.fractions, strict=True)
    for i, (kind, tokens, fraction) in enumerate(rows):
        fixed = fraction is None
        share = kind.removesuffix("_attention") if fixed else digits.share(fraction)
        style = "dim" if fixed else ""
        table.add_row(str(i), str(tokens), share, bar(tokens / most), style=style)
    parts: list[RenderableType] = [Text(heading(plan), style="bold"), table]
    if plan.rocketkv is not None:
        parts.append(Text(_rocketkv(plan.rocketkv)))
    return Group(*parts)


def bar(share: float) -> str:
    """Draw a bar in eighths of a letter.

    >>> bar(0.5) == "█" * 16, bar(1 / 64)
    (True, '▌')
    """
    eighths = round(share * _WIDTH * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def heading(plan: PlanDocument) -> str:
    """Say what the plan is for and what it takes."""
    totals, target = plan.totals, plan.target
    rows = f" x {target.batch} rows" if target.batch > 1 else ""
    return (
        f"{plan.layers.allocator}: {_target(target)} for prompts of {target.prompt_tokens} tokens"
        f"{rows}: {digits.size(totals.bytes)}, {digits.share(totals.share_of_full)} of a full cache"
    )


def _target(target: Target) -> str:
    budget = target.budget
    if budget.tokens is not None:
        return f"{budget.tokens} tokens per layer"
    return str(budget) if budget.bytes is None else digits.size(budget.bytes)


def _rocketkv(plan: RocketKVSection) -> str:
    start = f"rocketkv at {plan.token_budget} of {plan.context} tokens per step: "
    if plan.dense:
        return f"{start}everything fits, nothing is selected"
    return (
        f"{start}stage 1 keeps {plan.prompt_tokens} tokens of the prompt "
        f"(split factor {plan.split_factor:.2f}), stage 2 reads pages of {plan.page_size} in "
        f"{plan.head_dims} channels and attends to {plan.top_k}; stores "
        f"{digits.share(plan.storage.exact)}, reads {digits.share(plan.traffic.exact)}"
    )


def plan_figure(plan: PlanDocument) -> Figure:
    """Return a bar per layer, the mean of the planned layers dashed across."""
    layers = range(len(plan.layers.tokens))
    free = plan.free_layers
    figure = new_figure(max(3.6, 0.16 * len(layers) + 1.6), 2.6)
    axes = figure.subplots()
    colours = [_FIXED if plan.layers.fractions[i] is None else _FREE for i in layers]
    axes.bar(list(layers), plan.layers.tokens, color=colours, width=0.8)
    mean = sum(plan.layers.tokens[i] for i in free) / len(free)
    axes.axhline(mean, color="black", linestyle="--", linewidth=1.0)
    axes.set_xlabel("layer")
    axes.set_ylabel("tokens per KV head")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y")
    axes.set_title(heading(plan), wrap=True)
    return figure


def draw_plan(plan: PlanDocument, path: Path) -> None:
    """Write the picture of a plan, in the format of the suffix."""
    with drawing():
        save(plan_figure(plan), path)
