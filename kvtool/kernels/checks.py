"""Small random problems, computed by the kernels of a kind and by plain torch.

They have padding, empty slots and several tiles. Plain torch runs on the CPU, in float32. A kind is
all that decides which machine code runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from kvtool.kernels import reference
from kvtool.maths.columns import COLUMNS
from kvtool.maths.quantise import fp8_codes, int4_codes, int8_codes


class Family(str, Enum):
    """Kernels that are checked, and used or not, together."""

    __str__ = str.__str__

    ROWS = "attention of a block"
    SLOTS = "attention of a decoded token"
    INT8 = "attention of a decoded token to int8 slots"
    FP8 = "attention of a decoded token to fp8 slots"
    INT4 = "attention of a decoded token to int4 slots"
    K8V4 = "attention of a decoded token to int8 keys and int4 values"
    K4V8 = "attention of a decoded token to int4 keys and int8 values"
    PAGES = "page bounds"
    PRODUCTS = "products with chosen rows"


CODES = {
    ("int8", "int8"): Family.INT8,
    ("fp8", "fp8"): Family.FP8,
    ("int4", "int4"): Family.INT4,
    ("int8", "int4"): Family.K8V4,
    ("int4", "int8"): Family.K4V8,
}
"""The family that attends to quantised slots, by the forms of the codes of keys and of values."""


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


_ROWS, _HEADS = 2, 2
_KEPT, _NEW = 150, 70  # several tiles
_STORED = 600  # several parts

QUANTISED = {"int8": int8_codes, "fp8": fp8_codes, "int4": int4_codes}
"""What makes codes and scales, by their form."""

Pair = tuple[Tensor, Tensor]


def comparisons(kind: Kind) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Compute a small random problem by the kernels of a kind, and by plain torch on the CPU.

    Yields:
        The name of a result, what the kernels found and what was expected, both float32 on the CPU.
    """
    for name, (found, expected) in _CHECKS[kind.family](_Draw(kind)):
        yield name, found.to("cpu", torch.float32), expected


class _Draw:
    """Random arguments; as what `shown` returns they are on the device, else in float32."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=self._generator, dtype=torch.float32)
        return drawn.to(self.kind.dtype).float()

    def order(self, *shape: int) -> Tensor:
        """Draw an order of the places on the last axis."""
        return torch.rand(shape, generator=self._generator, dtype=torch.float32).argsort(-1)

    def shown(self, tensor: Tensor) -> Tensor:
        """Copy to the device, floats in the dtype of the model."""
        floats = tensor.is_floating_point()
        return tensor.to(self.kind.device, self.kind.dtype if floats else tensor.dtype, copy=True)

    def placed(self, codes: Tensor, scales: Tensor) -> Pair:
        """Copy quantised slots to the device as they are."""
        return codes.to(self.kind.device, copy=True), scales.to(self.kind.device, copy=True)

    def shown_if_any(self, tensor: Tensor | None) -> Tensor | None:
        """Copy to the device what there is."""
        return None if tensor is None else self.shown(tensor)

    def sums(self, slots: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Draw running sums that are not zero, on the device and here."""
        start = {name: self.normal(_ROWS, _HEADS, slots).abs() for name in COLUMNS}
        return {name: total.to(self.kind.device, copy=True) for name, total in start.items()}, start

    def pairs(self, length: int) -> tuple[Tensor, Tensor]:
        """Draw keys and values."""
        sizes = _ROWS, _HEADS, length
        return self.normal(*sizes, self.kind.head_dim), self.normal(*sizes, self.kind.value_dim)

    def stored(self) -> Tensor:
        """Draw positions of slots; some slots and whole tiles are empty."""
        stored = self.order(_ROWS, _HEADS, _STORED)
        stored[..., ::5] = -1
        stored[0, :, :130] = -1
        return stored

    @property
    def scale(self) -> float:
        """Return the factor of logits."""
        return self.kind.head_dim**-0.5

    @property
    def softcap(self) -> float | None:
        """Return the soft cap of logits, if the kind has one."""
        return 3.0 if self.kind.softcap else None

    def sinks(self) -> Tensor | None:
        """Draw logits that take their share without a value, if the kind has them."""
        return self.normal(_ROWS, _HEADS * self.kind.group) if self.kind.sinks else None


def _check_rows(draw: _Draw) -> Iterator[tuple[str, Pair]]:
    from kvtool.kernels.attend_rows import attend_rows
    from kvtool.kernels.column_sums import column_sums

    shown, scale, softcap = draw.shown, draw.scale, draw.softcap
    query = draw.normal(_ROWS, _HEADS * draw.kind.group, _NEW, draw.kind.head_dim)
    key, value = draw.pairs(_KEPT + _NEW)
    sinks = draw.sinks()
    window = 2 * _NEW if draw.kind.window else None
    order = torch.arange(_KEPT + _NEW)
    in_order = order[_KEPT:].expand(_ROWS, -1), order.expand(_ROWS, 1, -1)
    for new, stored in (in_order, _ragged(draw)):
        found = attend_rows(
            *(shown(query), shown(key), shown(value), shown(new), shown(stored)),
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=draw.shown_if_any(sinks),
            in_order=stored.shape[1] == 1,
        )
        expected = reference.attend_rows(
            *(query, key, value, new, stored),
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        real = (new >= 0)[:, None].expand(expected[1].shape)
        for name, one, other in zip(("output", "lse", "seen"), found, expected, strict=True):
            if one is not None:
                yield name, (one.cpu()[real], other[real])
        sums, plain = draw.sums(_KEPT + _NEW)
        column_sums(
            *(shown(query), shown(key), shown(new), shown(stored), found[1], found[2], sums),
            scale=scale,
            window=window,
            softcap=softcap,
        )
        reference.column_sums(
            *(query, key, new, stored, expected[1], expected[2], plain),
            scale=scale,
            window=window,
            softcap=softcap,
        )
        yield from ((name, (sums[name], plain[name])) for name in COLUMNS)


def _ragged(draw: _Draw) -> Pair:
    """Draw positions of new tokens behind some padding, and of slots, some of them empty."""
    padding = torch.arange(_ROWS)[:, None] * 9
    place = torch.arange(_NEW) - padding
    new = (2 * _KEPT + place).masked_fill(place < 0, -1)
    kept = draw.order(_ROWS, _HEADS, 2 * _KEPT)[..., :_KEPT]
    kept[..., ::5] = -1
    own = new[:, None].expand(-1, _HEADS, -1)
    return new, torch.cat([kept, own], 2).to(torch.int32)


def _pairs(
    out: Tensor,
    weights: Tensor | None,
    sums: dict[str, Tensor],
    plain_out: Tensor,
    plain_weights: Tensor | None,
    plain: dict[str, Tensor],
) -> Iterator[tuple[str, Pair]]:
    """Pair what attention over slots gives with what its reference gives."""
    yield "output", (out, plain_out)
    if weights is not None and plain_weights is not None:
        yield "weights", (weights, plain_weights)
    yield from ((name, (sums[name], plain[name])) for name in COLUMNS)


def _check_slots(draw: _Draw) -> Iterator[tuple[str, Pair]]:
    from kvtool.kernels.attend_slots import attend_slots

    shown, scale, softcap = draw.shown, draw.scale, draw.softcap
    query = draw.normal(_ROWS, _HEADS * draw.kind.group, 1, draw.kind.head_dim)
    key, value = draw.pairs(_STORED)
    sinks = draw.sinks()
    sums, plain = draw.sums(_STORED)
    stored = draw.stored()
    valid = torch.arange(_ROWS) > 0
    out, weights = attend_slots(
        *(shown(query), shown(key), shown(value), shown(stored), sums),
        scale=scale,
        softcap=softcap,
        sinks=draw.shown_if_any(sinks),
        valid=shown(valid),
        weights=True,
    )
    plain_out, plain_weights = reference.attend_slots(
        *(query, key, value, stored, plain),
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        valid=valid,
        weights=True,
    )
    yield from _pairs(out, weights, sums, plain_out, plain_weights, plain)
    chosen = draw.order(_ROWS, _HEADS, _STORED)[..., :90]
    for places in (None, chosen.masked_fill(chosen < _STORED // 4, -1)):
        out, _ = attend_slots(
            *(shown(query), shown(key), shown(value), draw.shown_if_any(places), {}),
            scale=scale,
            softcap=softcap,
            sinks=draw.shown_if_any(sinks),
            chosen=shown(chosen),
        )
        plain_out, _ = reference.attend_slots(
            *(query, key, value, places, {}),
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            chosen=chosen,
        )
        yield "output", (out, plain_out)


def _check_codes(draw: _Draw) -> Iterator[tuple[str, Pair]]:
    from kvtool.kernels.attend_codes import attend_codes

    forms = next(forms for forms, family in CODES.items() if family is draw.kind.family)
    query = draw.normal(_ROWS, _HEADS * draw.kind.group, 1, draw.kind.head_dim)
    pairs = zip(forms, draw.pairs(_STORED), strict=True)
    key, value = (QUANTISED[form](each) for form, each in pairs)
    sinks, stored = draw.sinks(), draw.stored()
    sums, plain = draw.sums(_STORED)
    valid = torch.arange(_ROWS) > 0
    out, weights = attend_codes(
        draw.shown(query),
        *draw.placed(*key),
        *draw.placed(*value),
        draw.shown(stored),
        sums,
        forms=forms,
        value_dim=draw.kind.value_dim,
        scale=draw.scale,
        softcap=draw.softcap,
        sinks=draw.shown_if_any(sinks),
        valid=draw.shown(valid),
        weights=True,
    )
    plain_out, plain_weights = reference.attend_codes(
        *(query, *key, *value, stored, plain),
        forms=forms,
        value_dim=draw.kind.value_dim,
        scale=draw.scale,
        softcap=draw.softcap,
        sinks=sinks,
        valid=valid,
        weights=True,
    )
    yield from _pairs(out, weights, sums, plain_out, plain_weights, plain)


def _check_pages(draw: _Draw) -> Iterator[tuple[str, Pair]]:
    from kvtool.kernels.read_tables import page_scores

    query = draw.normal(_ROWS, _HEADS, draw.kind.group, draw.kind.head_dim)
    bounds = draw.normal(_ROWS, _HEADS, 2 * draw.kind.head_dim, 150)
    found = page_scores(draw.shown(query), draw.shown(bounds), 147)
    yield "score", (found, reference.page_scores(query, bounds, 147))


def _check_products(draw: _Draw) -> Iterator[tuple[str, Pair]]:
    from kvtool.kernels.read_tables import row_product

    count = draw.kind.head_dim
    part = draw.normal(_ROWS, _HEADS, draw.kind.group, count)
    table = draw.normal(_ROWS, _HEADS, 2 * count, 150)
    rows = draw.order(_ROWS, _HEADS, 2 * count)[..., :count]
    found = row_product(draw.shown(part), draw.shown(table), draw.shown(rows), 147)
    yield "product", (found, reference.row_product(part, table, rows, 147))


_CHECKS = {
    Family.ROWS: _check_rows,
    Family.SLOTS: _check_slots,
    **dict.fromkeys(CODES.values(), _check_codes),
    Family.PAGES: _check_pages,
    Family.PRODUCTS: _check_products,
}
