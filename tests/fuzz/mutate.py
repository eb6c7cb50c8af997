"""Odd values, and ways to damage texts and documents; everything follows from a `Random`."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

NUMBERS = [
    *("0", "-0", "1", "-1", "2", "7", "0.5", "1.5", ".5", "5.", "1/3", "1/0", "0/0", "+3"),
    *("1e15", "1e400", "1e-320", "-1e300", "1e99", "1E5", "nan", "inf", "-inf", ".inf", ".nan"),
    *("9" * 30, "9" * 400, "9" * 5000, "-" + "9" * 30, "0x" + "f" * 200, "0o7", "0b1", "1_000"),
    *(str(2**31 - 1), str(2**31), str(2**63 - 1), str(2**63), str(2**64), "300000000"),
    *("１２", "½", "²", "4K", "4k", "4M", "999999M", "20%", "200%", "1e-9%", "64MiB", "1e30TiB"),
]
WORDS = [
    *("", " ", "x", "none", "null", "true", "false", "auto", "~", "-", "--", "...", "/", "\\"),
    *("\x00", "\x1b[2J", "\r\n", "\u202e", "\ufeff", "😀", "é" * 300, "x" * 5000, "`" * 300),
    *("a" * 255, "a" * 256, "%s%n", "{}", "{0}", "$HOME", "../../etc/passwd", "file:///", "=" * 50),
]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 10**30, 10**98),
    *(0.0, -0.5, 0.1, 1e-320, 1e308, [], {}, [[]], [None], {"": None}, "", "x" * 5000),
]
LONGEST = 1_000_000  # characters of a text
_CHARACTERS = "()+,=:;.%#&*!?|<>{}[]\"'`~@^/\\-_ \t\n\r0123456789abcxyzABCÉß語😀\x00\x1b\u2028"


def odd_word(random: Random) -> str:
    return random.choice(random.choice([NUMBERS, WORDS]))


def odd_value(random: Random) -> Any:
    kind = random.randrange(10)
    if kind == 0:
        return odd_word(random)
    if kind == 1:
        return [random.randrange(100) for _ in range(random.choice([1, 3, 3, 1000, 1000, 20_000]))]
    if kind == 2:
        return {
            f"{odd_word(random)}{i}"[:300]: i for i in range(random.choice([1, 1, 30, 30, 4000]))
        }
    if kind == 3:
        nested: Any = 1
        for _ in range(random.choice([3, 70, 90])):
            nested = [nested] if random.random() < 0.5 else {"a": nested}
        return nested
    return copy.deepcopy(random.choice(VALUES))


def vary(random: Random, data: Any, choices: dict[tuple, list[Any]]) -> Any:
    """Give some places of a document other values that it may have there; None takes one away."""
    data = copy.deepcopy(data)
    for way, values in choices.items():
        if random.random() < 0.4:
            *before, last = way
            inside = data
            for key in before:
                inside = inside[key]
            value = copy.deepcopy(random.choice(values))
            inside.pop(last, None) if value is None else inside.update({last: value})
    return data


def mutate_text(random: Random, text: str) -> str:
    """Cut, repeat, swap or insert, once or a few times."""
    for _ in range(random.choice([1, 1, 1, 2, 5])):
        a, b = sorted(random.randrange(len(text) + 1) for _ in range(2))
        kind = random.randrange(8)
        if kind == 0:
            text = text[:a] + text[b:]
        elif kind == 1:
            text = text[:a] + text[a:b] * random.choice([2, 3, 50]) + text[b:]
        elif kind == 2:
            text = text[:a]
        elif kind == 3:
            text = text[:a] + odd_word(random) + text[a:]
        elif kind == 4:
            text = text[:a] + odd_word(random) + text[min(b, a + 8) :]
        elif kind == 5:
            text = text[:a] + random.choice(_CHARACTERS) * random.choice([1, 2, 3000]) + text[a:]
        elif kind == 6:
            text = text[:a] + random.choice(_CHARACTERS) + text[a + 1 :]
        else:
            text = text[:a] + text[a:b][::-1] + text[b:]
        text = text[:LONGEST]
    return text


def mutate_bytes(random: Random, data: bytes) -> bytes:
    """Flip, cut, insert or repeat bytes, once or a few times."""
    for _ in range(random.choice([1, 1, 2, 8])):
        a, b = sorted(random.randrange(len(data) + 1) for _ in range(2))
        kind = random.randrange(5)
        if kind == 0 and a < len(data):
            data = data[:a] + bytes([data[a] ^ (1 << random.randrange(8))]) + data[a + 1 :]
        elif kind == 1:
            data = data[:a]
        elif kind == 2:
            data = data[:a] + random.randbytes(random.choice([1, 8, 500])) + data[a:]
        elif kind == 3:
            data = data[:a] + data[min(b, a + 64) :]
        else:
            data = data[:a] + data[a : a + 64] + data[a:]
    return data


def places(data: Any, way: tuple = ()) -> list[tuple]:
    """Return the way to every value of a document but the top."""
    found = []
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        found.append((*way, key))
        if isinstance(value, (dict, list)):
            found += places(value, (*way, key))
    return found


def mutate_data(random: Random, data: Any) -> Any:
    """Replace, remove, add or double values of a document, once or a few times."""
    data = copy.deepcopy(data)
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        ways = places(data)
        if not ways:
            return data
        *way, last = random.choice(ways)
        inside = data
        for key in way:
            inside = inside[key]
        kind = random.randrange(6)
        if kind <= 1:
            inside[last] = odd_value(random)
        elif kind == 2:
            inside[last] = _near(random, inside[last])
        elif kind == 3:
            del inside[last]
        elif isinstance(inside, list):
            inside.insert(last, copy.deepcopy(inside[last]))
        else:
            inside[random.choice([f"{last}x", odd_word(random), "kind"])] = odd_value(random)
    return data


def _near(random: Random, value: Any) -> Any:
    """Return a value of the same kind that is a little or much too large, or the wrong text."""
    if isinstance(value, bool) or value is None:
        return random.choice([True, False, None])
    if isinstance(value, (int, float)):
        return random.choice([value + 1, value - 1, -value, value * 2, value * 10**9, value / 3])
    if isinstance(value, str):
        return mutate_text(random, value)
    if isinstance(value, list):
        return random.choice([value[:-1], value + value, value[::-1]])
    return {}
