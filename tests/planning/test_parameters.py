"""Parameters counted from a configuration are those of the model that it makes."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from kvtool.plain_config import plain_config
from kvtool.planning import parameters
from kvtool.planning.parameters import Matrix, count_parameters, weights_bytes
from tests.models.published import LLAMA_3, QWEN_3
from tests.models.tiny import tiny_config

CHANGES = {
    "gemma3_text": [{"attention_bias": True}],
    "gpt_neox": [{"attention_bias": False}, {"tie_word_embeddings": True}],
    "granite": [{"attention_bias": True, "mlp_bias": True}],
    "llama": [{"attention_bias": True}, {"mlp_bias": True}, {"tie_word_embeddings": True}],
    "mixtral": [{"num_local_experts": 3}],
    "qwen2_moe": [{"decoder_sparse_step": 2}, {"mlp_only_layers": [1]}, {"qkv_bias": False}],
    "qwen3_moe": [{"mlp_only_layers": [0, 3]}, {"attention_bias": True}],
    "starcoder2": [{"use_bias": False}],
}
CASES = [
    (family, changes)
    for family in parameters._FAMILIES
    for changes in [{}, *CHANGES.get(family, [])]
]


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def linear_layers(model):
    """What transformers hands to bitsandbytes: plain linear layers but the output head."""
    head = model.get_output_embeddings()
    return [m for m in model.modules() if type(m) is nn.Linear and m is not head]


@pytest.mark.parametrize(("family", "changes"), CASES, ids=str)
def test_parameters_are_those_of_the_model(family, changes):
    config = tiny_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    model, found = on_meta(config), count_parameters(config)
    assert found is not None
    assert found.count == sum(each.numel() for each in model.parameters())
    quantised = linear_layers(model)
    assert sum(each.numbers for each in found.linear) == sum(m.weight.numel() for m in quantised)
    eighth = sum(m.weight.numel() + 4 * m.out_features for m in quantised)
    assert sum(each.bytes("8bit") for each in found.linear) == eighth


@pytest.mark.parametrize(
    ("published", "count"),
    [(LLAMA_3, 8_030_261_248), (QWEN_3, 8_190_735_360)],
    ids=["llama", "qwen"],
)
def test_published_sizes_are_counted_without_transformers(published, count):
    """8,030,261,248 is what the authors of Llama 3.1 publish, 8,190,735,360 those of Qwen 3."""
    plain = plain_config(published)
    assert plain is not None
    assert count_parameters(plain).count == count
    config = AutoConfig.for_model(**copy.deepcopy(published))
    assert sum(each.numel() for each in on_meta(config).parameters()) == count


def test_bytes_worked_by_hand():
    """Of a matrix of 100 x 30: 3,000 weights in 47 blocks of 64."""
    assert Matrix(100, 30).bytes("8bit") == 3000 + 4 * 100
    assert Matrix(100, 30).bytes("4bit") == 1500 + 4 * 47 + 64
    assert Matrix(100, 30, 3).bytes("4bit") == 3 * Matrix(100, 30).bytes("4bit")


def test_llama_in_fewer_bits():
    """The blocks' matrices hold 6,979,321,856 weights; embeddings and head stay in bfloat16."""
    plain = plain_config(LLAMA_3)
    rows = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    others = 2 * (8_030_261_248 - 6_979_321_856)
    assert weights_bytes(plain, "auto") == 2 * 8_030_261_248
    assert weights_bytes(plain, "float32") == 4 * 8_030_261_248
    assert weights_bytes(plain, "auto", "8bit") == others + 6_979_321_856 + 4 * rows
    four = others + 6_979_321_856 * 9 // 16 + 32 * 7 * 64
    assert weights_bytes(plain, "auto", "4bit") == four


def test_other_families_are_not_guessed():
    assert count_parameters(tiny_config("deepseek_v3")) is None
    config = tiny_config("phi")
    config.qk_layernorm = True
    assert count_parameters(config) is None
    quantised = tiny_config("llama")
    quantised.quantization_config = {"quant_method": "gptq", "bits": 4}
    assert weights_bytes(quantised, "bfloat16") is None


def test_torch_is_not_needed():
    code = (
        "import sys, kvtool.planning.parameters, kvtool.planning.fit; "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
