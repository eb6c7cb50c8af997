"""Weights in fewer bits: where bitsandbytes is here, and what is said where it is not."""

import json
import shutil
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import kvtool
from kvtool import extras
from kvtool.errors import KvtoolError, UsageError
from kvtool.models import reference
from kvtool.models.load import load
from kvtool.models.placement import weight_bytes
from kvtool.models.quantised import check_quantise, linear_layers, loading_options
from kvtool.planning.parameters import BITS, count_parameters, folder_bytes, weights_bytes
from tests.models_for_tests import family_model, peaky_model, random_ids

HERE = find_spec("bitsandbytes") is not None
needs_package = pytest.mark.skipif(not HERE, reason="bitsandbytes is not here")


class Linear4bit(nn.Linear):
    """Stands for bitsandbytes' own: it computes, and what it holds is no matrix of numbers."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.load_state_dict(layer.state_dict())


@pytest.fixture
def stub():
    """A model whose blocks have no plain linear layers."""
    model = peaky_model("llama", num_hidden_layers=2)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if type(child) is nn.Linear:
                    setattr(part, name, Linear4bit(child))
    return kvtool.attach(model)


@pytest.mark.parametrize("policy", ["snapkv+caote", "quest", "roco+int8"])
def test_a_policy_runs_whatever_the_linear_layers_are(stub, policy):
    plain = kvtool.attach(peaky_model("llama", num_hidden_layers=2))
    found = []
    for model in (stub, plain):
        cache = kvtool.build_cache(model, policy, None if policy == "full" else 40)
        with torch.no_grad():
            found.append(model(random_ids(60), past_key_values=cache).logits)
    assert torch.equal(*found)


@pytest.mark.parametrize("policy", ["snapkv+critical", "kvzip(plus=true)"])
def test_a_policy_that_reads_the_output_projection_is_refused(stub, policy):
    with pytest.raises(KvtoolError, match="by a `Linear4bit`, which is no plain linear layer"):
        kvtool.build_cache(stub, policy, 40)


def test_without_the_package_it_is_named(monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "bitsandbytes" else 1)
    with pytest.raises(UsageError, match="--quantize needs bitsandbytes") as caught:
        check_quantise("cpu", split=False)
    assert caught.value.hint == "pip install 'kvtool[bitsandbytes]'"


@pytest.mark.parametrize(
    ("device", "given", "told"),
    [
        ("mps", {}, "--quantize runs on cpu, cuda, xpu, not on mps"),
        ("cuda:0", {"split": True}, "--tensor-parallel exclude each other"),
    ],
)
def test_what_cannot_be_quantised_is_refused(device, given, told):
    with pytest.raises(UsageError, match=told):
        check_quantise(device, **{"split": False} | given)


def test_bits_are_asked_of_transformers():
    config = family_model("llama").config
    assert loading_options(config, None, "cpu", torch.float32) == {}
    four = loading_options(config, "4bit", "cuda:1", torch.bfloat16)
    assert four["device_map"] == {"": "cuda:1"}
    told = four["quantization_config"].to_dict()
    assert (told["load_in_4bit"], told["bnb_4bit_quant_type"]) == (True, "nf4")
    assert told["bnb_4bit_compute_dtype"] == "bfloat16"
    assert not told["bnb_4bit_use_double_quant"]
    eight = loading_options(config, "8bit", "cpu", "auto")["quantization_config"]
    assert eight.to_dict()["load_in_8bit"]


@pytest.mark.parametrize("settings", [{"load_in_4bit": True}, {"quant_method": "bitsandbytes"}])
def test_a_quantised_checkpoint_goes_to_its_device_at_once(settings):
    config = family_model("llama").config
    config.quantization_config = settings
    assert loading_options(config, None, "cuda", "auto") == {"device_map": {"": "cuda"}}
    config.quantization_config = {"quant_method": "gptq"}
    assert loading_options(config, None, "cuda", "auto") == {}


def test_the_layers_that_are_quantised_are_those_that_are_counted():
    model = family_model("llama")
    counted = sum(each.numbers for each in count_parameters(model.config).linear)
    assert sum(each.numbers for each in linear_layers(model)) == counted


@pytest.mark.parametrize("bits", BITS)
def test_a_dry_run_counts_weights_in_fewer_bits(bits):
    config = family_model("llama").config
    buffers = weight_bytes(config, "float32") - weights_bytes(config, "float32")
    found = weight_bytes(config, "float32", bits=bits)
    assert found == weights_bytes(config, "float32", bits) + buffers


def test_files_say_what_quantised_weights_take(tmp_path):
    folder = shutil.copytree(reference.path(), tmp_path / "small")
    config = family_model("llama").config
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    assert weight_bytes(config, "float32", name=str(folder)) == folder_bytes(folder) > 0
    (folder / "model.safetensors").unlink()
    assert weight_bytes(config, "float32", name=str(folder)) is None
    assert weight_bytes(config, "float32") is None


@needs_package
@pytest.mark.parametrize("bits", BITS)
def test_a_loaded_model_takes_what_was_planned(bits):
    loaded = load(quantize=bits)
    plain = load()
    assert loaded.config_hash == plain.config_hash
    assert held(loaded.model) == weights_bytes(plain.model.config, "float32", bits)


def held(model) -> int:
    total = 0
    for weight in model.parameters():
        total += weight.nbytes
        state, rows = getattr(weight, "quant_state", None), getattr(weight, "SCB", None)
        total += 0 if state is None else state.absmax.nbytes + state.code.nbytes
        total += 0 if rows is None else rows.nbytes
    return total


@needs_package
@pytest.mark.parametrize("bits", BITS)
def test_a_checkpoint_in_fewer_bits_loads_as_it_is(bits, tmp_path):
    made = load(quantize=bits)
    made.model.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    assert "quantization_config" in json.loads((tmp_path / "config.json").read_text())
    loaded = load(str(tmp_path))
    ids = random_ids(40)
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, made.model(ids).logits)
    with pytest.raises(UsageError, match="are quantised already") as caught:
        load(str(tmp_path), quantize=bits)
    assert caught.value.hint == "leave out --quantize"


@needs_package
def test_a_quantised_model_answers():
    document = kvtool.generate(None, "Hello", "h2o", 64, quantize="4bit", max_new_tokens=4)
    assert document.new_tokens == 4
