"""Weights in fewer bits: where bitsandbytes is here, and what is said where it is not."""

import copy
import json
import shutil
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import finegrained_fp8
from transformers.utils.quantization_config import FineGrainedFP8Config

import kvtool
from kvtool import extras
from kvtool.errors import KvtoolError, UsageError
from kvtool.models import reference
from kvtool.models.load import load
from kvtool.models.placement import weight_bytes
from kvtool.models.quantised import (
    check_quantise,
    linear_layers,
    loading_options,
    spared_bytes,
)
from kvtool.planning.parameters import BITS, count_parameters, folder_bytes, weights_bytes
from tests.models.published import DEEPSEEK_V3, GPT_OSS_20B, GPT_OSS_120B
from tests.models.tiny import tiny_config
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


def fp8(rows, columns, count=1):
    """Bytes of matrices, with a float32 for each block of 128 x 128."""
    return count * (rows * columns + 4 * -(-rows // 128) * -(-columns // 128))


def mxfp4(rows, columns):
    """Bytes of half a byte a weight, and a byte for each 32."""
    return rows * columns // 2 + rows * columns // 32


def deepseek_v3(*, predicting):
    """Bytes of DeepSeek V3's tensors, with or without the layer that predicts a further token."""
    wide = 7168
    attention = fp8(1536, wide) + fp8(128 * 192, 1536) + fp8(576, wide)
    attention += fp8(128 * 256, 512) + fp8(wide, 128 * 128) + 2 * (2 * wide + 1536 + 512)
    dense = fp8(18432, wide, 2) + fp8(wide, 18432)
    sparse = 257 * (fp8(2048, wide, 2) + fp8(wide, 2048)) + 2 * 256 * wide + 4 * 256
    ends = 2 * 2 * 129280 * wide
    more = attention + sparse + ends + 2 * (wide * 2 * wide + 3 * wide) if predicting else 0
    return 61 * attention + 3 * dense + 58 * sparse + ends + 2 * wide + more


def gpt_oss(layers, experts):
    wide = 2880
    numbers = 64 * 64 * (2 * wide + 1) + 2 * 8 * 64 * (wide + 1) + wide + 64  # attention and sinks
    numbers += experts * (wide + 1) + experts * 3 * wide + 2 * wide  # router, biases, norms
    layer = 2 * numbers + experts * (mxfp4(2 * wide, wide) + mxfp4(wide, wide))
    return layers * layer + 2 * (2 * 201088 * wide + wide)


@pytest.mark.parametrize(
    ("published", "by_hand"),
    [
        (DEEPSEEK_V3, deepseek_v3(predicting=False)),
        (GPT_OSS_20B, gpt_oss(24, 32)),
        (GPT_OSS_120B, gpt_oss(36, 128)),
    ],
    ids=["deepseek-v3", "gpt-oss-20b", "gpt-oss-120b"],
)
def test_published_checkpoints_in_fewer_bits_are_counted(published, by_hand, tmp_path):
    """Buffers, which the files lack or hold in another dtype, take less than 32 KiB."""
    config = AutoConfig.for_model(**copy.deepcopy(published))
    assert abs(weight_bytes(config, "auto") - by_hand) < 2**15
    assert weight_bytes(config, "auto", device="cuda:0") == weight_bytes(config, "auto")
    model = on_meta(config)
    whole = sum(each.nbytes for each in [*model.parameters(), *model.buffers()])
    assert weight_bytes(config, "auto", device="cpu") == whole
    assert weight_bytes(config, "auto", bits="4bit") is None
    (tmp_path / "config.json").write_text(json.dumps(published))
    plan = kvtool.plan(str(tmp_path), memory="800GiB", context="4K")
    assert plan.device.weights == weight_bytes(config, "auto")
    assert plan.model.dtype == "bfloat16"
    with pytest.raises(UsageError, match="are quantised already"):
        kvtool.plan(str(tmp_path), memory="800GiB", context="4K", quantize="8bit")


def test_files_have_their_published_sizes():
    """Of DeepSeek V3 688 GB, which transformers loads but for a layer; of gpt-oss as published."""
    assert deepseek_v3(predicting=True) // 10**9 == 688
    assert gpt_oss(24, 32) == 13_761_264_768
    assert gpt_oss(36, 128) == 65_248_815_744


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("more", [{}, {"modules_to_not_convert": ["lm_head", "model.layers.0"]}])
def test_fp8_takes_what_the_modules_of_transformers_take(family, more):
    config = tiny_config(family)
    settings = FineGrainedFP8Config(weight_block_size=[16, 16], **more)
    config.quantization_config = settings.to_dict()
    plain, packed = on_meta(config), on_meta(config)
    left = more.get("modules_to_not_convert", ["lm_head"])
    finegrained_fp8.replace_with_fp8_linear(packed, left, settings, pre_quantized=True)
    expected = sum(each.nbytes for each in plain.parameters())
    expected -= sum(each.nbytes for each in packed.parameters())
    assert spared_bytes(plain, config, 2) == expected > 0


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
