"""Tokens that see later ones, such as those of an image, which is read from both sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

_ROWS = 1024  # queries whose boolean mask is held at a time


def later_columns(
    mask_function: Callable,
    attention_mask: Tensor | None,
    q_length: int,
    q_offset: int,
    batch: int,
    options: Mapping[str, Any],
) -> Tensor | None:
    """Find out which of the new tokens each one sees, by its model's own mask.

    Args:
        mask_function, attention_mask, q_length, q_offset: as transformers makes a mask from them.
        options: what else it makes a mask from.

    Returns:
        (batch, q_len, 2) int64, the columns of the first and the last new token seen; None where
        nobody sees a later one.
    """
    options = {**options, "allow_is_causal_skip": False, "local_size": None}
    spans = []
    for start in range(0, q_length, _ROWS):
        visible = sdpa_mask(
            batch_size=batch,
            q_length=min(_ROWS, q_length - start),
            kv_length=q_length,
            q_offset=q_offset + start,
            kv_offset=q_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **options,
        )[:, 0]
        columns = torch.arange(q_length, device=visible.device)
        first = torch.where(visible, columns, q_length - 1).amin(-1)
        last = torch.where(visible, columns, 0).amax(-1)
        spans.append(torch.stack([first, last], -1))
    found = torch.cat(spans, 1).expand(batch, -1, -1)
    own = torch.arange(q_length, device=found.device)
    later = found[..., 1] > own
    if not bool(later.any()):  # the one device sync of a prompt block
        return None
    return torch.where(later[..., None], found, own[:, None])
