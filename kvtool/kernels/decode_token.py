"""A decoded token as operators of torch, whose buffers torch.compile need not copy."""

import torch
from torch import Tensor

from kvtool.kernels.attend_codes import attend_codes
from kvtool.kernels.attend_slots import NewToken, attend_slots
from kvtool.kernels.choose_slot import Choice


def _sums(names: str, columns: list[Tensor], used: int) -> dict[str, Tensor]:
    return {n: each[:, :, :used] for n, each in zip(names.split(), columns, strict=True)}


def _results(out: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    return out, out.new_empty(0, dtype=torch.float32) if weights is None else weights


def _alike(query: Tensor, value_dim: int, slots: int, weights: bool) -> tuple[Tensor, Tensor]:
    shape = *query.shape[:2], slots if weights else 0
    return query.new_empty((*query.shape[:3], value_dim)), query.new_empty(
        shape, dtype=torch.float32
    )


@torch.library.custom_op("kvtool::decode_token", mutates_args=("buffers", "columns"))
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
        query, sinks, scale, softcap, masked, weights: as for `attend_slots`.
        buffers: keys and values, (batch, kv_heads, capacity, dim), positions, (batch, kv_heads,
            capacity) int32, -1 = empty, and the `slot` of `NewToken`; all written in place.
        columns: (batch, kv_heads, capacity) float32 of each of `names`, added to in place.
        new: the key, the value and the place of `NewToken`.
        used: slots in use, the first ones.
        seen, score, by_values: of `Choice`; no score: none is made.
        limits: the rest of `Choice`: recent, first and budget.

    Returns:
        (batch, heads, 1, value_dim) and the weights, (batch, heads, used) float32; none of them
        where they are not wanted.
    """
    key, value, positions, slot = buffers
    new_key, new_value, place = new
    choice = None
    if score and seen is not None:
        recent, first, budget = limits
        choice = Choice(seen, score, by_values, recent, first, budget)
    return _results(
        *attend_slots(
            query,
            *(key[:, :, :used], value[:, :, :used], positions[:, :, :used]),
            _sums(names, columns, used),
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            weights=weights,
            masked=masked,
            new=NewToken(new_key, new_value, place, slot, appends, choice),
        )
    )


@decode_token.register_fake
def _(query, buffers, *_, used, weights, **options):
    return _alike(query, buffers[1].shape[-1], used, weights)


@torch.library.custom_op("kvtool::decode_codes", mutates_args=("columns",))
def decode_codes(
    query: Tensor,
    codes: list[Tensor],
    positions: Tensor | None,
    columns: list[Tensor],
    sinks: Tensor | None,
    place: Tensor | None,
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
        columns: as for `decode_token`.
        forms: of the codes of keys and of values. All else is as for `attend_codes`.
    """
    of_keys, of_values = forms.split()
    return _results(
        *attend_codes(
            query,
            codes,
            positions,
            _sums(names, columns, codes[0].shape[2]),
            forms=(of_keys, of_values),
            value_dim=value_dim,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            place=place,
            weights=weights,
            constants=constants,
        )
    )


@decode_codes.register_fake
def _(query, codes, *_, value_dim, weights, **options):
    return _alike(query, value_dim, codes[0].shape[2], weights)
