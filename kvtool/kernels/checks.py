"""Small random problems, computed by the kernels of a kind and by plain torch.

They have padding, empty slots and several tiles. Plain torch runs on the CPU, in float32. A kind is
all that decides which machine code runs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from kvtool.kernels import reference
from kvtool.maths.columns import COLUMNS
from kvtool.maths.quantise import fp8_codes, int4_codes, int8_codes, with_signs


class Family(str, Enum):
    """Kernels that are checked, and used or not, together."""

    __str__ = str.__str__

    ROWS = "attention of a block"
    CAUSAL = "attention of a whole prompt"
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
        The name of a result, what the kernels found and what was expected, on the CPU: float32, or
        integers, which are to be equal.
    """
    for name, (found, expected) in _CHECKS[kind.family](_Draw(kind)):
        yield name, found.to("cpu", expected.dtype), expected


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

    def shown(self, tensor: Any) -> Any:
        """Copy a tensor to the device; of floats, all but scales in the model's dtype."""
        if isinstance(tensor, list):
            return [self.shown(each) for each in tensor]
        if not isinstance(tensor, Tensor):
            return tensor
        floats = tensor.dtype == torch.float32
        return tensor.to(self.kind.device, self.kind.dtype if floats else tensor.dtype, copy=True)

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
    def options(self) -> dict[str, Any]:
        """The factor of logits, and their soft cap if the kind has one."""
        softcap = 3.0 if self.kind.softcap else None
        return {"scale": self.kind.head_dim**-0.5, "softcap": softcap}

    def sinks(self) -> Tensor | None:
        """Draw logits that take their share without a value, if the kind has them."""
        return self.normal(_ROWS, _HEADS * self.kind.group) if self.kind.sinks else None


def _check_rows(draw: _Draw) -> Iterator[tuple[str, Pair]]:
    from kvtool.kernels import attend_rows, column_sums

    query = draw.normal(_ROWS, _HEADS * draw.kind.group, _NEW, draw.kind.head_dim)
    key, value = draw.pairs(_KEPT + _NEW)
    sinks = draw.sinks()
    options = draw.options | {"window": 2 * _NEW if draw.kind.window else None}
    order = torch.arange(_KEPT + _NEW)
    in_order = order[_KEPT:].expand(_ROWS, -1), order.expand(_ROWS, 1, -1)
    for new, stored in (in_order, _ragged(draw)):
        given: Any = (query, key, value, new, stored)
        found = attend_rows.attend_rows(
            *map(draw.shown, given),
            **options,
            sinks=draw.shown(sinks),
            in_order=stored.shape[1] == 1,
        )
        expected = reference.attend_rows(*given, **options, sinks=sinks)
        real = (new >= 0)[:, None].expand(expected[1].shape)
        for name, one, other in zip(("output", "lse", "seen"), found, expected, strict=True):
            if one is not None:
                yield name, (one.cpu()[real], other[real])
        sums, plain = draw.sums(_KEPT + _NEW)
        seen: Any = (*map(draw.shown, (query, key, new, stored)), *found[1:], sums)
        column_sums.column_sums(*seen, **options)
        reference.column_sums(query, key, new, stored, *expected[1:], plain, **options)
        yield from ((name, (sums[name], plain[name])) for name in COLUMNS)


def _check_causal(draw: _Draw) -> Iterator[tuple[str, Pair]]:
    from kvtool.kernels.attend_causal import attend_causal

    query = draw.normal(_ROWS, _HEADS * draw.kind.group, _KEPT, draw.kind.head_dim)
    given, scale = (query, *draw.pairs(_KEPT)), draw.kind.head_dim**-0.5
    order = torch.arange(_KEPT)
    places = order.expand(_ROWS, -1), order.expand(_ROWS, 1, -1)
    found = attend_causal(*map(draw.shown, given), scale=scale)
    expected = reference.attend_rows(*given, *places, scale=scale)
    yield from zip(("output", "lse"), zip(found, expected[:2], strict=True), strict=True)


def _ragged(draw: _Draw) -> Pair:
    """Draw positions of new tokens behind some padding, and of slots, some of them empty."""
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
    slots, sinks = (query, *draw.pairs(_STORED)), draw.sinks()
    yield from _pairs(draw, attend_slots, reference.attend_slots, (*slots, draw.stored()), sinks)
    chosen = draw.order(_ROWS, _HEADS, _STORED)[..., :90]
    for places in (None, chosen.masked_fill(chosen < _STORED // 4, -1)):
        how: dict[str, Any] = {"chosen": chosen, "names": ()}
        given = *slots, places
        yield from _pairs(draw, attend_slots, reference.attend_slots, given, sinks, **how)
    yield from _check_token(draw, *slots, sinks)


def _check_token(
    draw: _Draw, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
) -> Iterator[tuple[str, Pair]]:
    """Write and attend a token: behind others, or in place of one, and then choose the next."""
    from kvtool.kernels.decode_token import decode_token

    new, place = draw.pairs(1), torch.tensor([3 * _STORED, -1])
    stored = draw.stored().int()
    evicted, newest = stored.argsort(-1)[..., -2:, None].unbind(2)
    for score, by_values in (("", False), ("attention_sum", False), ("attention_sum", True)):
        at = newest if score else torch.full_like(newest, _STORED * 2 // 3)
        positions = stored if score else stored.masked_fill(torch.arange(_STORED) >= at, -1)
        held = key, value, positions, at[..., 0]
        columns = [each + 100 for each in draw.sums(_STORED)[1].values()]
        columns[0].scatter_(2, evicted, 0.0)  # far below the others
        buffers = [draw.shown(each) for each in held]
        sums = [each.to(draw.kind.device, copy=True) for each in columns]
        found = decode_token(
            *(draw.shown(query), buffers, sums, [draw.shown(each) for each in (*new, place)]),
            *(draw.shown(sinks), draw.shown(torch.tensor([3 * _STORED] * 2))),
            names=" ".join(COLUMNS),
            used=_STORED,
            masked=True,
            weights=True,
            appends=not score,
            score=score,
            by_values=by_values,
            limits=[_STORED, 4, _STORED // 4],
            **draw.options,
        )
        pairs = zip(held, new, strict=False)
        keys, values = (each.scatter(2, at[..., None].expand_as(n), n) for each, n in pairs)
        positions = positions.scatter(2, at, place.int()[:, None, None].expand_as(at))
        plain = {n: c.scatter(2, at, 0.0) for n, c in zip(COLUMNS, columns, strict=True)}
        how = draw.options | {"sinks": sinks, "place": place, "weights": True}
        expected = reference.attend_slots(query, keys, values, positions, plain, **how)
        written = keys, values, positions, evicted[..., 0] if score else at[..., 0] + 1
        names = ("output", "weights", "key", "value", "positions", "slot", *COLUMNS)
        results = (*found, *buffers, *sums), (*expected, *written, *plain.values())
        yield from zip(names, zip(*results, strict=True), strict=True)


def _check_codes(draw: _Draw) -> Iterator[tuple[str, Pair]]:
    from kvtool.kernels.attend_codes import attend_codes

    forms = next(forms for forms, family in CODES.items() if family is draw.kind.family)
    query = draw.normal(_ROWS, _HEADS * draw.kind.group, 1, draw.kind.head_dim)
    pairs = zip(forms, draw.pairs(_STORED), strict=True)
    key, value = (QUANTISED[form](each) for form, each in pairs)
    key = key[0], with_signs(key[1], draw.normal(_ROWS, _HEADS, _STORED, 1) > 0)
    constants = draw.normal(_ROWS, _HEADS * draw.kind.group)
    given = query, [*key, *value], draw.stored()
    how: dict[str, Any] = {"forms": forms, "value_dim": draw.kind.value_dim, "constants": constants}
    yield from _pairs(draw, attend_codes, reference.attend_codes, given, draw.sinks(), **how)


def _pairs(
    draw: _Draw,
    kernel: Callable[..., Any],
    plain: Callable[..., Any],
    given: Sequence[Any],
    sinks: Tensor | None,
    names: Sequence[str] = COLUMNS,
    **how: Any,
) -> Iterator[tuple[str, Pair]]:
    """Attend to slots, some of them empty, by a kernel and by its reference."""
    how |= draw.options | {"sinks": sinks, "place": torch.arange(_ROWS) - 1, "weights": True}
    sums, expected_sums = ({n: each[n] for n in names} for each in draw.sums(_STORED))
    shown = {name: draw.shown(each) for name, each in how.items()}
    found = kernel(*map(draw.shown, given), sums, **shown)
    expected = plain(*given, expected_sums, **how)
    yield from zip(("output", "weights"), zip(found, expected, strict=True), strict=True)
    yield from ((name, (sums[name], expected_sums[name])) for name in names)


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
    Family.CAUSAL: _check_causal,
    Family.SLOTS: _check_slots,
    **dict.fromkeys(CODES.values(), _check_codes),
    Family.PAGES: _check_pages,
    Family.PRODUCTS: _check_products,
}
