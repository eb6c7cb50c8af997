"""Format numbers as people read them: digits by the scale, a sign on differences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kvtool.sizes import bytes_in_words

if TYPE_CHECKING:
    from kvtool.documents.results import GateResult, TaskResult

MISSING = "–"
size = bytes_in_words


def score(value: float | None, best: float | None) -> str:
    """Write a score: three decimals up to a best of 1, one up to 100, else four digits.

    >>> score(0.5, 1.0), score(66.666, 100.0), score(12.3456, None)
    ('0.500', '66.7', '12.35')
    """
    return MISSING if value is None else _digits(value, best)


def signed(value: float | None, best: float | None) -> str:
    """Write a difference with its sign; nothing is `0`, without one.

    >>> signed(-0.25, 1.0), signed(2.0, 100.0), signed(0.0, 1.0)
    ('-0.250', '+2.0', '0')
    """
    if value is None:
        return ""
    text = _digits(value, best, "+")
    return text if abs(float(text)) > 1e-9 else "0"


def plain(value: float) -> str:
    """Write a number of any scale with four digits: `0.123`, `12.35`, `365.0`, `2.1e-05`."""
    return _digits(value, None)


def _digits(value: float, best: float | None, sign: str = "") -> str:
    if best in (1.0, 100.0):
        return f"{value:{sign}.{3 if best == 1 else 1}f}"
    size = abs(value)
    if 0 < size < 0.001 or size >= 1e6:
        return f"{value:{sign}.1e}"
    decimals = next((d for limit, d in ((10, 3), (100, 2), (1000, 1)) if size < limit), 0)
    return f"{value:{sign}.{decimals}f}"


def stderr(value: float | None, best: float | None) -> str:
    """Write a standard error at the precision of its score; empty where there is none."""
    if value is None:
        return ""
    return f"±{_digits(value, best)}"


def interval(low: float | None, high: float | None, best: float | None) -> str:
    """Write the ends of an interval of a difference; empty where there is none.

    >>> interval(-0.25, 0.0, 1.0), interval(None, None, 1.0)
    ('[-0.250, 0]', '')
    """
    return "" if low is None or high is None else f"[{signed(low, best)}, {signed(high, best)}]"


def tokens(count: float) -> str:
    """Write a number of tokens for an axis, in K = 1024 where it divides.

    >>> tokens(640), tokens(4096), tokens(0.5)
    ('640', '4K', '0.5')
    """
    return f"{count / 1024:.0f}K" if count >= 1024 and count % 1024 == 0 else f"{count:.10g}"


def share(part: float) -> str:
    """Write a share as a percentage: one decimal below 10%, none above."""
    return f"{part:.1%}" if part < 0.0995 else f"{part:.0%}"


def times(ratio: float) -> str:
    """Write how many times as much: `1.04x`."""
    return f"{ratio:.2f}x"


def direction(result: TaskResult) -> str:
    """Return an arrow that points where a score is better."""
    return "↓" if result.lower_is_better else "↑"


def tone(result: TaskResult) -> Literal["", "better", "worse"]:
    """Return whether a variant does `better` or `worse` than the full cache; empty if neither.

    It does neither where the difference is within the noise.
    """
    if result.delta is None or signed(result.delta, result.best) == "0" or noise(result):
        return ""
    return "better" if (result.delta > 0) != result.lower_is_better else "worse"


def noise(result: TaskResult) -> bool:
    """Return whether the interval of the difference to the full cache holds 0."""
    pair = result.paired
    return pair is not None and pair.low is not None and pair.low <= 0 <= (pair.high or 0.0)


def gate_name(gate: GateResult) -> str:
    """Say what a gate holds against its limit."""
    return {"least": "score", "max_drop": "drop below full (%)"}.get(gate.gate, gate.gate)
