"""The README's example of a new policy works as printed: one file, one line in the table."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kvtool
from kvtool.generation import decode_step, prefill
from kvtool.policies import table
from tests.models_for_tests import peaky_model, random_ids

README = Path(__file__).parents[2] / "kvtool" / "README.md"


@pytest.fixture
def peak(monkeypatch):
    section = README.read_text(encoding="utf-8").split("## Add a policy")[1]
    code = textwrap.dedent(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1])
    module = ModuleType("kvtool.policies.scores.peak")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(textwrap.dedent(code), "peak.py", "exec"), module.__dict__)
    line = re.search(r'`"peak": "(.*?)",`', section)[1]
    monkeypatch.setitem(table.BASES, "peak", line)
    return module.Peak


def test_the_readme_policy_is_listed_and_spelled(peak):
    assert str(kvtool.parse_policy("peak(recent=3)+caote")) == "peak(recent=3)+caote"
    entry = next(entry for entry in table.describe() if entry.name == "peak")
    assert entry.parameters == {"recent": 16}
    with pytest.raises(kvtool.UsageError, match="budget 16 is not above recent 16"):
        kvtool.build_cache(peaky_model("llama"), "peak", 16)


def test_the_readme_policy_keeps_the_highest_peaks_and_the_recent(peak):
    """One layer: the kept tokens have the largest column maxima of plain softmax attention."""
    model = peaky_model("llama", num_hidden_layers=1)
    ids = random_ids(40)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions[0]  # (1, heads, 40, 40)
    peaks = weights.view(2, 4, 40, 40).mean(1).amax(1)
    kvtool.attach(model)
    cache = kvtool.build_cache(model, "peak(recent=4)", 12)
    prefill(model, cache, ids)
    for head in range(2):
        oldest = sorted(range(36), key=lambda p: (-peaks[head, p].item(), p))[:8]
        expected = sorted([*oldest, 36, 37, 38, 39])
        assert cache.kept_positions(0)[0, head].tolist() == expected


@pytest.mark.parametrize("policy", ["peak(recent=4)", "peak(recent=4)+caote"])
def test_the_readme_policy_runs_padded_and_in_blocks(peak, policy):
    model = kvtool.attach(peaky_model("llama"))
    short, long = random_ids(19, seed=1), random_ids(40, seed=2)
    ids = torch.zeros(2, 40, dtype=torch.long)
    ids[0, 21:], ids[1] = short[0], long[0]
    both = kvtool.build_cache(model, policy, 12, prefill="block:8")
    prefill(model, both, ids, (ids > 0).long())
    alone = kvtool.build_cache(model, policy, 12, prefill="block:8")
    prefill(model, alone, short)
    for token in (5, 6, 7):
        decode_step(model, both, torch.tensor([token, token]))
        decode_step(model, alone, torch.tensor([token]))
    for layer in range(2):
        expected = alone.kept_positions(layer)[0]
        torch.testing.assert_close(both.kept_positions(layer)[0], expected)
