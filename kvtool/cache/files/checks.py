"""Check what a cache file says of itself, before anything is built from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvtool.errors import KvtoolError
from kvtool.sizes import MOST_TOKENS

_TEXTS = ("policy", "budget", "prefill", "model", "config_hash", "weights", "kvtool")


def check_metadata(path: Path, metadata: Mapping[str, str]) -> None:
    """Refuse a file that lacks a text, or whose counts of tokens are none.

    Raises:
        KvtoolError: the first such entry.
    """
    for name in _TEXTS:
        if name not in metadata:
            raise bad_file(path, f"`{name}` is missing")
    counts = []
    for name in ("tokens_seen", "seen"):
        text = metadata.get(name, "")
        if not (text.isascii() and text.isdecimal() and len(text) <= 10):
            raise bad_file(path, f"`{name}` is no number of tokens")
        counts.append(int(text))
    if not 1 <= counts[0] <= counts[1] <= MOST_TOKENS:
        raise bad_file(path, f"{counts[0]} tokens of {counts[1]} seen")


def bad_file(path: Path, what: str) -> KvtoolError:
    """Return the error of a file that is whole and cannot be a cache."""
    return KvtoolError(f"`{path}` is not a sound cache file: {what}")
