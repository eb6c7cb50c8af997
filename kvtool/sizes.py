"""Sizes as people type them (`4096`, `4K`, `64MiB`, `20%`, `0.2`), read exactly, without floats."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from kvtool.errors import UsageError, did_you_mean, quote

DEFAULT_TOKENS = 512  # per layer and KV head: stored, or read by a step where all is stored
DEFAULT_NEW_TOKENS = 128  # of an answer, at most
DEFAULT_BLOCK = 128  # tokens of a prompt that are fed at a time, as in CAOTE section 2
DEVICE_BLOCKS = {"cuda": 2048}  # the same, where a block of few tokens takes as long as this
MOST_TOKENS = 2**31 - 1  # of a text: a cache stores positions in 32 bits
MOST_BYTES = 2**63 - 1
LARGEST_SEED = 2**63 - 1
AUTO = "auto"  # a budget that a device's free memory gives, or what a plan in it lists first
DEFAULT_SHARE = Fraction(4, 5)  # of that memory
WIDTH = 100  # characters of a line, of tables as of YAML

LONG_PROMPT = 1024
"""Tokens of the shortest prompt whose attention is summed from the log-sum-exp of its rows, not
from weights in full."""

_BYTE_UNITS = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_DECIMAL_UNITS = {"KB": "KiB", "MB": "MiB", "GB": "GiB", "TB": "TiB"}
_COUNT_UNITS = {"": 1, "K": 2**10, "M": 2**20}
_QUANTITY = re.compile(
    r"([+-]?(?:\d+/\d+|(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,2})?))\s*([A-Za-z%]*)", re.ASCII
)
_LEAST_TEMPERATURE = 1e-6
_LONGEST = 100  # characters of a size
_EXAMPLES = "use tokens (`512`, `4K`), a share of the prompt (`20%`, `0.2`) or bytes (`64MiB`)"
_COUNT_EXAMPLES = "use `4096` or `4K` (= 4096)"


def fraction_of(ratio: Fraction, n: int) -> int:
    """Return how many of `n` a ratio keeps: the exact floor, at least 1.

    >>> fraction_of(Fraction("0.1"), 10), fraction_of(Fraction("0.2"), 3)
    (1, 1)
    """
    return max(1, ratio.numerator * n // ratio.denominator)


def bytes_in_words(count: float) -> str:
    """Write bytes in powers of 1024.

    >>> bytes_in_words(0), bytes_in_words(1536), bytes_in_words(3 * 2**30)
    ('0 B', '1.5 KiB', '3.0 GiB')
    """
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1023.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def bytes_to_type(count: int) -> str:
    """Write a size as an option takes it, with one decimal, and no less than `count`.

    >>> bytes_to_type(13560184832), bytes_to_type(1023), bytes_to_type(3 * 2**30)
    ('12.7GiB', '1023B', '3GiB')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        size = _BYTE_UNITS[unit.upper()]
        if count >= size:
            return f"{-(-count * 10 // size) / 10:.10g}{unit}"
    return f"{count}B"


def parse_count(text: str | int) -> int:
    """Read a number of tokens: `4096` or `4K` (= 4096).

    >>> parse_count("32K")
    32768
    """
    text = _typed(text)
    known = _QUANTITY.fullmatch(text)
    number, unit = _split(text) if known is not None else (Fraction(0), text)
    if unit not in (*_COUNT_UNITS, "k"):
        raise UsageError(f"{quote(text)} is not a number of tokens", hint=_COUNT_EXAMPLES)
    count = _whole(number, unit, f"`{text}`")
    if abs(count) > MOST_TOKENS:
        raise UsageError(f"`{text}` is above {MOST_TOKENS}, the most tokens that a text can have")
    return count


def parse_memory(text: str, name: str = "--memory") -> int:
    """Read the memory of a device in bytes, such as `16GiB`.

    >>> parse_memory("16GiB")
    17179869184

    Raises:
        UsageError: no number of bytes above 0.
    """
    try:
        size = Budget.parse(text).bytes
    except UsageError:
        size = None  # said below, as the memory that it is
    if size is None:
        raise UsageError(f"{name} is a number of bytes such as 8GiB, got {quote(text)}")
    return size


def default_block(device: str) -> int:
    """Return the tokens of a `block` on a device.

    >>> default_block("cpu"), default_block("cuda:1")
    (128, 2048)
    """
    return DEVICE_BLOCKS.get(device.partition(":")[0], DEFAULT_BLOCK)


def next_block(left: int, block: int) -> int:
    """Return the tokens of the next block of a text: a rest below a quarter of one joins it.

    >>> next_block(1024, 512), next_block(600, 512), next_block(9, 512)
    (512, 600, 9)
    """
    return block if 4 * left >= 5 * block else left


def longest_block(tokens: int, block: int) -> int:
    """Return the tokens of the longest of these blocks of a text.

    >>> longest_block(1030, 512), longest_block(1300, 512), longest_block(300, 512)
    (518, 512, 300)
    """
    if tokens < block:
        return tokens
    rest = tokens % block
    return block + rest if 4 * rest < block else block


def parse_prefill(
    text: str, name: str = "prefill", device: str = "", own: int | None = None
) -> int | None:
    """Read how a prompt is fed: `full` is None, `block:M` M tokens per block.

    Args:
        name: what to call the setting in an error.
        device: on which `block` is as many tokens as are the default there; "": not known.
        own: tokens of a `block` of the policy on any device; None: it has no wish.

    >>> parse_prefill("full"), parse_prefill("block"), parse_prefill("block:1K")
    (None, 128, 1024)
    """
    kind, colon, size = text.strip().partition(":")
    if kind.lower() not in ("full", "block") or (kind.lower() == "full" and colon):
        raise UsageError(
            f"{name} must be full, block or block:M, got {quote(text)}",
            hint=did_you_mean(kind, ["full", "block"]),
        )
    if kind.lower() == "full":
        return None
    block = parse_count(size) if colon else own or default_block(device)
    if block < 1:
        raise UsageError(f"{name}: a block is 1 token or more, got {block}")
    return block


def spell_prefill(
    text: str, name: str = "prefill", device: str = "", own: int | None = None
) -> str:
    """Read how a prompt is fed, and write it in its canonical spelling, `full` or `block:M`.

    >>> spell_prefill("FULL"), spell_prefill("block"), spell_prefill("block", device="cuda")
    ('full', 'block:128', 'block:2048')
    """
    block = parse_prefill(text, name, device, own)
    return "full" if block is None else f"block:{block}"


def says_default_block(text: str) -> bool:
    """Whether a prompt is fed in blocks of a size that the device gives."""
    return text.strip().lower() == "block"


def check_temperature(value: float, name: str = "temperature") -> float:
    """Return a temperature that logits can be divided by, or 0.

    Raises:
        UsageError: negative, not finite, or so small that the quotients are not finite.
    """
    if value != 0 and not _LEAST_TEMPERATURE <= value < math.inf:
        least = f", and at least {_LEAST_TEMPERATURE:g}" if value > 0 else ""
        raise UsageError(f"{name} must be 0 or more{least}, got {value}")
    return value


@dataclass(frozen=True)
class Budget:
    """How much of the cache to hold: exactly one of `tokens`, `ratio`, `bytes` and `share`.

    `tokens` counts what is stored per layer and KV head, `ratio` is the share of the prompt (above
    0, at most 1, kept as an exact fraction), `bytes` is the size of the whole K/V cache. `share`
    is that of the memory which weights and reading the prompt leave of a device: a command turns it
    into bytes before it runs.
    """

    tokens: int | None = None
    ratio: Fraction | None = None
    bytes: int | None = None
    share: Fraction | None = None

    def __post_init__(self) -> None:
        values = (self.tokens, self.ratio, self.bytes, self.share)
        given = [value for value in values if value is not None]
        if len(given) != 1:
            raise UsageError(
                f"a budget is one of tokens, ratio and bytes, got {len(given)} of them"
            )
        if given[0] <= 0:
            raise UsageError(f"budget {_number(given[0])} is not above 0", hint=_EXAMPLES)
        if self.ratio is not None and self.ratio > 1:
            raise UsageError(f"budget ratio {_number(self.ratio)} is above 1 (100%)")
        most = (MOST_TOKENS, 1, MOST_BYTES, 1)[values.index(given[0])]
        if given[0] > most:
            name = "share" if self.share is not None else "tokens" if self.tokens else "bytes"
            raise UsageError(f"budget {quote(_number(given[0]))} is above {most} ({name})")

    @classmethod
    def parse(cls, value: str | int | float | Budget) -> Budget:
        """Read a budget as typed on the command line or given in Python.

        A whole number counts tokens, a decimal fraction or a percentage is a ratio, a unit of
        bytes (`KiB`, `MiB`, `GiB`) counts bytes. A Python float is always a ratio, read as it
        prints: 0.1 is 1/10.

        >>> Budget.parse("4K"), Budget.parse(0.2), Budget.parse("64MiB").bytes
        (Budget(tokens=4096), Budget(ratio=Fraction(1, 5)), 67108864)

        Raises:
            UsageError: not a size, not above 0, a ratio above 1, a lower-case bare `k`.
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise UsageError(f"budget {quote(value)} is not a size", hint=_EXAMPLES)
        if isinstance(value, float) and 1 < value < math.inf:
            raise UsageError(
                f"budget ratio {value} is above 1 (100%)",
                hint="a decimal number is a share of the prompt; tokens are whole, such as 512",
            )
        text = _typed(value)
        if text.lower().startswith(AUTO):
            return cls(share=_share(text))
        number, unit = _split(text)
        if unit == "%":
            return cls(ratio=number / 100)
        if unit.upper() in _BYTE_UNITS:
            size = number * _BYTE_UNITS[unit.upper()]
            return cls(bytes=int(size))
        if unit.upper() in _DECIMAL_UNITS:
            better = text[: -len(unit)].strip() + _DECIMAL_UNITS[unit.upper()]
            raise UsageError(
                f"budget `{text}`: `{unit}` may mean 1000 or 1024",
                hint=f"use `{better}` (powers of 1024)",
            )
        if unit == "" and re.search(r"[.eE/]", text):
            return cls(ratio=number)
        if unit not in (*_COUNT_UNITS, "k"):
            raise UsageError(f"budget `{text}` is not a size", hint=_EXAMPLES)
        return cls(tokens=_whole(number, unit, f"budget `{text}`"))

    def for_prompt(self, n: int) -> int:
        """Return the tokens this budget means for a prompt of `n` tokens (not for bytes)."""
        if self.tokens is not None:
            return self.tokens
        if self.share is not None:
            raise UsageError(
                f"budget `{self}` is of a device's free memory, which only commands look at",
                hint="give tokens, a share of the prompt or bytes",
            )
        if self.ratio is None:
            raise UsageError("a budget in bytes needs a model to become tokens")
        return fraction_of(self.ratio, n)

    def __str__(self) -> str:
        """Return the canonical spelling; `Budget.parse` reads it back to an equal value."""
        if self.tokens is not None:
            return str(self.tokens)
        if self.ratio is not None:
            return _percent(self.ratio)
        if self.share is not None:
            return AUTO if self.share == DEFAULT_SHARE else f"{AUTO}:{_percent(self.share)}"
        assert self.bytes is not None, "checked on construction"
        for unit in ("TiB", "GiB", "MiB", "KiB"):
            if self.bytes % _BYTE_UNITS[unit.upper()] == 0:
                return f"{self.bytes // _BYTE_UNITS[unit.upper()]}{unit}"
        return f"{self.bytes}B"

    def __repr__(self) -> str:
        names = ("tokens", "ratio", "bytes", "share")
        name = next(n for n in names if getattr(self, n) is not None)
        return f"Budget({name}={getattr(self, name)!r})"


DEFAULT_BUDGET = Budget(tokens=DEFAULT_TOKENS)
"""What is stored, or read by a step where a policy's budget is that, if nothing is said."""


def _share(text: str) -> Fraction:
    """Read `auto` or `auto:60%`."""
    kind, colon, share = text.lower().partition(":")
    try:
        number, unit = _split(share) if colon else (DEFAULT_SHARE * 100, "%")
    except UsageError:
        number, unit = Fraction(0), ""
    if kind.strip() != AUTO or unit not in ("", "%"):
        raise UsageError(f"budget `{text}` is not a size", hint=f"`{AUTO}` or `{AUTO}:60%`")
    return number / 100 if unit else number


def _percent(share: Fraction) -> str:
    percent = _number(share * 100)
    return _number(share) if "/" in percent else f"{percent}%"


def _typed(value: str | int | float) -> str:
    """Return what was typed without the space around it, once it is known not to be long."""
    if isinstance(value, int) and abs(value) > MOST_BYTES:
        raise UsageError(f"a number of {_digits(value)} digits is not a size", hint=_EXAMPLES)
    text = str(value).strip()
    if len(text) > _LONGEST:
        raise UsageError(f"{quote(text)} is not a size", hint=_EXAMPLES)
    return text


def _digits(value: int) -> int:
    return int(value.bit_length() * 0.30103) + 1  # str() refuses more than 4,300


def _split(text: str) -> tuple[Fraction, str]:
    """Split `64MiB` into its exact number and its unit as typed."""
    found = _QUANTITY.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"`{text}` is not a size", hint=_EXAMPLES)
    try:
        return Fraction(found[1]), found[2]
    except ZeroDivisionError:
        raise UsageError(f"`{text}` divides by zero") from None


def _whole(number: Fraction, unit: str, what: str) -> int:
    """Return a whole number of tokens in a unit of counts."""
    if unit == "k":
        hint = f"use `{what[what.index('`') + 1 : -2].strip()}K` (x 1024)"
        raise UsageError(
            f"lower-case `k` in {what.removeprefix('budget ')} is ambiguous", hint=hint
        )
    count = number * _COUNT_UNITS[unit]
    if count.denominator != 1:
        raise UsageError(f"{what} is not a whole number of tokens")
    return int(count)


def _number(value: int | Fraction) -> str:
    """Write a number as a plain decimal where it ends, as p/q where it does not."""
    if value == int(value):
        return str(int(value))
    value = Fraction(value)
    twos, fives = (_times_divisible(value.denominator, prime) for prime in (2, 5))
    if value.denominator != 2**twos * 5**fives:
        return f"{value.numerator}/{value.denominator}"
    places = max(twos, fives)
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    sign = "-" if value < 0 else ""
    return f"{sign}{digits[:-places]}.{digits[-places:]}"


def _times_divisible(n: int, prime: int) -> int:
    times = 0
    while n % prime == 0:
        n //= prime
        times += 1
    return times


def budget_size(budget: int | str) -> tuple[str, Fraction]:
    """Return a budget's unit and size.

    >>> budget_size("20%")
    ('ratio', Fraction(1, 5))
    """
    parsed = Budget.parse(budget)
    sizes = {"tokens": parsed.tokens, "ratio": parsed.ratio, "bytes": parsed.bytes}
    return next((unit, Fraction(size)) for unit, size in sizes.items() if size is not None)


def budget_order(budget: int | str | None) -> tuple[str, Fraction]:
    """Return what budgets are sorted by; a variant without a budget comes first."""
    return ("", Fraction(0)) if budget is None else budget_size(budget)
