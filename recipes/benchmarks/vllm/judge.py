"""What is wrong in the results of the real engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

CLOSE = 1e-4  # of log-probabilities
LEAST = 5  # a question about a compressed text takes at most this part of the full prompt
_REFUSED = ("prompt_logprobs", "unknown name", "name and text", "other ids behind", "no question")
_STATUS = ("unknown_name", "echo_logprobs", "no_question")


def wrong(found: Any, where: str = "") -> Iterator[str]:
    """Say what differs from transformers, and what was not refused.

    Args:
        found: the results of a case, or a part of them.
        where: that part.
    """
    if not isinstance(found, dict):
        return
    if "of" in found:
        for name in ("right", "same"):
            if found.get(name, found["of"]) != found["of"]:
                yield f"{where}: {found[name]} of {found['of']} are {name}"
    if found.get("worst_logprob", 0.0) >= CLOSE:
        yield f"{where}: log-probabilities differ by {found['worst_logprob']}"
    for name, value in found.items():
        here = f"{where} {name}".strip()
        if value is False:
            yield f"{here} is false"
        if name in _REFUSED and value != "error":
            yield f"{here} ended with {value}"
        if name in _STATUS and not str(value).startswith("500"):
            yield f"{here} has status {value}"
        yield from wrong(value, here)
    if "reasons" in found and set(found["reasons"]) != {"error"}:
        yield f"{where}: a file that is gone ended with {found['reasons']}"
    if any(found.get("tokens_of_refused", ())) or 0 in found.get("neighbour_right", ()):
        yield f"{where}: a file that is gone changed answers"
    if found.get("preemptions") == 0:
        yield f"{where}: nothing was preempted"
    if "ids, 1, cold" in found:
        for name in ("peak_blocks", "cpu_s"):
            small, large = (found[f"{each}, 1, cold"][name] for each in ("ids", "full"))
            if small * LEAST > large:
                yield f"{where}: {name} is {small}, and {large} for the full prompt"
