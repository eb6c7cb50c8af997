"""The README's example of a new feature works as printed: one file, one line in the table."""

import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kvtool
from kvtool.cache.features import table
from kvtool.generation import decode_step, prefill
from tests.models_for_tests import peaky_model, random_ids

README = Path(__file__).parents[2] / "kvtool" / "README.md"


@pytest.fixture
def losses(monkeypatch):
    section = README.read_text(encoding="utf-8").split("## Add a feature of the cache")[1]
    code = textwrap.dedent(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1])
    module = ModuleType("kvtool.cache.features.losses")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, "losses.py", "exec"), module.__dict__)
    line = re.search(r"`(\w+),` in `FEATURES`", section)[1]
    monkeypatch.setattr(table, "FEATURES", (*table.FEATURES, getattr(module, line)))
    return module.Losses


@pytest.fixture(scope="module")
def model():
    return kvtool.attach(peaky_model("llama"))


def counts(losses, cache):
    return [losses.of(layer).counts.tolist() for layer in cache.slot_layers]


POLICIES = ["h2o", "snapkv(window=4)", "h2o+d2o-merge", "h2o+every(steps=3)"]


@pytest.mark.parametrize("prefill_in", ["full", "block:8"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_readme_feature_counts_what_is_gone(losses, model, policy, prefill_in):
    cache = kvtool.build_cache(model, policy, 12, prefill=prefill_in)
    prefill(model, cache, random_ids(40, batch=2))
    for token in range(5):
        decode_step(model, cache, torch.tensor([token, token]))
        held = cache.report().kept_per_layer
        assert counts(losses, cache) == [[[41 + token - each] * 2] * 2 for each in held]
    cache.reset()
    assert counts(losses, cache) == [[]] * 2


def test_the_readme_feature_follows_entries_and_files(losses, model, tmp_path):
    short, long = random_ids(19, seed=1), random_ids(40, seed=2)
    ids = torch.zeros(2, 40, dtype=torch.long)
    ids[0, 21:], ids[1] = short[0], long[0]
    both = kvtool.build_cache(model, "h2o", 12)
    prefill(model, both, ids, (ids > 0).long())
    decode_step(model, both, torch.tensor([3, 3]))
    assert counts(losses, both) == [[[8, 8], [29, 29]]] * 2
    kvtool.save_cache(both, tmp_path / "a.safetensors")
    again = kvtool.load_cache(tmp_path / "a.safetensors", model)
    with again.rollback():
        decode_step(model, again, torch.tensor([3, 3]))
        assert counts(losses, again) == [[[9, 9], [30, 30]]] * 2
    again.reorder_cache(torch.tensor([1, 0]))
    assert counts(losses, again) == [[[29, 29], [8, 8]]] * 2


def test_a_policy_that_evicts_nothing_does_without(losses, model):
    cache = kvtool.build_cache(model, "full")
    assert [losses.of(layer) for layer in cache.slot_layers] == [None, None]
