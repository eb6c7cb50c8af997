"""Configurations read without transformers are those that transformers reads."""

import json

import pytest
from transformers import AutoConfig

from kvtool.documents.memory import ModelShape
from kvtool.model_shape import layer_shapes
from kvtool.plain_config import PlainConfig, plain_config
from kvtool.transformers_versions import reads_plain_configs
from tests.models.published import LLAMA_3, QWEN_3
from tests.models.tiny import tiny_config

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

pytestmark = pytest.mark.skipif(
    not reads_plain_configs(), reason="this transformers reads every configuration itself"
)


def written(family, folder):
    """The entries of a family's config.json, in the order that they are written in."""
    tiny_config(family).save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def check_equal(data, folder):
    """Whether it is read here; then what planning sees is what transformers reads."""
    (folder / "config.json").write_text(json.dumps(data))
    ours = plain_config(data)
    if ours is None:
        return False
    theirs = AutoConfig.from_pretrained(folder)
    assert isinstance(ours, PlainConfig)
    assert ModelShape.of(ours, name="m") == ModelShape.of(theirs, name="m")
    assert layer_shapes(ours) == layer_shapes(theirs)
    return True


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_configuration_is_read_as_transformers_does(family, tmp_path):
    data = written(family, tmp_path)
    assert check_equal(data, tmp_path)
    older = {name: value for name, value in data.items() if name != "rope_parameters"}
    older |= {"rope_theta": 10000.0, "torch_dtype": "bfloat16", "rope_scaling": None}
    older.pop("dtype", None)
    assert check_equal(older, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_left_out_has_the_default_of_transformers(family, tmp_path):
    data = written(family, tmp_path)
    read = [
        name
        for name in data
        if name != "model_type"
        and check_equal({key: value for key, value in data.items() if key != name}, tmp_path)
    ]
    assert "dtype" in read or "dtype" not in data
    assert not {"hidden_size", "num_key_value_heads", "vocab_size"} & set(read)


@pytest.mark.parametrize("data", [LLAMA_3, QWEN_3], ids=["llama3", "qwen3"])
def test_published_configurations_are_plain(data, tmp_path):
    assert check_equal(data, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gpt_neox"},
        {"model_type": ["llama"]},
        {"quantization_config": {"quant_method": "fp8"}},
        {"auto_map": {"AutoModelForCausalLM": "a.B"}},
        {"hidden_size": "64"},
        {"num_hidden_layers": 0},
        {"bos_token_id": -1},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        {"dtype": "float8_e4m3fn"},
        {"num_key_value_heads": 3},
        {"eos_token_id": [3, 10**9]},
        {"use_cache": 1},
    ],
    ids=str,
)
def test_what_is_not_plain_is_left_to_transformers(change, tmp_path):
    assert plain_config(written("llama", tmp_path) | change) is None


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_that_is_in_use_is_left_to_transformers(family, tmp_path):
    data = written(family, tmp_path) | {"layer_types": None}
    assert plain_config(data | {"use_sliding_window": False}) is not None
    assert plain_config(data | {"use_sliding_window": True, "sliding_window": 16}) is None
