"""Position ids by place in the cache: what a model is fed where `positions=cache`.

Keys are cached after RoPE, whose angles lose their precision at large positions (0.06 rad at a
million in float32). So new tokens are numbered on from the tokens that the cache holds, whatever
the caller says, and never beyond what a model was trained for. True positions are the cache's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvtool.cache.cache import KVCache
from kvtool.cache.steps.call import Placement
from kvtool.errors import KvtoolError


def check_running(cache: KVCache, given: dict[str, Any], position_ids: Tensor) -> None:
    """Refuse position ids that do not count a block's tokens on, for a policy that goes by them.

    Raises:
        KvtoolError: positions of packed texts, of a tree, or with gaps.
    """
    layer, policy = cache.first_layer, cache.policy
    by_place = policy.score.positions == "cache"
    if not (by_place or policy.moments is not None) or position_ids.dim() != 2:
        return
    if cache.running.in_prompt or layer.seen_device is not None:
        return  # kvtool has counted them
    device, mask, q_len = position_ids.device, given.get("attention_mask"), position_ids.shape[1]
    start: Tensor | int = layer.seen
    if layer.lengths is not None:
        start = layer.lengths.to(device)[:, None]
    valid = torch.ones_like(position_ids, dtype=torch.bool)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        valid = mask[:, -q_len:].to(device).bool()
    wanted = start + valid.long().cumsum(1) - 1
    if not by_place:  # a shift of a whole text turns all alike
        wanted = wanted + (position_ids - wanted)[:, -1:]
    if bool(((position_ids != wanted) & valid).any()):
        raise KvtoolError(
            f"policy `{policy}` goes by the places of tokens in the text, "
            "and the position ids of this forward do not count them one by one",
            hint="leave out position_ids, or take a policy that needs no positions (h2o, snapkv)",
        )


def place(cache: KVCache, given: dict[str, Any]) -> Tensor:
    """Number the tokens of a forward on from those that the cache holds.

    Returns:
        Position ids, (batch, q_len) int64.
    """
    tokens = given.get("input_ids")
    if tokens is None:
        tokens = given["inputs_embeds"]
    q_len = tokens.shape[1]
    placement = _behind_kept(cache, q_len)
    cache.running.place(placement)
    mask = given.get("attention_mask")
    return _position_ids(placement, tokens.shape[0], q_len, mask, tokens.device)


def _behind_kept(cache: KVCache, q_len: int) -> Placement:
    """Place the new tokens of each entry behind the longest of its heads, in the first layer."""
    first = cache.first_layer
    seen = first.seen if first.seen_device is None else None
    if seen == 0:
        return Placement(seen, 0, q_len)
    if not first.padded and first.ragged is None:
        kept = first.slots.kept
        return Placement(seen, kept, kept + q_len)
    stored = first.stored_positions()
    return Placement(seen, (stored >= 0).sum(-1).amax(1), stored.shape[2] + q_len)


def _position_ids(
    placement: Placement, batch: int, q_len: int, mask: object, device: torch.device
) -> Tensor:
    """Position ids of the new tokens, counted without padding: (batch, q_len) int64."""
    start = placement.start
    if isinstance(start, Tensor):
        start = start.to(device)[:, None]
    if mask is None:
        return (start + torch.arange(q_len, device=device)).expand(batch, -1)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise KvtoolError("positions=cache needs an attention mask of two dimensions, or none")
    valid = mask[:, -q_len:].to(device).bool()
    return (start + valid.long().cumsum(1) - 1).clamp(min=0)
