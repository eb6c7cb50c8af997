"""Read from a cache file by which RoPE factors its keys were rotated, and check that they fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvtool.cache.files.format import bad_file
from kvtool.cache.whole.cache import KVCache
from kvtool.cache.whole.settings import RopeLengths
from kvtool.errors import KvtoolError

_DIGITS = 10  # of a number of tokens, at most


def read_rope(path: Path, metadata: Mapping[str, str], cache: KVCache) -> RopeLengths | None:
    """Return the lengths for which a file's RoPE factors were chosen; None for other models.

    Files of older versions do not say so. Their keys have the factors of short texts as long as the
    text is one; beyond, factors may be mixed.

    Args:
        cache: that has been filled from the file.

    Raises:
        KvtoolError: lengths that no cache of this model has, or an old file of a long text.
    """
    rope, stored_lengths, seen = cache.link.rope, metadata.get("rope_lengths"), cache.tokens_seen()
    if rope is None:
        if stored_lengths is not None:
            raise bad_file(path, "the RoPE of this model does not depend on the length of the text")
        return None
    if stored_lengths is None:
        if max(seen) > rope.thresholds[0]:
            raise KvtoolError(
                f"`{path}` does not say which RoPE factors its keys have, and beyond "
                f"{rope.thresholds[0]} tokens an older kvtool may have mixed them",
                hint="compress the text anew",
            )
        return RopeLengths.of([rope.factors_for(length) for length in seen])
    numbers = stored_lengths.split(",")
    if not all(each.isascii() and each.isdecimal() and len(each) <= _DIGITS for each in numbers):
        raise bad_file(path, "`rope_lengths` are no numbers of tokens")
    lengths = RopeLengths(tuple(int(each) for each in numbers))
    if len(numbers) not in (1, len(seen)):
        raise bad_file(path, f"`rope_lengths` are {len(numbers)}, for {len(seen)} texts")
    for length, tokens in zip(lengths.of_entries(len(seen)), seen, strict=True):
        if rope.factors_for(length) != length or not rope.serve(length, tokens):
            raise bad_file(path, f"RoPE factors of {length} tokens for a text of {tokens}")
    return lengths
