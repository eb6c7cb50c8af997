"""A decoded token as operators of torch: it is written, attended and counted.

It may choose the slot that the next token takes, too. So torch.compile has one node for all of it,
whose buffers it need not copy.
"""

import torch
from torch import Tensor

from kvtool.kernels.attend_codes import attend_codes
from kvtool.kernels.attend_slots import NewToken, attend_slots
from kvtool.kernels.choose_slot import Choice

_TOKEN = (
    "(Tensor query, Tensor(a!)[] buffers, Tensor(b!)[] columns, Tensor[] new, Tensor? sinks, "
    "Tensor? seen, *, str names, SymInt used, float scale, float? softcap, bool masked, "
    "bool weights, bool appends, str score, bool by_values, SymInt[] limits) -> (Tensor, Tensor)"
)
_CODES = (
    "(Tensor query, Tensor[] codes, Tensor? positions, Tensor(a!)[] columns, Tensor? sinks, "
    "Tensor? valid, Tensor? constants, *, str names, str forms, SymInt value_dim, float scale, "
    "float? softcap, bool weights) -> (Tensor, Tensor)"
)


def _sums(names: str, columns: list[Tensor], used: int) -> dict[str, Tensor]:
    return {n: each[:, :, :used] for n, each in zip(names.split(), columns, strict=True)}


def _results(query: Tensor, out: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    return out, query.new_empty(0, dtype=torch.float32) if weights is None else weights


@torch.library.custom_op("kvtool::decode_token", mutates_args=("buffers", "columns"), schema=_TOKEN)
def decode_token(
    query: Tensor,
    buffers: list[Tensor],
    columns: list[Tensor],
    new: list[Tensor],
    sinks: Tensor | None,
    seen: Tensor | None,
    *,
    names: str,
    used: int,
    scale: float,
    softcap: float | None,
    masked: bool,
    weights: bool,
    appends: bool,
    score: str,
    by_values: bool,
    limits: list[int],
) -> tuple[Tensor, Tensor]:
    """Write a token, attend the slots by it, count its weights and choose the slot of the next.

    Args:
        query: (batch, heads, 1, head_dim), after RoPE.
        buffers: keys and values, (batch, kv_heads, capacity, dim), positions, (batch, kv_heads,
            capacity) int32, -1 = empty, and the `slot` of `NewToken`; all written in place.
        columns: (batch, kv_heads, capacity) float32 of each of `names`, added to in place.
        new: the key, the value and the place of `NewToken`.
        sinks, scale, softcap, masked, weights: as for `attend_slots`.
        seen, score, by_values: see `Choice`; no score: none is made.
        used: slots in use, the first ones.
        limits: the rest of `Choice`: recent, first and budget.

    Returns:
        (batch, heads, 1, value_dim) and the weights, (batch, heads, used) float32; without any
        where they are not wanted.
    """
    (key, value, positions, slot), (new_key, new_value, place) = buffers, new
    choice = None
    if score and seen is not None:
        recent, first, budget = limits
        choice = Choice(score, by_values, recent, first, budget, seen)
    out, found = attend_slots(
        query,
        key[:, :, :used],
        value[:, :, :used],
        positions[:, :, :used],
        _sums(names, columns, used),
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        weights=weights,
        masked=masked,
        new=NewToken(new_key, new_value, place.contiguous(), slot, appends, choice),
    )
    return _results(query, out, found)


@decode_token.register_fake
def _(query, buffers, *_, used, weights, **options):
    value, (batch, heads, rows, _) = buffers[1], query.shape
    out = query.new_empty((batch, heads, rows, value.shape[-1]), dtype=value.dtype)
    return _results(query, out, _weights(query, used) if weights else None)


def _weights(query: Tensor, slots: int) -> Tensor:
    return query.new_empty((*query.shape[:2], slots), dtype=torch.float32)


@torch.library.custom_op("kvtool::decode_codes", mutates_args=("columns",), schema=_CODES)
def decode_codes(
    query: Tensor,
    codes: list[Tensor],
    positions: Tensor | None,
    columns: list[Tensor],
    sinks: Tensor | None,
    valid: Tensor | None,
    constants: Tensor | None,
    *,
    names: str,
    forms: str,
    value_dim: int,
    scale: float,
    softcap: float | None,
    weights: bool,
) -> tuple[Tensor, Tensor]:
    """Attend codes by a token that is among them.

    Args:
        codes: codes and scales of keys, then of values.
        columns: as for `decode_token`.
        forms: of the codes of keys and of values.
        query, positions, sinks, valid, constants, value_dim, scale, softcap, weights: as for
            `attend_codes`.
    """
    (of_keys, of_values), (keys, key_scales, values, value_scales) = forms.split(), codes
    out, found = attend_codes(
        query,
        keys,
        key_scales,
        values,
        value_scales,
        positions,
        _sums(names, columns, keys.shape[2]),
        forms=(of_keys, of_values),
        value_dim=value_dim,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        valid=valid,
        weights=weights,
        constants=constants,
    )
    return _results(query, out, found)


@decode_codes.register_fake
def _(query, codes, *_, value_dim, weights, **options):
    out = query.new_empty((*query.shape[:3], value_dim))
    return _results(query, out, _weights(query, codes[0].shape[2]) if weights else None)
