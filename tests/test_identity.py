import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from kvtool.identity import config_hash


def config(**changes):
    return LlamaConfig(
        **({"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 11} | changes)
    )


def test_where_a_model_lies_and_how_it_is_run_do_not_matter(tmp_path):
    here, there = config(), config(dtype=torch.bfloat16, attn_implementation="eager")
    there._name_or_path, there.use_cache, there.transformers_version = "/there", False, "9.9"
    assert config_hash(here) == config_hash(there)
    here.save_pretrained(tmp_path)
    assert config_hash(AutoConfig.from_pretrained(tmp_path)) == config_hash(here)
    assert config_hash(here.to_dict()) == config_hash(here)


def test_a_model_and_its_file_have_one_hash(tmp_path):
    model = LlamaForCausalLM(config(intermediate_size=16, num_hidden_layers=1))
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert config_hash(loaded.config) == config_hash(model.config)


@pytest.mark.parametrize("change", [{"hidden_size": 64}, {"num_key_value_heads": 2}])
def test_what_is_computed_matters(change):
    assert config_hash(config(**change)) != config_hash(config())


def test_settings_inside_settings_count():
    plain, other = {"rope": {"theta": 1.0, "dtype": "a"}}, {"rope": {"theta": 2.0, "dtype": "a"}}
    assert config_hash(plain) != config_hash(other)
    assert config_hash(plain) == config_hash({"rope": {"dtype": "b", "theta": 1.0}})
    assert config_hash({"a": 1, "b": 2}) == config_hash({"b": 2, "a": 1})
