"""Sizes that no model can have are refused wherever a config.json comes from."""

import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import kvtool
from kvtool.models.config_sizes import MOST_HEADS, MOST_LAYERS, check_sizes
from kvtool.models.load import load_config, read_config
from tests.models.published import LLAMA_3, QWEN_3
from tests.models.tiny import tiny_config
from tests.models_for_tests import SIZES

PHI = {"hidden_size": 64, "num_attention_heads": 4}
FACTORS = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": MOST_LAYERS + 1},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": math.inf},
        {"num_layers": 10**6},
        {"vision_config": {"num_hidden_layers": 10**6}},
        {"parts": [{"num_hidden_layers": 10**6}]},
        {"head_dim": 0},
        {"head_dim": math.nan},
        {"hidden_size": 2**41},
        {"num_key_value_heads": MOST_HEADS + 1},
        {"intermediate_size": -1},
        {"sliding_window": 0},
        {"attention_chunk_size": -5},
        {"max_position_embeddings": -1},
        {"kv_lora_rank": -4},
        {"rope_theta": math.nan},
        {"rope_scaling": {"factor": -4.0}},
        {"rope_parameters": {"rope_theta": [1]}},
        {"rope_scaling": FACTORS | {"long_factor": [math.nan] * 8}},
        {"deep": json.loads("[" * 100 + "]" * 100)},
    ],
    ids=lambda change: str(change)[:60],
)
def test_a_size_that_none_can_be_is_refused_by_name(change):
    with pytest.raises(kvtool.KvtoolError, match=r"the config\.json of model `m` ") as told:
        check_sizes("m", PHI | change)
    assert any(name in str(told.value) for name in ("nested", "_factor", *_names(change)))


def _names(data):
    """Every key of a tree."""
    inner = data.values() if isinstance(data, dict) else data
    own = list(data) if isinstance(data, dict) else []
    return own + [name for item in inner if isinstance(item, (dict, list)) for name in _names(item)]


@pytest.mark.parametrize(
    "data",
    [
        LLAMA_3,
        QWEN_3,
        PHI | {"rope_scaling": FACTORS},
        PHI | {"rope_scaling": FACTORS, "head_dim": 32, "partial_rotary_factor": 0.5},
        {"num_hidden_layers": MOST_LAYERS, "sliding_window": None, "head_dim": None},
        {"kv_lora_rank": 512, "head_dim": 0, "qk_rope_head_dim": 0},
        {"use_sliding_window": False, "sliding_window": 0},
        {"num_experts": 0, "intermediate_size": 0, "vision_config": {"num_hidden_layers": 0}},
        {"intermediate_size": [64, 128], "num_key_value_heads": "2", "head_dim": True},
    ],
    ids=range(9),
)
def test_sizes_of_models_pass(data):
    check_sizes("m", data)


@pytest.mark.parametrize("change", [{"short_factor": [1.0] * 3}, {"partial_rotary_factor": 0.5}])
def test_factors_of_another_count_end_the_first_forward(change):
    rope = FACTORS | {"rope_theta": 1e4, "original_max_position_embeddings": 32}
    config = AutoConfig.for_model("llama", **SIZES, rope_parameters=rope | change)
    with pytest.raises(RuntimeError, match="size of tensor"):
        AutoModelForCausalLM.from_config(config)(torch.ones(1, 8, dtype=torch.long))


@pytest.mark.parametrize(("read", "family"), [(read_config, "llama"), (load_config, "gpt2")])
def test_both_readers_refuse_alike(read, family, tmp_path):
    tiny_config(family).save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    (tmp_path / "config.json").write_text(json.dumps(data | {layers: 10**7}))
    with pytest.raises(kvtool.KvtoolError, match=f"gives {layers} as `10000000`"):
        read(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
def test_a_nesting_that_python_cannot_read_is_told_in_one_line(name, tmp_path):
    (tmp_path / name).write_text("[" * 100_000)
    with pytest.raises(kvtool.KvtoolError, match=r"is not valid JSON|does not say which model"):
        read_config(str(tmp_path))
