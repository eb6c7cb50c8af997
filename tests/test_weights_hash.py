"""One hash of all weights: any edit changes it, and where weights rest does not."""

import copy

import pytest
import torch
from torch import nn

from kvtool.weights_hash import weights_hash
from tests.models_for_tests import peaky_model


def test_the_hash_of_weights_that_lie_otherwise_is_the_same():
    model = peaky_model("llama")
    before = weights_hash(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.t().contiguous().t()
    assert weights_hash(model) == before
    assert weights_hash(copy.deepcopy(model)) == before
    assert weights_hash(torch.compile(model)) == before


def edit_in_place(weight):
    with torch.no_grad():
        weight[-1, -3] += 1


def edit_data(weight):
    weight.data[-1, -3] += 1  # which leaves the version counter alone


def edit_numpy(weight):
    weight.detach().numpy()[-1, -3] += 1


def swap_rows(weight):
    weight.data.copy_(weight.data[torch.arange(len(weight)).roll(1)])


@pytest.mark.parametrize("edit", [edit_in_place, edit_data, edit_numpy, swap_rows])
def test_an_edit_is_noticed(edit):
    model = peaky_model("llama")
    before = weights_hash(model)
    assert weights_hash(model) == before
    original = model.model.layers[1].self_attn.k_proj.weight.detach().clone()
    edit(model.model.layers[1].self_attn.k_proj.weight)
    assert weights_hash(model) != before
    model.model.layers[1].self_attn.k_proj.weight.data.copy_(original)
    assert weights_hash(model) == before


def test_a_buffer_a_replaced_weight_and_a_dtype_count():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.arange(7.0))
            self.register_buffer("scale", torch.tensor(3.0))
            self.register_buffer("empty", torch.zeros(0, 4))
            self.register_buffer("one", torch.ones(2, 2).t()[:1, 1:])  # of a stride that is not 1
            self.register_buffer("turns", torch.tensor([1 + 2j]))
            self.register_buffer("scratch", torch.zeros(2), persistent=False)

    hashes = set()
    model = Odd()
    hashes.add(weights_hash(model))
    model.scratch += 1
    assert weights_hash(model) in hashes
    model.scale += 1
    hashes.add(weights_hash(model))
    model.weight = nn.Parameter(torch.arange(7.0) + 1)
    hashes.add(weights_hash(model))
    model.half()
    hashes.add(weights_hash(model))
    assert len(hashes) == 4


def test_offloaded_weights_are_read_where_they_rest(tmp_path):
    whole = peaky_model("llama")
    whole.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu"}
    places |= {"model.norm": "disk", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    offloaded = type(whole).from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "weights"
    )
    assert any(weight.is_meta for weight in offloaded.parameters())
    assert weights_hash(offloaded) == weights_hash(whole)


@pytest.mark.filterwarnings("ignore")  # torch.ao.quantization is to move
def test_quantised_and_meta_models_have_a_hash():
    hashes = set()
    for bias in (0.0, 1.0):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        with torch.no_grad():
            plain[1].weight[3, 3] += bias
        model = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear})
        hashes |= {weights_hash(model), weights_hash(model), weights_hash(plain)}
    hashes.add(weights_hash(nn.Linear(8, 8, device="meta")))
    hashes.add(weights_hash(nn.Linear(8, 9, device="meta")))
    assert len(hashes) == 6
