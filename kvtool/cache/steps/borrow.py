"""Attention of a layer that reads the keys and values of an earlier one.

It sees what the lending layer has seen in the same forward: of a prompt the kept slots and the
whole block, of a decoded token the kept slots and the token. It takes nothing in, and what it
attends to is no evidence: a prompt is cut, and a slot chosen, when the lending layer has run.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvtool.cache.steps.attend import attend_unseen
from kvtool.cache.steps.attend_block import OwnBlock
from kvtool.cache.steps.attend_codes import attend_codes
from kvtool.cache.steps.call import Call
from kvtool.cache.steps.shared_kv import SharedKV


def attend_shared_kv(shared: SharedKV, call: Call) -> Tensor:
    """Attend to the keys that another layer has lent.

    Args:
        call: of all new tokens of a prompt's block, or of its last ones.

    Returns:
        (batch, heads, q_len, value_dim).
    """
    if shared.stored is not None:
        return attend_codes(shared.layer, call, shared.stored, shared.visible).out
    if shared.block is None:
        return attend_unseen(call, shared.visible, explicit=call.needs_weights)
    earlier = shared.block.new.shape[1] - call.q_len
    new, kept = shared.block.new[:, earlier:], shared.block.kept + earlier
    return OwnBlock(call).attend(shared.layer, replace(shared.block, new=new, kept=kept), False)
