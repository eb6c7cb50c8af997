"""How much of kvtool a token goes through: what it costs to run, and to read."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvtool
from tests.models_for_tests import peaky_model, random_ids

ROOT = str(Path(kvtool.__file__).parent)


def traced(function) -> Counter:
    """Calls of kvtool's functions, by file and name."""
    calls = Counter()

    def count(frame, event, _):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT):
            calls[name[len(ROOT) + 1 :], frame.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


@torch.no_grad()
def test_a_decoded_token_takes_a_short_way():
    model = kvtool.attach(peaky_model("llama", num_hidden_layers=4))
    cache, token = kvtool.build_cache(model, "h2o+caote", 16), random_ids(1)
    model(input_ids=random_ids(40), past_key_values=cache)
    for _ in range(4):
        model(input_ids=token, past_key_values=cache)
    calls = traced(lambda: model(input_ids=token, past_key_values=cache))
    assert 40 <= calls.total() <= 141
    assert len({file for file, _ in calls}) <= 19


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += 1
        return operation(*args, **(kwargs or {}))


@torch.no_grad()
def test_between_two_cuts_a_token_costs_less_than_a_cut_at_every_token():
    model, token = kvtool.attach(peaky_model("llama", num_hidden_layers=4)), random_ids(1)
    operations, calls = {}, {}
    paced = ("h2o+every(steps=64)", "rkv(window=4)", "snapkv(window=4)+every(steps=64)")
    for policy in ("h2o", *paced):
        cache = kvtool.build_cache(model, policy, 16)
        model(input_ids=random_ids(40), past_key_values=cache)
        for _ in range(4):
            model(input_ids=token, past_key_values=cache)
        with Operations() as counted:
            model(input_ids=token, past_key_values=cache)
        operations[policy] = counted.count
        calls[policy] = traced(lambda: model(input_ids=token, past_key_values=cache))  # noqa: B023
    assert operations["h2o"] <= 390  # all of the model's: 4 layers take about 200
    assert operations["h2o+every(steps=64)"] <= operations["h2o"] - 10
    assert calls["h2o+every(steps=64)"].total() <= calls["h2o"].total()
    for policy in paced[1:]:
        assert operations[policy] <= operations["h2o"] - 25
        assert calls[policy].total() <= 150
    for policy in paced:
        chosen = {"score", "keep_top", "lowest", "importance", "protected", "replace"}
        assert not chosen & {name for _, name in calls[policy]}


@torch.no_grad()
def test_layers_set_tokens_aside_together():
    model, token = kvtool.attach(peaky_model("llama", num_hidden_layers=4)), random_ids(1)
    cache = kvtool.build_cache(model, "h2o+calidrop(theta1=0.1,theta2=0.2)", 16)
    model(input_ids=random_ids(40), past_key_values=cache)
    for _ in range(4):
        model(input_ids=token, past_key_values=cache)
    with Operations() as counted:
        model(input_ids=token, past_key_values=cache)
    assert counted.count <= 670  # 390 of them are those of h2o


@torch.no_grad()
def operations_of_codes(codec):
    """Of a decoded token in each layer, beside those of the full cache."""
    model = peaky_model("llama", num_hidden_layers=4, head_dim=32).to(torch.bfloat16)
    model, token, counts = kvtool.attach(model), random_ids(1), []
    for policy in ("full", f"full+{codec}"):
        cache = kvtool.build_cache(model, policy)
        model(input_ids=random_ids(40), past_key_values=cache)
        for _ in range(4):
            model(input_ids=token, past_key_values=cache)
        with Operations() as counted:
            model(input_ids=token, past_key_values=cache)
        counts.append(counted.count)
    return (counts[1] - counts[0]) / 4


@pytest.mark.parametrize(("codec", "most"), [("int8", 74), ("int4", 107), ("k8v4", 109)])
def test_codes_take_few_operators(codec, most):
    assert operations_of_codes(codec) <= most


@torch.no_grad()
def operations_of_padded_rows(policy, batch):
    """Of a decoded token, where rows differ in how much a reader reads."""
    model = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(model, policy, None if policy == "full" else 16)
    ids, token = random_ids(40, batch=batch), random_ids(1, batch=batch)
    mask = torch.ones(batch, 40, dtype=torch.long)
    for row in range(1, batch):
        mask[row, : 7 * row] = 0  # by no whole pages: where all read as much, nothing is masked
    model(input_ids=ids, attention_mask=mask, past_key_values=cache)
    for _ in range(3):
        mask = torch.cat([mask, mask[:, -1:]], 1)
        with Operations() as counted:
            model(input_ids=token, attention_mask=mask, past_key_values=cache)
    return counted.count


@pytest.mark.parametrize(
    ("policy", "most"),
    [
        ("quest", 174),
        ("sparq(local=2)", 174),
        ("loki", 114),
        ("hsa", 240),
        ("exact-topk", 70),
        ("rocketkv(window=4)", 240),
        ("rocketkv-mt(window=4)", 254),
    ],
)
def test_rows_of_a_padded_batch_are_read_together(policy, most):
    """A reader adds as many operators to those of `full` for two rows as for four."""
    two, four = (
        operations_of_padded_rows(policy, batch) - operations_of_padded_rows("full", batch)
        for batch in (2, 4)
    )
    assert four == two <= most


@pytest.mark.exhaustive
@torch.no_grad()
def test_a_prompt_in_blocks_hardly_counts_bytes():
    model = kvtool.attach(peaky_model("llama", num_hidden_layers=8))
    cache, ids = kvtool.build_cache(model, "h2o+caote", 16, prefill="block:16"), random_ids(256)

    def read():
        with cache.prompt([256]):
            for block in ids.split(16, 1):
                model(input_ids=block, past_key_values=cache)

    calls = traced(read)
    counting = sum(times for (_, name), times in calls.items() if "bytes" in name)
    assert 0 < counting < 0.05 * calls.total()
