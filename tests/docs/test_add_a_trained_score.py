"""The README's example of a trained score works as printed: a file of one's own, and weights."""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import kvtool
from kvtool.generation import decode_step, prefill
from kvtool.policies import table
from tests.contract.cases import Case
from tests.contract.checks import CHECKS
from tests.models_for_tests import peaky_model, random_ids
from tests.tiers import first

README = Path(__file__).parents[2] / "kvtool" / "README.md"
LAYERS, KV_HEADS, HIDDEN = 2, 2, 64


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the module and the weights in it."""
    section = README.read_text(encoding="utf-8").split("## Add a trained score")[1]
    code = textwrap.dedent(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1])
    (tmp_path / "my_scorer.py").write_text(textwrap.dedent(code))
    source = torch.Generator().manual_seed(0)
    weights = {
        f"layers.{i}": torch.randn(KV_HEADS, HIDDEN, generator=source) for i in range(LAYERS)
    }
    save_file(weights, tmp_path / "scorer.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("my_scorer", "shown_scorer"):
        sys.modules.pop(name, None)


@pytest.fixture
def model():
    return kvtool.attach(peaky_model("llama", num_hidden_layers=LAYERS))


def test_it_keeps_what_the_linear_layer_scores_highest(folder, model):
    ids = random_ids(50)
    cache = kvtool.build_cache(model, "my_scorer:Linear(file=scorer.safetensors,recent=4)", 12)
    with torch.no_grad():
        hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))[0]
    weight = sys.modules["my_scorer"].Linear().weights["layers.0"]
    prefill(model, cache, ids)
    for head in range(KV_HEADS):
        scores = (hidden @ weight[head])[:46].tolist()
        best = sorted(range(46), key=lambda j: (-scores[j], j))[:8]
        assert cache.kept_positions(0)[0, head].tolist() == sorted([*best, 46, 47, 48, 49])


def test_a_file_that_is_not_there_is_named(folder, model):
    cache = kvtool.build_cache(model, "my_scorer:Linear(file=no.safetensors)", 20)
    with pytest.raises(kvtool.PolicyError, match=r"from_hidden raised .*no\.safetensors"):
        prefill(model, cache, random_ids(50))


def test_weights_of_another_model_are_refused(folder, model):
    save_file({f"layers.{i}": torch.ones(3, HIDDEN) for i in range(LAYERS)}, "three.safetensors")
    cache = kvtool.build_cache(model, "my_scorer:Linear(file=three.safetensors)", 20)
    with pytest.raises(kvtool.PolicyError, match="of 3 KV heads, and layer 0 has 2"):
        prefill(model, cache, random_ids(50))


@pytest.mark.parametrize("modifier", ["", "+ada", "+int8", "+d2o-merge", "+every(steps=6)"])
def test_it_goes_with_modifiers_and_turns(folder, model, modifier):
    policy = f"my_scorer:Linear(recent=4){modifier}"
    cache = kvtool.build_cache(model, policy, 20)
    for turn in range(2):
        prefill(model, cache, random_ids(40, seed=turn))
        for token in range(5, 12):
            decode_step(model, cache, torch.tensor([token]))
    assert cache.tokens_seen() == [94]
    assert cache.report().kv_bytes < 94 * 2 * 2 * 2 * 16 * 4


@pytest.mark.parametrize(
    "name",
    first(
        2,
        [
            "an_entry_of_a_padded_batch_is_the_entry_alone",
            "a_rollback_leaves_no_trace",
            "a_saved_cache_goes_on_like_the_unbroken_one",
            "compiled_steps_are_the_eager_ones",
        ],
    ),
)
def test_it_keeps_the_contract_of_all_policies(folder, monkeypatch, name):
    file = folder / "scorer.safetensors"
    (folder / "shown_scorer.py").write_text(
        f"from my_scorer import Linear, dataclass\n\n\n"
        f"@dataclass(frozen=True)\nclass Shown(Linear):\n"
        f"    file: str = {str(file)!r}\n    recent: int = 5\n\n"
        f"    def from_hidden(self, hidden, layer):\n"  # equal tokens tie in batches, too
        f"        found = super().from_hidden(hidden, layer)\n"
        f"        return {{name: number.round(decimals=2) for name, number in found.items()}}\n"
    )
    shown = importlib.import_module("shown_scorer").Shown
    monkeypatch.setattr(table, "_class_at", by_place(table._class_at, shown))
    monkeypatch.setitem(table.BASES, "linear", "shown_scorer:Shown")
    CHECKS[name](Case("linear", "base"))


def by_place(class_at, shown):
    """Look up a class of the table, or the one that is not in the package."""
    return lambda place: shown if place == "shown_scorer:Shown" else class_at(place)
