"""The optional dependencies, and what to say to whoever lacks them."""

from __future__ import annotations

from importlib.util import find_spec

from kvtool.errors import UsageError

_PACKAGES = {
    "eval": ("rouge_score", "sacrebleu"),
    "plots": ("matplotlib",),
    "lm-eval": ("lm_eval",),
    "gguf": ("gguf", "accelerate"),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "serve": ("fastapi", "uvicorn", "openai"),
}


def installed(extra: str) -> bool:
    """Return whether every package of an extra can be imported, without importing any."""
    return not _absent(extra)


def require(extra: str, *, needed_by: str) -> None:
    """Check that an extra is there.

    Args:
        extra: `eval`, `plots`, `lm-eval`, `gguf`, `serve` or `bitsandbytes`.
        needed_by: what cannot be done without it, as it begins a sentence.
    """
    absent = _absent(extra)
    if absent:
        names = " and ".join(name.replace("_", "-") for name in absent)
        raise UsageError(f"{needed_by} needs {names}", hint=f"pip install 'kvtool[{extra}]'")


def _absent(extra: str) -> list[str]:
    return [name for name in _PACKAGES[extra] if find_spec(name) is None]
