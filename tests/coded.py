"""The twin of slots that hold codes: slots of floats which have been through the codec."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from kvtool.cache.slots import layer
from kvtool.cache.slots.slot_form import CodedForm, Form
from kvtool.cache.steps import block, step
from kvtool.policies.grammar import parse_policy


class DecodedForm(CodedForm):
    """Slots of floats that have been through a codec, once: what is kept is not rounded again."""

    def quantise(self, keys, values):
        stored = super().quantise(keys, values)
        keys, values = super().dequantise_keys(stored), super().dequantise_values(stored)
        return {"keys": keys, "values": values}

    dequantise, join, with_values = Form.dequantise, Form.join, Form.with_values
    dequantise_keys, dequantise_values = Form.dequantise_keys, Form.dequantise_values


@contextmanager
def decoded_slots(codec: str) -> Iterator[None]:
    """Have all slots that are made inside hold what a codec makes of the numbers, in float."""
    part = parse_policy(f"full+{codec}").codec

    def make_form(_none, index, keys, values):
        return DecodedForm(part, index, keys, values)

    def leave_block(layer, held, keys, values, rows):
        slots = layer.slots
        if not slots.used or layer.padded:  # its policy has no codec to fit
            own = keys[:, :, held.kept :], values[:, :, held.kept :]
            empty = (slots.positions[:, :, : slots.used] < 0).flatten(1).all(1)
            slots.form = slots.form.fitted(layer.index, *own, held.new, empty)
        return block.leave_block(layer, held, keys, values, rows)

    with (
        mock.patch.object(layer, "make_form", make_form),
        mock.patch.object(step, "leave_block", leave_block),
    ):
        yield


TIE_LOGITS = 0.05
"""How far one code or scale, moved to its neighbour, moves the logits of the peaky model in float32
at most (measured: 0.025; `tests/cache/test_ties.py`)."""


def codes_of(cache, row: int) -> list[dict[str, Tensor]]:
    """Codes, scales and true positions of an entry, copied, by layer."""
    found = []
    for each in cache.slot_layers:
        slots = each.sorted_slots()
        numbers = {name: numbers[row].clone() for name, numbers in slots.stored.items()}
        found.append(numbers | {"positions": slots.positions[row].clone()})
    return found


def moved(
    ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]
) -> tuple[int, int, int, int]:
    """Compare the slots that two caches hold of the same tokens.

    Returns:
        How many codes and scales are compared, how many of them differ, and by how many steps
        codes and scales differ at most; neighbours are one apart.
    """
    compared = differ = 0
    farthest = {torch.float16: 0}  # by dtype: scales, and beside them codes
    for a, b in zip(ours, theirs, strict=True):
        same = a["positions"][:, :, None] == b["positions"][:, None, :]
        same &= a["positions"][:, :, None] >= 0
        head, left, right = same.nonzero(as_tuple=True)
        for name in a.keys() - {"positions"}:
            steps = (_steps(a[name][head, left]) - _steps(b[name][head, right])).abs()
            compared += steps.numel()
            differ += int((steps > 0).sum())
            kind, most = a[name].dtype, int(steps.max()) if steps.numel() else 0
            farthest[kind] = max(farthest.get(kind, 0), most)
    of_scales = farthest.pop(torch.float16)
    return compared, differ, max(farthest.values()), of_scales


def _steps(numbers: Tensor) -> Tensor:
    """Codes and scales as whole numbers whose neighbours are one apart."""
    if numbers.dtype is torch.float16:
        return numbers.view(torch.int16).int()
    return numbers.int()
