"""Static steps of readers: operators, addresses, and nothing that waits for a device."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvtool
from kvtool.cache.steps.static import stationary
from kvtool.generation import decode_step, prefill
from tests.models_for_tests import peaky_model, random_ids
from tests.tiers import first

OPERATORS = {
    "quest": (21, 21),
    "hsa": (43, 46),
    "rocketkv": (43, 46),
    "rocketkv-mt": (45, 48),
    "sparq": (26, 29),
    "sparq(local=4)": (28, 31),
    "loki": (9, 9),
    "loki(scope=query_head)": (7, 7),
    "exact-topk": (4, 4),
    "exact-topk(scope=group)": (5, 5),
}
"""Launches that a layer with a reader adds to the same layer of `full`, by reader: where all rows
are as long, and where they are not. They may not grow."""
WAITS = ("_local_scalar_dense", "nonzero", "equal", "unique", "masked_select")


class Launches(TorchDispatchMode):
    """Operators that are run, but for views."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aliases = [each.alias_info for each in func._schema.returns]
        view = aliases and all(each is not None and not each.is_write for each in aliases)
        name = func.overloadpacket.__name__
        if not view and name not in ("detach", "_unsafe_view"):
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


class Steps:
    """Static steps of a policy over three rows, of one length or of three."""

    def __init__(self, policy, layers, padded):
        self.model = kvtool.attach(peaky_model("llama", num_hidden_layers=layers, head_dim=32))
        self.cache = kvtool.build_cache(self.model, policy, None if policy == "full" else 20)
        ids = random_ids(60, batch=3)
        mask = torch.ones_like(ids)
        if padded:
            mask[0, :15] = mask[1, :9] = 0
        prefill(self.model, self.cache, ids, mask)
        self.inside = self.around = Counter()

    def __call__(self, room=8):
        assert self.cache.fix_shapes(room)

        def forward(**inputs):
            with Launches() as around, self.cache.static_step(), Launches() as inside:
                out = self.model(**inputs)
            self.inside, self.around = inside.names, around.names - inside.names
            return out

        return decode_step(self.model, self.cache, torch.tensor([2, 3, 4]), forward)


def of_a_layer(policy, padded):
    """Launches that two layers have more of than one, and of two layers those outside the step."""
    one, two = Steps(policy, 1, padded), Steps(policy, 2, padded)
    for steps in (one, two):
        steps(), steps()
    return (two.inside - one.inside).total(), two.around


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("policy", first(1, OPERATORS))
def test_a_layer_with_a_reader_launches_no_more_than_a_table_says(policy, padded):
    plain, _ = of_a_layer("full", padded)
    found, around = of_a_layer(policy, padded)
    assert found - plain <= OPERATORS[policy][padded]
    assert around == {"fill_": 1}  # the count of the cache, once for all layers


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("policy", first(1, OPERATORS))
def test_fifty_steps_wait_for_nothing_and_leave_tensors_where_they_are(policy, padded):
    steps, seen = Steps(policy, 2, padded), set()
    for _ in range(50):
        steps(room=64)
        assert not [name for name in steps.inside + steps.around if name in WAITS]
        layers = steps.cache.slot_layers
        seen.add(tuple(each.data_ptr() for layer in layers for each in stationary(layer)))
    assert len(seen) == 1
