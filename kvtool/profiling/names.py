"""The measurements of a profile by name."""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.errors import UsageError, did_you_mean

METRICS = (
    "f_variance",
    "entropy",
    "query_cosine",
    "recompute_frequency",
    "topk_union",
    "jaccard",
    "robustness",
    "output_error",
    "key_basis",
    "memory",
)
DEFAULT = ("f_variance", "entropy", "query_cosine", "topk_union")
ON_PROMPTS = {"f_variance", "entropy", "key_basis"}
"""What reads prompts alone, without anything generated."""


def parse_metrics(text: str | Sequence[str]) -> tuple[str, ...]:
    """Read names separated by commas, in the order of the table, each once.

    >>> parse_metrics("entropy,f_variance")
    ('f_variance', 'entropy')

    Raises:
        UsageError: no name, or one that does not exist.
    """
    parts = text.split(",") if isinstance(text, str) else text
    names = [part.strip().lower().replace("-", "_") for part in parts if part.strip()]
    for name in names:
        if name not in METRICS:
            raise UsageError(
                f"no metric `{name}`; choose from: {', '.join(METRICS)}",
                hint=did_you_mean(name, METRICS),
            )
    if not names:
        raise UsageError("--metrics names nothing", hint=f"choose from: {', '.join(METRICS)}")
    return tuple(name for name in METRICS if name in names)
