"""What is read from a configuration is what a tiny model of it hands to its cache."""

import contextlib
import copy
import json
import re
import warnings

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import kvtool
from kvtool.cache.hooks.families import check_supported
from kvtool.documents.memory import ModelShape
from kvtool.errors import KvtoolWarning
from kvtool.model_shape import LayerShape, has_key_biases, layer_shapes, stored_dtype
from kvtool.plain_config import plain_config
from tests.models.published import LLAMA_3, QWEN_25_CODER
from tests.models.tiny import families, tiny_config
from tests.models_for_tests import BASE, DEEPSEEK, EXPERTS, FAMILIES, GEMMA, HYBRID, family_model

FALCON = {"alibi": False, "num_kv_heads": 2}
GEMMA4 = {"layer_types": HYBRID, "global_head_dim": 32, "hidden_size_per_layer_input": 8}
OTHERS = {
    "falcon-old": ("falcon", FALCON | {"multi_query": False, "num_kv_heads": None}),
    "falcon-new": ("falcon", FALCON | {"multi_query": True, "new_decoder_architecture": True}),
    "deepseek_v2": ("deepseek_v2", DEEPSEEK | {"topk_method": "greedy"}),
    "gpt_bigcode": ("gpt_bigcode", {"multi_query": True}),
    "gpt_bigcode-heads": ("gpt_bigcode", {"multi_query": False}),
    "gemma4-alone": ("gemma4_text", GEMMA | GEMMA4 | {"attention_k_eq_v": False}),
    "gemma4-global": ("gemma4_text", GEMMA | GEMMA4 | {"num_global_key_value_heads": 1}),
    "mimo": ("mimo_v2_flash", EXPERTS | GEMMA | {"v_head_dim": 24, "layer_types": HYBRID}),
}


def tiny_model(name):
    if name in FAMILIES:
        return family_model(name)
    kind, changes = OTHERS[name]
    config = AutoConfig.for_model(kind, **(BASE | changes))
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def received(model):
    """(KV heads, size of a key, size of a value, itemsize) of every layer, from its tensors."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.ones((1, 3), dtype=torch.long), past_key_values=cache, use_cache=True)
    found = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        stored = isinstance(keys, torch.Tensor)
        sizes = stored and (keys.shape[1], keys.shape[-1], values.shape[-1], keys.element_size())
        found.append(sizes or None)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gpt_neox"] + list(OTHERS))
def test_shapes_are_those_that_the_cache_receives(name):
    model = tiny_model(name)
    tensors = received(model)
    shapes = layer_shapes(model.config, "float32")
    told = [s and (s.kv_heads, s.key_dim, s.value_dim, s.itemsize) for s in shapes[: len(tensors)]]
    assert told == tensors
    assert shapes[len(tensors) :] == [None] * (model.config.num_hidden_layers - len(tensors))
    assert {shape.heads for shape in shapes if shape} == {4}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_keys_have_biases_where_a_parameter_says_so(name):
    model = tiny_model(name)
    of_keys = r"(k_proj|c_attn|query_key_value|qkv_proj|kv_a_proj_with_mqa)\.bias$"
    found = any(re.search(of_keys, each) for each, _ in model.named_parameters())
    assert has_key_biases(model.config) == found


@pytest.mark.parametrize(
    ("kind", "changes", "biased"),
    [
        ("llama", {"attention_bias": True}, True),
        ("qwen2_moe", {}, True),
        ("qwen2_moe", {"qkv_bias": False}, False),
        *((kind, {}, True) for kind in ("qwen2_vl", "qwen2_5_vl", "qwen2_audio", "glm4v", "phi")),
        ("starcoder2", {}, True),
        ("starcoder2", {"use_bias": False}, False),
        ("nemotron_h", {"use_bias": True}, False),  # of its recurrence
        ("llama4", {}, False),  # its image tower has biases
    ],
)
def test_an_entry_or_the_family_says_that_keys_have_biases(kind, changes, biased):
    assert has_key_biases(AutoConfig.for_model(kind, **changes)) is biased


@pytest.mark.parametrize("published", [LLAMA_3, LLAMA_3 | {"attention_bias": True}, QWEN_25_CODER])
def test_a_plain_configuration_says_the_same_of_biases(published):
    config, kind = plain_config(published), published["model_type"]
    assert config is not None
    biased = kind == "qwen2" or published["attention_bias"]
    assert has_key_biases(config) is biased
    read = AutoConfig.for_model(**copy.deepcopy(published))  # which changes the rotations given
    assert has_key_biases(read) is biased


@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "mistral-window", "falcon", "deepseek_v3", "llama4"]
)
def test_windows_are_what_a_cache_keeps(name):
    model = kvtool.attach(family_model(name))
    cache = kvtool.build_cache(model, "full")
    with torch.no_grad():
        model(torch.full((1, 40), 7), past_key_values=cache, use_cache=True)
    shapes = layer_shapes(model.config)
    assert [min(40, shape.window or 40) for shape in shapes] == cache.report().kept_per_layer


def test_real_models_store_what_their_papers_say():
    deepseek = AutoConfig.for_model("deepseek_v3")
    assert layer_shapes(deepseek, "bfloat16")[0] == LayerShape(1, 128, 512, 64, 2)
    told = ModelShape.of(deepseek, name="deepseek", dtype="bfloat16")
    assert (told.heads, told.kv_heads, told.head_dim, told.latent_dim) == (128, 1, 576, 512)
    falcon_7b = AutoConfig.for_model("falcon", num_attention_heads=71, hidden_size=4544)
    assert layer_shapes(falcon_7b, "bfloat16")[0] == LayerShape(1, 71, 64, 64, 2)
    falcon_40b = AutoConfig.for_model(
        "falcon",
        num_attention_heads=128,
        num_kv_heads=8,
        hidden_size=8192,
        new_decoder_architecture=True,
    )
    # the 8 KV heads are repeated for the 128 that ask, before they are cached
    assert layer_shapes(falcon_40b, "bfloat16")[0] == LayerShape(128, 128, 64, 64, 2)


@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "deepseek_v3", "falcon", "lfm2", "gemma3n", "llama4"]
)
def test_a_document_tells_the_same_layers(name):
    config = family_model(name).config
    shapes = layer_shapes(config, "bfloat16")
    told = ModelShape.of(config, name=name, dtype="bfloat16")
    assert ModelShape(**told.model_dump()).layer_shapes() == shapes
    assert ("latent_dim" in told.model_dump()) == (name == "deepseek_v3")


def test_head_scores_are_of_the_heads_that_store(tmp_path):
    model, path = kvtool.attach(family_model("falcon")), tmp_path / "scores.tsv"
    path.write_text("0.5\n0.1\n0.9\n0.2\n")  # 4 layers of 1 KV head for the 4 that ask
    cache = kvtool.build_cache(model, f"duoattention(scores={path})", 300)
    assert cache.link.head_ranks.tolist() == [[1], [3], [0], [2]]


@pytest.mark.parametrize(
    "name", ["falcon", "deepseek_v3", "gemma3", "lfm2", "gptj", "gemma4", "llama4"]
)
def test_a_saved_cache_is_checked_against_the_configuration(tmp_path, monkeypatch, name):
    """The model runs for the states of a recurrence alone."""
    model, path = kvtool.attach(family_model(name)), tmp_path / "c.safetensors"
    cache = kvtool.build_cache(model, "streaming", 12)
    with torch.no_grad():
        model(torch.full((1, 40), 7), past_key_values=cache, use_cache=True)
    kvtool.save_cache(cache, path)
    forwards = []
    model.register_forward_pre_hook(lambda *given: forwards.append(given))
    loaded = kvtool.load_cache(path, model)
    for layer in [each.index for each in cache.slot_layers]:
        assert loaded.kept_positions(layer).equal(cache.kept_positions(layer))
    assert len(forwards) == (name == "lfm2")


@pytest.mark.parametrize(
    "name", ["gemma4", "gemma4-alone", "mimo", "deepseek_v3", "falcon-new", "llama4"]
)
def test_bytes_hold_where_layers_are_unlike_each_other(name):
    """The next budget, one token more in every layer that is free, would be too large."""
    model, size = kvtool.attach(tiny_model(name)), 80_000
    cache = kvtool.build_cache(model, "h2o", f"{size}B")
    with torch.no_grad():
        model(torch.full((1, 300), 7), past_key_values=cache, use_cache=True)
        for _ in range(2):
            model(torch.full((1, 1), 7), past_key_values=cache, use_cache=True)
    report = cache.report()
    free = [layer for layer in layer_shapes(model.config) if layer and layer.window is None]
    one_more = sum(layer.bytes + layer.kv_heads * 8 for layer in free)  # a position and a sum
    assert report.allocated_bytes + report.state_bytes <= size
    assert report.allocated_bytes + report.state_bytes + one_more > size


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
@pytest.mark.parametrize("place", ["the whole", "its text"])
def test_the_dtype_is_the_one_that_transformers_would_load_in(tmp_path, key, place):
    """Every family: models that see name a dtype for the whole or for their text."""
    asked, wrong = [], {}
    for kind in families():
        with contextlib.suppress(
            ValueError, StrictDataclassError
        ):  # families that have no tiny model, or cannot run
            data = tiny_config(kind).to_dict()
            parts = [each for name, each in data.items() if name.endswith("_config") and each]
            for each in (data, *parts):
                each.pop("dtype", None)
            (data.get("text_config", data) if place == "its text" else data)[key] = "float16"
            (tmp_path / "config.json").write_text(json.dumps(data))
            config = AutoConfig.from_pretrained(tmp_path)
            check_supported(config)
            asked.append(kind)
            if stored_dtype(config, None) != "float16":
                wrong[kind] = stored_dtype(config, None)
            if layer_shapes(config) != layer_shapes(config, "float16"):
                wrong[kind] = layer_shapes(config)
    assert wrong == {}
    assert {"llama", "gemma3", "gemma4", "llama4", "qwen3_5"} <= set(asked)


@pytest.mark.parametrize("window", [512, 1024])
def test_a_window_that_no_text_fills_is_none(window):
    """Phi-3.5 has a window of 262,144 tokens and was trained for 131,072."""
    ids = (torch.arange(120) * 7 % 60 + 3)[None]
    kept, logits = [], []
    for width in (None, window):
        model = kvtool.attach(phi(width))
        cache = kvtool.build_cache(model, "h2o", 32)
        with torch.no_grad():
            logits.append(model(ids, past_key_values=cache, use_cache=True).logits)
        kept.append(list(cache.report().kept_per_layer))
    assert kept[0] == kept[1] == [32, 32]
    assert logits[0].equal(logits[1])


def test_a_model_that_evicts_nothing_says_so():
    with pytest.warns(KvtoolWarning, match="no layer of `phi3` lets policy `h2o` evict"):
        kvtool.build_cache(phi(64), "h2o", 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvtool.build_cache(phi(64), "full")
        kvtool.build_cache(phi(512), "h2o", 32)


def phi(window):
    """Two layers, trained for 512 positions."""
    changes = BASE | {"num_hidden_layers": 2, "max_position_embeddings": 512, "pad_token_id": 0}
    config = AutoConfig.for_model(
        "phi3", **changes, original_max_position_embeddings=512, sliding_window=window
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()
