"""Control characters spelled out, so that no terminal obeys them."""

from __future__ import annotations

_CONTROL = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}


def visible(text: str) -> str:
    r"""Spell out the control characters of a text: a terminal would obey them.

    >>> visible("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return text.translate(_CONTROL)
