"""A grown model computes what the old one did, and has sinks in its new layers."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvtool.models.reference import path
from kvtool.models.reference.filler import Filler
from training.grow import grow, new_places
from training.rows import Mixture, draw_batch
from training.sinks import place_sinks


@pytest.fixture(scope="module")
def texts():
    def draw(seed, rows, tokens):
        rng = np.random.default_rng(seed)
        return torch.from_numpy(draw_batch(rng, rows, tokens, Filler(seed, 500), Mixture())[0])

    return draw


@pytest.fixture(scope="module")
def old():
    return AutoModelForCausalLM.from_pretrained(path(), dtype=torch.float32).eval()


@pytest.mark.parametrize("layers", [6, 8])
def test_a_grown_model_computes_what_the_old_one_did(old, texts, layers):
    grown = grow(old, layers).eval()
    assert grown.config.num_hidden_layers == len(grown.model.layers) == layers
    assert old.config.num_hidden_layers == 4
    place_sinks(grown, new_places(4, layers), texts(1, 4, 128))
    ids = texts(2, 2, 200)
    with torch.no_grad():
        assert torch.equal(grown(ids).logits, old(ids).logits)


def test_heads_with_sinks_find_the_first_token_and_read_nothing_from_it(old, texts):
    """New layers write nothing, so that all can be fitted at once; the last reads least evenly."""
    grown = grow(old, 8).eval()
    place_sinks(grown, [1, 3, 5], texts(1, 8, 256))
    grown.set_attn_implementation("eager")
    ids = texts(2, 2, 256)
    with torch.no_grad():
        found = grown(ids, output_attentions=True, output_hidden_states=True)
    for place in (1, 3, 5):
        mass = found.attentions[place][:, :2, 64:, 0].mean((0, 2))
        assert mass.min() >= 0.3
        layer = grown.model.layers[place]
        first = layer.self_attn.v_proj(layer.input_layernorm(found.hidden_states[place][:, :1]))
        others = layer.self_attn.v_proj(layer.input_layernorm(found.hidden_states[place][:, 1:]))
        size = layer.self_attn.head_dim
        assert first[..., :size].norm(dim=-1).max() < 1e-3 * others[..., :size].norm(dim=-1).mean()
    without = grown.model.layers[7].self_attn.q_proj.weight
    assert torch.equal(without, grow(old, 8).model.layers[7].self_attn.q_proj.weight)
