"""Virtual ids: the token ids of a prompt whose slots come from an exported cache.

vLLM finds cached blocks by the ids of a prompt. So the ids are drawn from the sha256 of what the
file holds: requests over one file share its blocks, and no two files do. The first ids name the
file, and the next ones follow from these. So a virtual prompt is recognised without its file, and
is never read as text. The connector runs this inside vLLM: it imports nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from itertools import count as counting

NAMING, CHECKING = 8, 4
"""Ids that name a file, and ids behind them that follow from these."""

FEWEST = NAMING + CHECKING
"""Slots that an exported cache has at least."""

_WIDTH = 8  # bytes of a hash that an id is drawn from


def virtual_ids(digest: str, count: int, vocabulary: int, avoid: Collection[int] = ()) -> list[int]:
    """Draw the ids of a file.

    Args:
        digest: of what the file holds.
        count: of ids, `FEWEST` at least.
        vocabulary: ids of the model.
        avoid: ids that are not drawn, such as special tokens.
    """
    for attempt in counting():
        names = _draw(f"{digest}:{attempt}", NAMING, vocabulary, avoid)
        checks = checking_ids(names, vocabulary)
        if not set(checks) & set(avoid):
            break
    rest = _draw(f"{digest}:rest", count - FEWEST, vocabulary, avoid)
    return [*names, *checks, *rest]


def checking_ids(names: Sequence[int], vocabulary: int) -> list[int]:
    """Return the ids that follow from those that name a file."""
    return _draw(f"kvtool:{','.join(map(str, names))}", CHECKING, vocabulary, ())


def are_virtual(ids: Sequence[int], vocabulary: int) -> bool:
    """Return whether a prompt begins with the virtual ids of some file."""
    found = list(ids[NAMING:FEWEST])
    return len(found) == CHECKING and found == checking_ids(ids[:NAMING], vocabulary)


def _draw(seed: str, count: int, vocabulary: int, avoid: Collection[int]) -> list[int]:
    """Draw ids from the hashes of a text and a counter."""
    left_out, drawn = set(avoid), list[int]()
    for i in counting():
        if len(drawn) >= count:
            break
        block = hashlib.sha256(f"{seed}:{i}".encode()).digest()
        numbers = (block[at : at + _WIDTH] for at in range(0, len(block), _WIDTH))
        ids = (int.from_bytes(number, "big") % vocabulary for number in numbers)
        drawn += [each for each in ids if each not in left_out]
    return drawn[:count]
