"""A decoded token as one operator of torch: it is written, attended and counted.

It may choose the slot that the next token takes, too. So torch.compile has one node for all of it,
whose buffers it need not copy.
"""

import torch
from torch import Tensor

from kvtool.kernels.attend_codes import attend_codes
from kvtool.kernels.attend_slots import NewToken, attend_slots
from kvtool.kernels.choose_slot import Choice
from kvtool.maths.columns import COLUMNS

_FLEXIBLE = (torch.Tag.flexible_layout,)  # of queries and new tokens; buffers are where they are


@torch.library.custom_op(
    "kvtool::decode_token",
    mutates_args=("key", "value", "positions", "slot", *COLUMNS),
    tags=_FLEXIBLE,
)
def decode_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    slot: Tensor,
    attention_sum: Tensor | None,
    square_sum: Tensor | None,
    count: Tensor | None,
    above_average: Tensor | None,
    new_key: Tensor,
    new_value: Tensor,
    place: Tensor,
    sinks: Tensor | None,
    seen: Tensor | None,
    budgets: Tensor | None,
    *,
    used: int,
    scale: float,
    softcap: float | None,
    masked: bool,
    weights: bool,
    appends: bool,
    score: str,
    rescore: str,
    recent: int,
    first: int,
    budget: int,
) -> tuple[Tensor, Tensor]:
    """Write a token, attend the slots by it, count its weights and choose the slot of the next.

    Args:
        query: (batch, heads, 1, head_dim), after RoPE.
        key, value: (batch, kv_heads, capacity, dim), written in place.
        positions: (batch, kv_heads, capacity) int32, -1 = empty, written in place.
        slot, appends: see `NewToken`.
        attention_sum, square_sum, count, above_average: (batch, kv_heads, capacity) float32, added
            to in place; None: not kept.
        new_key, new_value, place: see `NewToken`.
        sinks, scale, softcap, masked: as for `attend_slots`.
        used: slots in use, the first ones.
        weights: whether the weights are wanted.
        seen, budgets, budget, score, rescore, recent, first: see `Choice`; no score: none is made.

    Returns:
        (batch, heads, 1, value_dim) and the weights, (batch, heads, used) float32; without any
        where they are not wanted.
    """
    given = (attention_sum, square_sum, count, above_average)
    columns = dict(zip(COLUMNS, given, strict=True))
    sums = {name: each[:, :, :used] for name, each in columns.items() if each is not None}
    choice = None
    if score and seen is not None:
        allowed = budget if budgets is None else budgets
        choice = Choice(score, recent, first, rescore, allowed, seen)
    out, found = attend_slots(
        query,
        key[:, :, :used],
        value[:, :, :used],
        positions[:, :, :used],
        sums,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        weights=weights,
        masked=masked,
        new=NewToken(new_key, new_value, place, slot, appends, choice),
    )
    return out, query.new_empty(0, dtype=torch.float32) if found is None else found


@decode_token.register_fake
def _(query, key, value, *_, used, weights, **options):
    batch, heads = query.shape[:2]
    return _outputs(query, value.shape[-1], value.dtype, (batch, heads, used) if weights else (0,))


def _outputs(
    query: Tensor, value_dim: int, dtype: torch.dtype, weights: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    out = query.new_empty((*query.shape[:3], value_dim), dtype=dtype)
    return out, query.new_empty(weights, dtype=torch.float32)


@torch.library.custom_op("kvtool::decode_codes", mutates_args=COLUMNS, tags=_FLEXIBLE)
def decode_codes(
    query: Tensor,
    key_codes: Tensor,
    key_scales: Tensor,
    value_codes: Tensor,
    value_scales: Tensor,
    positions: Tensor | None,
    attention_sum: Tensor | None,
    square_sum: Tensor | None,
    count: Tensor | None,
    above_average: Tensor | None,
    sinks: Tensor | None,
    valid: Tensor | None,
    *,
    key_form: str,
    value_form: str,
    value_dim: int,
    scale: float,
    softcap: float | None,
    weights: bool,
) -> tuple[Tensor, Tensor]:
    """Attend codes by a token that is among them, as `attend_codes` does.

    Args:
        attention_sum, square_sum, count, above_average: (batch, kv_heads, at least slots) float32,
            added to in place; None: not kept.
        key_form, value_form: of the codes.
    """
    used = key_codes.shape[2]
    given = (attention_sum, square_sum, count, above_average)
    columns = dict(zip(COLUMNS, given, strict=True))
    out, found = attend_codes(
        query,
        key_codes,
        key_scales,
        value_codes,
        value_scales,
        positions,
        {name: each[:, :, :used] for name, each in columns.items() if each is not None},
        forms=(key_form, value_form),
        value_dim=value_dim,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        valid=valid,
        weights=weights,
    )
    return out, query.new_empty(0, dtype=torch.float32) if found is None else found


@decode_codes.register_fake
def _(query, key_codes, *_, value_dim, weights, **options):
    batch, heads = query.shape[:2]
    shape = (batch, heads, key_codes.shape[2]) if weights else (0,)
    return _outputs(query, value_dim, query.dtype, shape)
