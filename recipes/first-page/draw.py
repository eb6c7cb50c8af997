"""Draw the picture of the first page: scores against the bytes that each cache holds.

    python recipes/first-page/draw.py runs/first-page/results.json [FOLDER]

Writes light.svg and dark.svg into FOLDER, by default beside this file. The same results give the
same bytes. Held bytes are keys, values and the policy's own numbers at the end of a sample.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

SIZE = (760, 330)
LEFT, RIGHT, TOP, BOTTOM = 64, 520, 44, 276  # edges of the panel, in pixels
SHARES = (0.0625, 0.125, 0.25, 0.5, 1.0)  # ticks of the x axis
NAMES = {"reference": "the bundled model"}  # what the title calls a model
LEAST, MOST = 0.05, 1.12  # ends of the x axis, as shares of the full cache
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


def read_points(results: dict) -> dict[str, list[Point]]:
    """Return the points of each policy under a budget, ascending by bytes."""
    policies = {arm["name"]: arm["policy"] for arm in results["arms"] if arm["budget"] is not None}
    points: dict[str, list[Point]] = {}
    for result in results["results"]:
        if result["arm"] in policies:
            cost = result["cost"]
            held = (cost["kv_bytes"] + cost["state_bytes"]) / cost["full_bytes"]
            pair = result["paired"]
            ends = [min(1.0, max(0.0, pair["full"] + pair[end])) for end in ("low", "high")]
            point = Point(held, result["value"], *ends)
            points.setdefault(policies[result["arm"]], []).append(point)
    return {name: sorted(found, key=lambda point: point.share) for name, found in points.items()}


def draw(results: dict, theme: Theme) -> str:
    """Return the picture as an SVG document."""
    full = next(result for result in results["results"] if result["arm"] == "full")
    settings = full["settings"]
    points = read_points(results)
    model = results["model"]["id"]
    label = (
        f"Codes that {NAMES.get(model, model)} finds in texts of {settings['lengths'][0]} tokens, "
        "by memory the cache holds"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE[0]} {SIZE[1]}" '
        f'width="{SIZE[0]}" height="{SIZE[1]}" role="img" font-family="{FONT}" font-size="13">',
        f"<title>{escape(label)}</title>",
        _text(LEFT - 40, 24, label, theme.text, weight="600"),
        *_axes(theme),
        *_full_line(full["value"], theme),
    ]
    for rank, (name, found) in enumerate(points.items()):
        parts += _line(found, theme.lines[rank], SHAPES[rank])
        parts += _key(len(points) - 1 - rank, name, theme.lines[rank], SHAPES[rank], theme)
    notes = [f"{full['n']} texts a point", "whiskers: 95 % intervals"]
    if any("calidrop" in name for name in points):
        notes += ["calidrop: evicted tokens are in", "host memory, which is not counted"]
    for above, note in enumerate(reversed(notes)):
        parts.append(_text(RIGHT + 28, BOTTOM - 16 * above, note, theme.quiet, size=11))
    return "\n".join([*parts, "</svg>", ""])


def _x(share: float) -> float:
    place = math.log(share / LEAST) / math.log(MOST / LEAST)
    return LEFT + place * (RIGHT - LEFT)


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


def _axes(theme: Theme) -> list[str]:
    parts = []
    for score in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(score)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="{theme.grid}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{score:.0%}", theme.quiet, anchor="end", size=12))
    for share in SHARES:
        x = _x(share)
        parts.append(f'<path d="M{x:.1f} {BOTTOM}v5" stroke="{theme.quiet}"/>')
        text = f"{share * 100:.3g} %"
        parts.append(_text(x, BOTTOM + 19, text, theme.quiet, anchor="middle", size=12))
    middle = (LEFT + RIGHT) / 2
    held = "memory the cache holds, as a share of the full cache (log scale)"
    parts.append(_text(middle, BOTTOM + 42, held, theme.text, anchor="middle"))
    return parts


def _full_line(score: float, theme: Theme) -> list[str]:
    y, x = _y(score), _x(1.0)
    return [
        f'<path d="M{LEFT} {y:.1f}H{x:.1f}" stroke="{theme.text}" stroke-dasharray="5 4"/>',
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{theme.text}"/>',
        _text(x, y + 20, "full", theme.text, anchor="middle"),
    ]


def _marker(x: float, y: float, colour: str, shape: str) -> str:
    return f'<path transform="translate({x:.1f} {y:.1f})" d="{shape}" fill="{colour}"/>'


def _line(points: list[Point], colour: str, shape: str) -> list[str]:
    path = "L".join(f"{_x(point.share):.1f} {_y(point.score):.1f}" for point in points)
    parts = [f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for point in points:
        x = _x(point.share)
        low, high = _y(point.low), _y(point.high)
        parts.append(f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{colour}"/>')
        parts.append(_marker(x, _y(point.score), colour, shape))
    return parts


def _key(row: int, name: str, colour: str, shape: str, theme: Theme) -> list[str]:
    x, y = RIGHT + 28, TOP + 14 + 26 * row
    return [
        f'<path d="M{x} {y - 4}h22" stroke="{colour}" stroke-width="2"/>',
        _marker(x + 11, y - 4, colour, shape),
        _text(x + 32, y, name, theme.text),
    ]


def main() -> None:
    """Draw both pictures of the results file that the command line names."""
    results = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent
    for name, theme in THEMES.items():
        (folder / f"{name}.svg").write_text(draw(results, theme), encoding="utf-8")


if __name__ == "__main__":
    main()
