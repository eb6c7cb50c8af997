"""How much of kvtool a token goes through: what it costs to run, and to read."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

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
    assert 40 <= calls.total() <= 121
    assert len({file for file, _ in calls}) <= 16


@pytest.mark.exhaustive
@torch.no_grad()
def test_a_prompt_in_blocks_hardly_counts_bytes():
    model = kvtool.attach(peaky_model("llama", num_hidden_layers=32))
    cache, ids = kvtool.build_cache(model, "h2o+caote", 16, prefill="block:16"), random_ids(512)

    def read():
        with cache.prompt([512]):
            for block in ids.split(16, 1):
                model(input_ids=block, past_key_values=cache)

    calls = traced(read)
    counting = sum(times for (_, name), times in calls.items() if "bytes" in name)
    assert 0 < counting < 0.05 * calls.total()
