"""Kept texts on a terminal, beside the data: on stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtool.cli.terminal import tell

if TYPE_CHECKING:
    from kvtool.report.kept.text import KeptText


def print_kept(texts: Sequence[KeptText]) -> None:
    """Print kept texts on stderr, in colours or, where there are none, with brackets."""
    from rich.console import Console

    from kvtool.cli.tables import Visible
    from kvtool.report.kept.shaded import doing
    from kvtool.report.kept.terminal import coloured_text, in_brackets, legend

    console = Console(file=sys.stderr, highlight=False)
    coloured = console.color_system is not None and not console.no_color
    for text in texts:
        tell(f"\n{text.title}: {text.cost}\n")
        if coloured:
            console.print(Visible(legend(text)))
            console.print(Visible(coloured_text(text)))
        else:
            told = f"[..]: at least half of the layers and heads {doing(text.kept)}"
            tell(f"{told}\n{in_brackets(text)}\n")
