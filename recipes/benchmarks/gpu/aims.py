"""What an H200 is to reach with an 8B shape in bfloat16, beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from recipes.benchmarks.gpu.decode import STATIC
from recipes.benchmarks.gpu.results import Record

Number = tuple[str, str, str]  # part, case, and which of its numbers


@dataclass(frozen=True)
class Aim:
    """A number, or its ratio to another, that is to be at most the limit, or at least.

    Attributes:
        over: what it is divided by; None: nothing.
    """

    text: str
    limit: float
    of: Number
    over: Number | None = None
    least: bool = False

    def measured(self, parts: dict[str, dict[str, Record]]) -> float | None:
        """Return the number, None if it or the other has not been measured."""
        found = [
            parts.get(part, {}).get(case, {}).get(name)
            for part, case, name in (self.of, *([self.over] if self.over else []))
        ]
        if None in found:
            return None
        return found[0] / found[1] if self.over else found[0]

    def reached(self, number: float) -> bool:
        """Whether a number reaches the aim."""
        return number >= self.limit if self.least else number <= self.limit


def _compiled(policy: str, limit: float, part: str = "compiled") -> Aim:
    text = f"{policy}, 1 x 32K, compiled: ms"
    return Aim(text, limit, (part, f"1 x 32768 {policy}, compiled", "ms"))


def _batch(cache: str, name: str) -> Number:
    return "pays", f"16 x 32768 {cache}, compiled", name


def _prompt(text: str, limit: float, case: str, name: str = "ratio") -> Aim:
    return Aim(text, limit, ("prompts", case, name))


AIMS = (
    Aim(
        f"h2o at 512, 16 x 32K: tokens/s over those of {STATIC}",
        *(3, _batch("h2o", "tokens_per_s"), _batch(STATIC, "tokens_per_s")),
        least=True,
    ),
    Aim(
        f"h2o at 512, 16 x 32K: cache over that of {STATIC}",
        *(0.1, _batch("h2o", "kv_bytes"), _batch(STATIC, "kv_bytes")),
    ),
    Aim("h2o at 512, captured: ms", 8, ("speed", "1 x 32768 h2o, captured", "ms")),
    _prompt("snapkv, 32K in blocks of 2048: over sdpa", 1.25, "prompt 32768 snapkv block:2048"),
    _prompt("h2o, 32K in blocks of 2048: over sdpa", 1.25, "prompt 32768 h2o block:2048"),
    _prompt("snapkv, 32K in blocks of 128: ms", 3200, "prompt 32768 snapkv block:128", "ms"),
    _prompt("h2o, 32K in blocks of 128: ms", 3200, "prompt 32768 h2o block:128", "ms"),
    _prompt("h2o, whole prompt of 16K: over sdpa", 1.25, "prompt 16384 h2o"),
    _prompt("profile of 4K: over a forward", 1.3, "profile 4096"),
    _compiled(STATIC, 6.2),
    _compiled("h2o", 4.8),
    _compiled("quest", 6.5),
    _compiled("full", 6.2),
    _compiled("rocketkv", 6.5, "waits"),
    _compiled("hsa", 6.5, "waits"),
)


def table(
    parts: dict[str, dict[str, Record]], asked: dict[tuple[str, str], float] | None = None
) -> Table:
    """Show each aim beside what was measured.

    Args:
        asked: the minute in which a plan comes to the end of a case, by part and case; None:
            nothing is planned.
    """
    shown = Table(title="aims on an H200, 8B shape, bfloat16", show_edge=False)
    for name in ("aim", "limit", "measured", "reached", *(["minute"] if asked else [])):
        shown.add_column(name, justify="left" if name == "aim" else "right")
    for aim in AIMS:
        number = aim.measured(parts)
        cells = ["not measured", ""]
        if number is not None:
            cells = [f"{number:.3g}", "yes" if aim.reached(number) else "no"]
        if asked:
            known = [asked.get(each[:2]) for each in (aim.of, aim.over or aim.of)]
            cells.append("" if None in known else f"{max(known):.1f}")
        limit = f"at {'least' if aim.least else 'most'} {aim.limit:g}"
        shown.add_row(aim.text, limit, *cells)
    return shown
