"""Kernels run only where they were right once: on this device, in this dtype, at these sizes.

Before a family of kernels first runs there, it and plain torch (on the CPU, in float32) compute the
same small random problem, with padding, empty slots and several tiles. What raises (it does not
compile, or needs more than the device has) or is off by more than a tolerance is never used: a line
in the log says so, once, and plain torch goes on. Nothing else here makes the host wait for the
device. An access outside the device's memory is beyond this: it ends every CUDA program.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvtool.kernels import Family, twins
from kvtool.maths.columns import COLUMNS

# of 1 + the size of a number; a wrong kernel is off by more, and rounding by less
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_ROWS, _HEADS = 2, 2
_KEPT, _NEW = 150, 70  # several tiles
_STORED = 600  # several parts
_FEW = 0.01  # of the weights may fall on the other side of the average

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Kind:
    """What decides which machine code runs, and whether it fits into a device."""

    family: Family
    device: torch.device
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    group: int
    softcap: bool = False
    sinks: bool = False
    window: bool = False


@cache
def trusted(kind: Kind) -> bool:
    """Whether the kernels of a kind agree with plain torch; computed once."""
    try:
        with torch.no_grad():
            wrong = _disagreement(kind)
    except Exception as error:  # whatever it is, plain torch can go on
        lines = str(error).strip().splitlines()
        wrong = f"{type(error).__name__}: {lines[-1].strip()[:200]}" if lines else repr(error)
    if wrong is None:
        return True
    dims = kind.head_dim if not kind.value_dim else f"{kind.head_dim}/{kind.value_dim}"
    logging.getLogger(__name__).warning(
        "kvtool: no Triton kernels for %s (%s, %s) on %s, plain torch instead: %s",
        *(kind.family, str(kind.dtype).removeprefix("torch."), dims, kind.device, wrong),
    )
    return False


def comparisons(kind: Kind) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Compute a small random problem by the kernels of a kind, and by plain torch on the CPU.

    Yields:
        The name of a result, what the kernels found and what was expected, both float32 on the CPU.
    """
    for name, (found, expected) in _CHECKS[kind.family](_Draw(kind)):
        yield name, found.to("cpu", torch.float32), expected


def _disagreement(kind: Kind) -> str | None:
    for name, found, expected in comparisons(kind):
        difference = (found - expected).abs() / (1 + expected.abs())
        off = difference.mean() if name == "above_average" else difference.max()
        allowed = _FEW if name == "above_average" else TOLERANCE[kind.dtype]
        if not off <= allowed:  # nor if it is not a number
            return f"{name} is off by {off:.2g}"
    return None


class _Draw:
    """Random arguments; as what `shown` returns they are on the device, else in float32."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=self._generator, dtype=torch.float32)
        return drawn.to(self.kind.dtype).float()

    def order(self, *shape: int) -> Tensor:
        """A random order of the places on the last axis."""
        return torch.rand(shape, generator=self._generator, dtype=torch.float32).argsort(-1)

    def shown(self, tensor: Tensor | None) -> Tensor | None:
        """A copy on the device, floats in the dtype of the model."""
        if tensor is None:
            return None
        floats = tensor.is_floating_point()
        return tensor.to(self.kind.device, self.kind.dtype if floats else tensor.dtype, copy=True)

    def sums(self, slots: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Running sums that are not zero, on the device and here."""
        start = {name: self.normal(_ROWS, _HEADS, slots).abs() for name in COLUMNS}
        return {name: total.to(self.kind.device, copy=True) for name, total in start.items()}, start

    def pairs(self, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        sizes = _ROWS, _HEADS, length
        return self.normal(*sizes, self.kind.head_dim), self.normal(*sizes, self.kind.value_dim)

    def masks(self) -> dict[str, object]:
        sinks = self.normal(_ROWS, _HEADS * self.kind.group) if self.kind.sinks else None
        softcap = 3.0 if self.kind.softcap else None
        return {"scale": self.kind.head_dim**-0.5, "softcap": softcap, "sinks": sinks}


def _check_rows(draw: _Draw) -> Iterator[tuple[str, Pair]]:
    from kvtool.kernels.attend_rows import attend_rows
    from kvtool.kernels.column_sums import column_sums

    query = draw.normal(_ROWS, _HEADS * draw.kind.group, _NEW, draw.kind.head_dim)
    key, value = draw.pairs(_KEPT + _NEW)
    options = draw.masks() | {"window": 2 * _NEW if draw.kind.window else None}
    options_shown = options | {"sinks": draw.shown(options["sinks"])}
    order = torch.arange(_KEPT + _NEW)
    in_order = order[_KEPT:].expand(_ROWS, -1), order.expand(_ROWS, 1, -1)
    for new, stored in (in_order, _ragged(draw)):
        given = query, key, value, new, stored
        shown = [draw.shown(tensor) for tensor in given]
        found = attend_rows(*shown, in_order=stored.shape[1] == 1, **options_shown)
        expected = twins.attend_rows(*given, **options)
        real = (new >= 0)[:, None].expand(expected[1].shape)
        for name, one, other in zip(("output", "lse", "seen"), found, expected, strict=True):
            yield name, (one.cpu()[real], other[real])
        sums, plain = draw.sums(_KEPT + _NEW)
        masks = {name: options[name] for name in ("scale", "window", "softcap")}
        column_sums(*shown[:2], *shown[3:], *found[1:], sums, **masks)
        twins.column_sums(*given[:2], *given[3:], *expected[1:], plain, **masks)
        yield from ((name, (sums[name], plain[name])) for name in COLUMNS)


def _ragged(draw: _Draw) -> Pair:
    """Positions of new tokens behind some padding, and of slots of which some are empty."""
    padding = torch.arange(_ROWS)[:, None] * 9
    place = torch.arange(_NEW) - padding
    new = (2 * _KEPT + place).masked_fill(place < 0, -1)
    kept = draw.order(_ROWS, _HEADS, 2 * _KEPT)[..., :_KEPT]
    kept[..., ::5] = -1
    own = new[:, None].expand(-1, _HEADS, -1)
    return new, torch.cat([kept, own], 2).to(torch.int32)


def _check_slots(draw: _Draw) -> Iterator[tuple[str, Pair]]:
    from kvtool.kernels.attend_slots import attend_slots

    query = draw.normal(_ROWS, _HEADS * draw.kind.group, 1, draw.kind.head_dim)
    given = query, *draw.pairs(_STORED)
    options = draw.masks()
    options_shown = options | {"sinks": draw.shown(options["sinks"])}
    shown = [draw.shown(tensor) for tensor in given]
    sums, plain = draw.sums(_STORED)
    stored = draw.order(_ROWS, _HEADS, _STORED)
    stored[..., ::5] = -1
    stored[0, :, :130] = -1  # whole tiles without a key
    valid = torch.arange(_ROWS) > 0
    device = draw.kind.device
    found = attend_slots(
        *shown, stored.to(device), sums, valid=valid.to(device), weights=True, **options_shown
    )
    expected = twins.attend_slots(*given, stored, plain, valid=valid, weights=True, **options)
    yield "output", (found[0], expected[0])
    yield "weights", (found[1], expected[1])
    yield from ((name, (sums[name], plain[name])) for name in COLUMNS)
    chosen = draw.order(_ROWS, _HEADS, _STORED)[..., :90]
    found = attend_slots(*shown, None, {}, chosen=chosen.to(device), **options_shown)
    expected = twins.attend_slots(*given, None, {}, chosen=chosen, **options)
    yield "output", (found[0], expected[0])


def _check_pages(draw: _Draw) -> Iterator[tuple[str, Pair]]:
    from kvtool.kernels.page_scores import page_scores

    query = draw.normal(_ROWS, _HEADS, draw.kind.group, draw.kind.head_dim)
    bounds = draw.normal(_ROWS, _HEADS, 2 * draw.kind.head_dim, 150)
    found = page_scores(draw.shown(query), draw.shown(bounds), 147)
    yield "score", (found, twins.page_scores(query, bounds, 147))


def _check_products(draw: _Draw) -> Iterator[tuple[str, Pair]]:
    from kvtool.kernels.row_product import row_product

    count = draw.kind.head_dim
    part = draw.normal(_ROWS, _HEADS, draw.kind.group, count)
    table = draw.normal(_ROWS, _HEADS, 2 * count, 150)
    rows = draw.order(_ROWS, _HEADS, 2 * count)[..., :count]
    found = row_product(draw.shown(part), draw.shown(table), draw.shown(rows), 147)
    yield "product", (found, twins.row_product(part, table, rows, 147))


_CHECKS = {
    Family.ROWS: _check_rows,
    Family.SLOTS: _check_slots,
    Family.PAGES: _check_pages,
    Family.PRODUCTS: _check_products,
}
