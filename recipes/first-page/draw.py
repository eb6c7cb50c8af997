"""Draw the picture of the first page: scores against the bytes that each cache holds.

    python recipes/first-page/draw.py [FOLDER]

Reads the results of recipes/real-model (known.json, later.json), and writes light.svg and dark.svg
into FOLDER, by default beside this file. The same results give the same bytes. Held bytes are keys,
values and the policy's own numbers at the end of a sample.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "real-model" / "results"
PANELS = {"known": "question known beforehand", "later": "question asked later"}  # by results file
SERIES = {  # what the legend calls each line, and the policies whose points it joins
    "kvzip": ("kvzip",),
    "full+int8, full+int4": ("full+int8", "full+int4"),
    "keydiff": ("keydiff",),
    "snapkv": ("snapkv",),
    "streaming": ("streaming",),
    "h2o+caote": ("h2o+caote",),
}
SIZE = (760, 394)
LEFTS = (58, 422)  # of the panels, in pixels
WIDTH, TOP, BOTTOM = 314, 62, 264
SHARES = (0.125, 0.25, 0.5, 1.0)  # ticks of the x axis
NAMES = {"smollm2": "SmolLM2-135M"}  # what the title calls a model
LEAST, MOST = 0.1, 1.2  # ends of the x axis, as shares of the full cache
SHAPES = (  # a marker for each policy, around 0 0
    "M-4 -4h8v8h-8z",
    "M0 -5.5L5 4H-5z",
    "M0 -5.5L5 0L0 5.5L-5 0z",
    "M0 5.5L5 -4H-5z",
    "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
    "M-1.8 -5h3.6v3.2h3.2v3.6h-3.2v3.2h-3.6v-3.2h-3.2v-3.6h3.2z",
    "M-5 -1.5L0 -5.5L5 -1.5L3 4.5H-3z",
)
FONT = "-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"


@dataclass(frozen=True)
class Theme:
    """Colours of a picture: text, grid, and one for each policy."""

    text: str
    quiet: str
    grid: str
    lines: tuple[str, ...]


THEMES = {
    "light": Theme(
        "#1f2328",
        "#59636e",
        "#d1d9e0",
        ("#777777", "#0072B2", "#D55E00", "#009E73", "#AA4499", "#B8860B", "#56B4E9"),
    ),
    "dark": Theme(
        "#f0f6fc",
        "#9198a1",
        "#3d444d",
        ("#A0A0A0", "#56B4E9", "#FF8C42", "#2ECC9A", "#E39BCB", "#F0C419", "#88CCEE"),
    ),
}


@dataclass(frozen=True)
class Point:
    """A policy at one budget: its share of the full cache's bytes, its score and 95 % interval.

    The interval is that of the paired difference to the full cache, set upon the score of it.
    """

    share: float
    score: float
    low: float
    high: float


def read_results() -> dict[str, dict]:
    """Return the documents of results, by panel."""
    return {
        name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in PANELS
    }


def read_points(results: dict) -> dict[str, list[Point]]:
    """Return the points of each line, ascending by bytes."""
    policies = {variant["name"]: variant["policy"] for variant in results["variants"]}
    lines = {policy: line for line, joined in SERIES.items() for policy in joined}
    points: dict[str, list[Point]] = {line: [] for line in SERIES}
    full = _full(results)
    for result in results["results"]:
        if (line := lines.get(policies[result["variant"]])) is not None:
            held = held_bytes(result) / held_bytes(full)
            pair = result["paired"]
            ends = [min(1.0, max(0.0, pair["full"] + pair[end])) for end in ("low", "high")]
            points[line].append(Point(held, result["value"], *ends))
    return {name: sorted(found, key=lambda point: point.share) for name, found in points.items()}


def held_bytes(result: dict) -> float:
    """Return the mean bytes that a cache holds at the end of a sample."""
    return result["cost"]["kv_bytes"] + result["cost"]["state_bytes"]


def draw(panels: dict[str, dict], theme: Theme) -> str:
    """Return the picture of both panels as an SVG document."""
    fulls = {name: _full(results) for name, results in panels.items()}
    first = next(iter(panels))
    model = panels[first]["model"]["id"]
    label = (
        f"Codes that {NAMES.get(model, model)} finds in texts of "
        f"{fulls[first]['settings']['lengths'][0]} tokens, by memory the cache holds"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE[0]} {SIZE[1]}" '
        f'width="{SIZE[0]}" height="{SIZE[1]}" role="img" font-family="{FONT}" font-size="13">',
        f"<title>{escape(label)}</title>",
        _text(LEFTS[0] - 40, 22, label, theme.text, size=15, weight="600"),
    ]
    for left, (name, results) in zip(LEFTS, panels.items(), strict=True):
        parts.append(_text(left, TOP - 14, PANELS[name], theme.text, weight="600"))
        parts += [*_axes(left, theme), *_full_line(left, fulls[name]["value"], theme)]
        for rank, found in enumerate(read_points(results).values()):
            parts += _line(left, found, theme.lines[rank], SHAPES[rank])
    for rank, name in enumerate(SERIES):
        parts += _key(rank, name, theme.lines[rank], SHAPES[rank], theme)
    middle = SIZE[0] / 2
    held = "memory the cache holds, as a share of the full cache (log scale)"
    parts.append(_text(middle, BOTTOM + 42, held, theme.text, anchor="middle"))
    note = (
        f"{fulls[first]['n']} texts a point; whiskers: 95 % intervals; kvzip holds the full cache "
        "while it reads"
    )
    parts.append(_text(LEFTS[0], SIZE[1] - 12, note, theme.quiet, size=12))
    return "\n".join([*parts, "</svg>", ""])


def _full(results: dict) -> dict:
    return next(result for result in results["results"] if result["variant"] == "full")


def _x(left: float, share: float) -> float:
    return left + WIDTH * math.log(share / LEAST) / math.log(MOST / LEAST)


def _y(score: float) -> float:
    return BOTTOM - score * (BOTTOM - TOP)


def _text(
    x: float,
    y: float,
    text: str,
    colour: str,
    *,
    anchor: str = "start",
    size: int = 13,
    weight: str = "400",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}" '
        f'font-size="{size}" font-weight="{weight}">{escape(text)}</text>'
    )


def _axes(left: float, theme: Theme) -> list[str]:
    parts = []
    for score in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(score)
        parts.append(f'<path d="M{left} {y:.1f}H{left + WIDTH}" stroke="{theme.grid}"/>')
        parts.append(_text(left - 8, y + 4, f"{score:.0%}", theme.quiet, anchor="end", size=12))
    for share in SHARES:
        x = _x(left, share)
        parts.append(f'<path d="M{x:.1f} {BOTTOM}v5" stroke="{theme.quiet}"/>')
        text = f"{share * 100:.3g} %"
        parts.append(_text(x, BOTTOM + 19, text, theme.quiet, anchor="middle", size=12))
    return parts


def _full_line(left: float, score: float, theme: Theme) -> list[str]:
    y, x = _y(score), _x(left, 1.0)
    return [
        f'<path d="M{left} {y:.1f}H{x:.1f}" stroke="{theme.text}" stroke-dasharray="5 4"/>',
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{theme.text}"/>',
        _text(x, y + 20, "full", theme.text, anchor="middle"),
    ]


def _marker(x: float, y: float, colour: str, shape: str) -> str:
    return f'<path transform="translate({x:.1f} {y:.1f})" d="{shape}" fill="{colour}"/>'


def _line(left: float, points: list[Point], colour: str, shape: str) -> list[str]:
    path = "L".join(f"{_x(left, point.share):.1f} {_y(point.score):.1f}" for point in points)
    parts = [f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for point in points:
        x = _x(left, point.share)
        low, high = _y(point.low), _y(point.high)
        parts.append(f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{colour}"/>')
        parts.append(_marker(x, _y(point.score), colour, shape))
    return parts


def _key(rank: int, name: str, colour: str, shape: str, theme: Theme) -> list[str]:
    x, y = LEFTS[0] + 240 * (rank // 2), BOTTOM + 72 + 24 * (rank % 2)
    return [
        f'<path d="M{x} {y - 4}h22" stroke="{colour}" stroke-width="2"/>',
        _marker(x + 11, y - 4, colour, shape),
        _text(x + 32, y, name, theme.text),
    ]


def main() -> None:
    """Draw the picture for light and for dark pages into the folder that is named."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, theme in THEMES.items():
        (folder / f"{name}.svg").write_text(draw(read_results(), theme), encoding="utf-8")


if __name__ == "__main__":
    main()
