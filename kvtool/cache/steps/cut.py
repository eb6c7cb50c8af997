"""Cut a layer back to its budget between decoded tokens, for a policy with a pace of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.cache.steps.evicted import part_block
from kvtool.cache.steps.view import score
from kvtool.cache.storage.due import CutSchedule
from kvtool.cache.storage.layer import SlotLayer
from kvtool.maths.selection import keep_top
from kvtool.policies.attention_rows import AttentionRows
from kvtool.policies.parts import SlotView


@torch.no_grad()
def cut_to_budget(
    layer: SlotLayer, schedule: CutSchedule, view: SlotView, rows: AttentionRows | None
) -> None:
    """Cut the batch entries, or heads, that have reached their budget and the spare tokens.

    The others keep what they have. Where they differ, this costs two device syncs.

    Args:
        view: the slots in use.
        rows: the weights of the newest token, if the policy ranks by them.
    """
    budget = layer.budget.tokens
    target: int | Tensor = budget
    if isinstance(view.held, Tensor) or isinstance(budget, Tensor):
        held = torch.as_tensor(view.held)
        target = torch.where(held >= budget + schedule.spare, budget, held)
    used = layer.slots.used_slots()
    evicted = view.held - target
    importance, protected = score(layer.policy, view, used.state, rows, evicted)
    most = int(target.max()) if isinstance(target, Tensor) else target
    chosen, positions = keep_top(importance, view.positions, target, protected, most)
    layer.slots.replace(part_block(layer, None, view, used.state, importance, chosen, positions))
    schedule.count(target, budget, layer.seen)
