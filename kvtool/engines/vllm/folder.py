"""The exported caches of a folder, found by the virtual ids of a prompt."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtool.engines.vllm.format import SUFFIX, Exported, difference, read_exported
from kvtool.engines.vllm.ids import NAMING

_Stamp = tuple[int, int, int]


class Folder:
    """The caches of a folder. Files may come, go and be replaced while an engine runs.

    Attributes:
        path: of the folder.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any], warn: Callable[[str], object]) -> None:
        """Take what the files have to fit.

        Args:
            facts: of the engine's model; see `facts_of`.
            warn: gets the reason why a file is left out.
        """
        self.path, self._facts, self._warn = path, facts, warn
        self._stamps: dict[Path, _Stamp] = {}
        self._caches: dict[Path, Exported] = {}
        self._by_ids: dict[tuple[int, ...], Exported] = {}

    def __len__(self) -> int:
        return len(self._caches)

    def find(self, ids: Sequence[int]) -> Exported | None:
        """Return the cache whose ids a prompt begins with, if its file is there."""
        key = tuple(ids[:NAMING])
        found = self._by_ids.get(key)
        if found is None or _stamp(found.path) != self._stamps[found.path]:
            self.scan()
            found = self._by_ids.get(key)
        return found

    def refusal(self, cache: Exported) -> str:
        """Say why a cache does not fit the engine's model; empty: it does."""
        differs = difference(cache.facts, self._facts)
        return f"`{cache.name}` is of another model: {differs}" if differs else ""

    def scan(self) -> None:
        """Look for files that have come, gone or changed."""
        stamps: dict[Path, _Stamp] = {}
        for path in sorted(self.path.glob(f"*{SUFFIX}")):
            stamp = _stamp(path)
            if stamp is None:
                continue
            stamps[path] = stamp
            if self._stamps.get(path) != stamp:
                self._read(path)
        for path in self._caches.keys() - stamps.keys():
            del self._caches[path]
        self._stamps = stamps
        self._by_ids = {cache.ids[:NAMING]: cache for cache in self._caches.values()}

    def _read(self, path: Path) -> None:
        self._caches.pop(path, None)
        try:
            self._caches[path] = read_exported(path)
        except (OSError, ValueError) as error:
            self._warn(f"kvtool: {error}")


def _stamp(path: Path) -> _Stamp | None:
    """Return what changes with a file; None: there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
