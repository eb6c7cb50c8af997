"""What a block of a prompt launches on a GPU once the budget is full: no more, and no waits."""

from collections import Counter

import pytest
import torch

import kvtool
from kvtool.cache.steps import block
from kvtool.generation import decode_step, prefill
from kvtool.generation.feeding import prefill_by_piece
from kvtool.kernels import reference, trust
from tests.kernels import torch_kernels
from tests.models_for_tests import peaky_model, random_ids
from tests.pretend_device import DEVICE, Launches, as_kernel, pretended, put

BLOCK, BUDGET, BLOCKS = 32, 64, 6

OF_A_LAYER = {  # kvtool's own, the attention and the columns' sums a launch each
    "streaming": 29,
    "h2o": 33,
    "keydiff": 40,
    "tova": 40,
    "h2o+caote": 47,
    "snapkv(window=8)": 47,
    "roco": 65,
}


def attend_rows(*tensors, counted=True, **options):
    return reference.attend_rows(*tensors, **options)


def blocks_of(monkeypatch, policy: str, layers: int) -> list[Launches]:
    """What each block of a prompt launches, and how often the host waits."""
    model = peaky_model("llama", num_hidden_layers=layers, head_dim=16).to(torch.bfloat16)
    model, found = kvtool.attach(put(model)), []
    everything = Launches()
    torch_kernels.put_in_place(monkeypatch, lambda kernel: as_kernel(kernel, everything))
    for name, function in (("column_sums", reference.column_sums), ("attend_rows", attend_rows)):
        kernel = as_kernel(function, everything)
        monkeypatch.setattr(f"kvtool.kernels.{name}.{name}", kernel)
    monkeypatch.setattr(trust, "usable", lambda *_, **__: True)
    with pretended():
        cache = kvtool.build_cache(model, policy, BUDGET, prefill=f"block:{BLOCK}")
        ids = random_ids(BLOCK * BLOCKS).to(DEVICE)
        steps = prefill_by_piece(model, cache, ids)
        for _ in range(BLOCKS):
            with everything:
                next(steps)
            found.append(Launches())
            for mine, all_of_them in zip(
                (found[-1].names, found[-1].own, found[-1].waits),
                (everything.names, everything.own, everything.waits),
                strict=True,
            ):
                mine.update(all_of_them)
                all_of_them.clear()
    assert {layer.slots.used for layer in cache.slot_layers} == {BUDGET}
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize("policy", OF_A_LAYER)
def test_full_blocks_launch_the_same_and_wait_for_nothing(monkeypatch, policy):
    pytest.importorskip("triton")
    two, four = (blocks_of(monkeypatch, policy, layers) for layers in (2, 4))
    full = four[BUDGET // BLOCK :]
    assert all(block.names == full[0].names for block in full)
    assert [block.waits.total() for block in four[1:]] == [0] * (BLOCKS - 1)
    own = (four[-1].own.total() - two[-1].own.total()) / 2
    assert own <= OF_A_LAYER[policy], four[-1].own


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("policy", "family", "padding", "known"),
    [
        ("snapkv(window=4)", "llama", 0, True),
        ("h2o", "llama", 0, True),
        ("h2o", "llama", 5, None),  # as long as rows are of one length
        ("streaming", "mistral", 0, True),
        ("tova+ada", "llama", 0, None),  # the first block is, later ones are not
        ("h2o+every(steps=4)", "llama", 0, True),
        ("d2o", "llama", 0, True),
    ],
)
def test_slots_that_are_said_to_be_in_order_are(monkeypatch, policy, family, padding, known):
    """Three turns of blocks, with tokens decoded between them that reuse slots of any place."""
    changes = {"sliding_window": 11} if family == "mistral" else {}
    model, said = kvtool.attach(peaky_model(family, **changes)), Counter()
    made = block.Block

    def check(new, view, *rest):
        if view.in_order:
            assert (view.positions >= 0).all()
            assert (view.positions.diff(dim=-1) > 0).all()
        said[view.in_order] += 1
        return made(new, view, *rest)

    monkeypatch.setattr(block, "Block", check)
    cache = kvtool.build_cache(model, policy, 16, prefill="full" if "+ada" in policy else "block:8")
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, :padding] = 0
    for turn in range(3):
        ids = random_ids(30, batch=2, seed=turn)
        prefill(model, cache, ids, mask if padding and not turn else None)
        for token in range(5, 9):
            decode_step(model, cache, torch.full((2,), token))
    assert known is None or set(said) == {known}
