"""Every picture that a results document holds the data for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.documents.results import ResultsDocument
from kvtool.errors import KvtoolError
from kvtool.evaluation.costs import spent_by_variant
from kvtool.extras import require
from kvtool.report.cost_pictures import cost_figure, kept_by_layer, layers_figure
from kvtool.report.curves import curve_figure, curves, y_label
from kvtool.report.needles import needle_figure, needle_tasks
from kvtool.report.panels import drawing, save
from kvtool.report.score_lines import budget_figure, budget_panels, held_figure, held_tasks
from kvtool.report.variants import labelled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_WHISKERS = "whiskers 95 % intervals of the difference to the full cache, set upon its score"


@dataclass(frozen=True)
class Picture:
    """A picture that can be drawn.

    Attributes:
        name: its file name without a suffix, the same for every run.
        title: what it shows, in a line.
        task: the task it belongs to, None if it spans all.
        draw: makes the figure, under `kvtool.report.panels.drawing`.
    """

    name: str
    title: str
    task: str | None
    draw: Callable[[], Figure]


def pictures(document: ResultsDocument) -> Iterator[Picture]:
    """Yield the pictures that apply, without drawing them."""
    if held_tasks(document):
        title = (
            f"Score by bytes held, {_WHISKERS}; grey: the Pareto front; points whose"
            f" bytes are nearly equal stand side by side{_bits(document)}"
        )
        yield Picture("score-by-bytes", title, None, lambda: held_figure(document))
    if budget_panels(document):
        title = (
            f"Score by budget, {_WHISKERS}; policies stand side by side; dashed: the"
            f" budget is what a token reads, while all is stored{_bits(document)}"
        )
        yield Picture("score-by-budget", title, None, lambda: budget_figure(document))
    if spent_by_variant(document):
        yield Picture("cost", "Memory and speed", None, lambda: cost_figure(document))
    if kept_by_layer(document):
        title = "Tokens that each layer kept, the fullest KV head, mean of all samples"
        yield Picture("tokens-by-layer", title, None, lambda: layers_figure(document))
    for task in needle_tasks(document):
        title = f"{task}: score by context length and needle depth"
        yield Picture(file_name(task), title, task, partial(needle_figure, document, task))
    for task, curve in curves(document):
        yield Picture(
            file_name(f"{task}-{curve.name}"),
            f"{task}: {y_label(document, task, curve)}, by {curve.x_label}",
            task,
            partial(curve_figure, document, task, curve.name),
        )


def _bits(document: ResultsDocument) -> str:
    """Say how codecs are marked, where there are any."""
    stored = any(variant.codec is not None for variant in document.variants)
    return "; a colour for each base, a marker for each codec" if stored else ""


def draw(
    document: ResultsDocument, folder: Path, formats: Sequence[str] = ("png", "svg")
) -> list[Path]:
    """Write every picture that applies into `folder`, and return the files.

    Each file appears whole or not at all. The same document gives the same SVG, byte for byte.

    Raises:
        UsageError: matplotlib is not installed.
        KvtoolError: the folder cannot be made or written to.
    """
    require("plots", needed_by="drawing pictures")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KvtoolError(f"cannot make folder `{folder}`: {error.strerror or error}") from error
    written = []
    with drawing():
        for picture in pictures(labelled(document)):
            figure = picture.draw()
            for form in formats:
                path = folder / f"{picture.name}.{form}"
                save(figure, path)
                written.append(path)
    return written


def file_name(text: str) -> str:
    """Spell a task or curve as a file name.

    >>> file_name("ruler/niah_multikey_1")
    'ruler-niah_multikey_1'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")
