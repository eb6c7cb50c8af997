"""Causal attention of a whole prompt by torch's own kernels for CUDA, which return the log-sum-exp.

Flash attention reads 16 bits and heads of one size for keys and values. The memory-efficient kernel
takes the rest: float32, and heads of two sizes. torch refuses sizes that neither of them takes.
"""

import torch
from torch import Tensor

from kvtool.kernels.tiles import dense

_ATEN = torch.ops.aten
_WIDEST = 256  # channels of a head that flash attention takes, in steps of 8


def attend_causal(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend all tokens of a text, each over those up to itself.

    Args:
        query: (batch, heads, n, head_dim), after RoPE.
        key, value: (batch, heads of the attention, n, dim).

    Returns:
        (batch, heads, n, value_dim) in the dtype of the values, and the log-sum-exp of the logits,
        (batch, heads, n) float32.
    """
    query, key, value = dense(query), dense(key), dense(value)
    heads, n, dim = query.shape[1:]
    halves = query.element_size() == 2
    if halves and dim == value.shape[-1] and dim % 8 == 0 and dim <= _WIDEST:
        flash = _ATEN._scaled_dot_product_flash_attention
        out, lse = flash(query, key, value, 0.0, True, scale=scale)[:2]
    else:
        group = heads // key.shape[1]
        if group > 1:
            key, value = (each.repeat_interleave(group, 1) for each in (key, value))
        efficient = _ATEN._scaled_dot_product_efficient_attention
        out, lse = efficient(query, key, value, None, True, 0.0, True, scale=scale)[:2]
    return out, lse[..., :n].contiguous()  # there may be more rows than queries
