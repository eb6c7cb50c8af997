"""States of llama.cpp: byte for byte what it saves itself, and what transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import kvtool as kv
from kvtool.cache.hooks.probes import find_rotations
from kvtool.engines.llamacpp.format import NEIGHBOURS, Layout, read_ids
from kvtool.engines.virtual_prompt import export_cache
from kvtool.errors import UsageError
from kvtool.models.load import load
from tests.engines.llamacpp import reader
from tests.engines.vllm.test_export import compressed, continued, model_of
from tests.models import tiny_gguf
from tests.models_for_tests import family_model, peaky_model, random_ids

HERE = Path(__file__).parent
GOLDEN = {"llama": ("f16", False), "qwen3": ("f32", True)}  # what llama.cpp saved of these models
POLICY = "snapkv(window=8)"


def layers_of(state, family, heads=2):
    """Keys in the pairs of transformers, and values: each (kv_heads, slots, head_dim)."""
    keys = [reader.heads(reader.unmixed(each, state.turned[0]), heads) for each in state.keys]
    if family == "llama":
        keys = [reader.halves(each) for each in keys]
    values = [reader.heads(reader.unmixed(each, state.turned[1]), heads) for each in state.values]
    return [*zip(keys, values, strict=True)]


def as_tensors(state, family, heads=2):
    """What a reader gives, by the names of an exported cache."""
    tensors = {"virtual_ids": torch.tensor(state.ids)}
    for i, both in enumerate(layers_of(state, family, heads)):
        for name, states in zip(("keys", "values"), both, strict=True):
            tensors[f"layer.{i}.{name}"] = torch.from_numpy(np.ascontiguousarray(states)).float()
    return tensors


@pytest.mark.parametrize("family", GOLDEN)
def test_a_state_that_llama_cpp_saved_is_written_again_byte_by_byte(family):
    kind, transposed = GOLDEN[family]
    data = (HERE / f"{family}.{kind}.bin").read_bytes()
    state = reader.read(data)
    layers = [tuple(map(torch.from_numpy, both)) for both in layers_of(state, family)]
    layout = Layout(type=kind, transposed=transposed)
    assert b"".join(layout.state(layers, state.ids, family)) == data


@pytest.mark.parametrize("family", GOLDEN)
def test_llama_cpp_holds_the_keys_and_values_of_transformers(family):
    """The reader undoes the pairs of the engine, so keys in other pairs would be far off."""
    kind, _ = GOLDEN[family]
    state = reader.read((HERE / f"{family}.{kind}.bin").read_bytes())
    assert state.positions == [(i, 1, 0) for i in range(len(state.ids))]
    model = peaky_model(family)
    with torch.no_grad():
        cache = model(torch.tensor([state.ids]), use_cache=True).past_key_values
    for (keys, values), layer in zip(layers_of(state, family), cache.layers, strict=True):
        for found, expected in ((keys, layer.keys[0]), (values, layer.values[0])):
            limit = (0.02 if kind == "f16" else 1e-4) * expected.abs().max()
            assert (torch.from_numpy(found) - expected).abs().max() < limit


CASES = {
    "f32": ({"type": "f32"}, 1e-4),
    "f32 without flash attention": ({"type": "f32", "flash_attention": False}, 1e-4),
    "version 2": ({"type": "f32", "engine_version": 2}, 1e-4),
    "streams": ({"type": "f32", "streams": 3}, 1e-4),
    "f16": ({}, 0.02),
    "f16 without flash attention": ({"flash_attention": False, "engine_version": "3"}, 0.02),
}


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi", "gpt_neox"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.each_once
def test_transformers_continues_the_state_as_kvtool_continues_the_cache(family, case, tmp_path):
    options, limit = CASES[case]
    model = peaky_model(family) if family in GOLDEN else family_model_of(family)
    path = tmp_path / "book.bin"
    cache = compressed(model, POLICY)
    kv.export(cache, path, to="llamacpp", **options)
    question = random_ids(12, seed=5)[:, 1:]
    with cache.budgets.raising(), torch.no_grad():
        ours = model(question, past_key_values=cache).logits
    kv.detach(model)
    state = reader.read(path.read_bytes())
    assert state.version == int(options.get("engine_version", 4))
    assert (state.streams, state.turned) == (options.get("streams", 1), (0, 0))
    heads = 4 if family == "gpt_neox" else 2
    theirs = continued(model, as_tensors(state, family, heads), question)
    assert (ours - theirs).abs().max() < limit * ours.abs().max()


def exported(model, policy=POLICY, **more):
    """A cache of a model, which has to outlive it, as it is exported for llama.cpp."""
    return export_cache(compressed(model, policy, **more), to="llamacpp")


def family_model_of(family):
    return model_of(family) if family != "llama" else peaky_model(family)


@pytest.mark.parametrize(("kind", "limit"), [("q8_0", 0.01), ("q4_0", 0.15)])
@pytest.mark.parametrize(("head_dim", "turned"), [(64, (64, 64)), (128, (128, 64)), (96, (0, 0))])
def test_codes_are_mixed_before_they_are_rounded_as_the_state_says(kind, limit, head_dim, turned):
    """The head says it since version 4 only; keys of 96 are not mixed."""
    prompt = exported(peaky_model("qwen3", head_dim=head_dim))
    state = reader.read(b"".join(Layout(type=kind).state(prompt.layers(), prompt.ids, "qwen3")))
    assert state.turned == turned
    for found, exact in zip(layers_of(state, "qwen3"), prompt.layers(), strict=True):
        for one, other in zip(found, exact, strict=True):
            assert np.abs(one - other.numpy()).max() < limit * other.abs().max()
    stored = reader.heads(state.keys[0], 2) - prompt.layers()[0][0].numpy()
    assert (np.abs(stored).max() < 0.5) == (turned == (0, 0))


def test_codes_are_those_of_ggml():
    """Its own functions in Python; scales are rounded once more there."""
    gguf = pytest.importorskip("gguf", reason="compares with the package gguf")
    states = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(0))
    for kind, size in (("q8_0", 34), ("q4_0", 18)):
        data = b"".join(Layout(type=kind).rows(states))[12:]
        ours = np.frombuffer(data, np.uint8).reshape(40, 2 * size)
        theirs = gguf.quants.quantize(states[0].numpy(), gguf.GGMLQuantizationType[kind.upper()])
        assert (ours == theirs).mean() > 0.999


# ---- refusals

REFUSED = {
    "version": ({"engine_version": "5"}, "of version 2, 3, 4, not 5"),
    "codes before version 4": ({"type": "q8_0", "engine_version": "3"}, "do not say how"),
    "codes without flash attention": (
        {"type": "q4_0", "flash_attention": False},
        "under flash attention only",
    ),
    "type": ({"type": "q5_1"}, "type must be"),
    "streams": ({"streams": 0}, "streams must be"),
    "dtype": ({"dtype": "float16"}, "--dtype is not for --to llamacpp"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_does_not_take_is_refused(case, tmp_path):
    options, told = REFUSED[case]
    model = peaky_model("llama")
    cache = compressed(model, POLICY)
    with pytest.raises(UsageError, match=told):
        kv.export(cache, tmp_path / "a.bin", to="llamacpp", **options)
    assert list(tmp_path.iterdir()) == []


def test_what_is_for_llama_cpp_alone_is_refused_for_vllm(tmp_path):
    model = peaky_model("llama")
    cache = compressed(model, POLICY)
    for options in ({"type": "f16"}, {"flash_attention": False}, {"streams": 2}):
        with pytest.raises(UsageError, match="is not for --to vllm"):
            kv.export(cache, tmp_path / "a.safetensors", **options)
    with pytest.raises(UsageError, match=r"--save must end in \.bin"):
        kv.export(cache, tmp_path / "a.safetensors", to="llamacpp")


MODELS = {
    "sliding windows": ("gemma3", 48, "sliding window, which only an export to vLLM holds"),
    "an unknown family": ("phi3", 32, r"how llama.cpp lays out the keys of `phi3`"),
    "latents": ("deepseek_v3", 32, r"export to llama.cpp is not available"),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_llama_cpp_holds_otherwise_are_refused(case, tmp_path):
    family, budget, told = MODELS[case]
    model = family_model(family)
    cache = compressed(model, "h2o", budget=budget)
    with pytest.raises(UsageError, match=told):
        kv.export(cache, tmp_path / "a.bin", to="llamacpp")


@pytest.mark.parametrize("family", NEIGHBOURS)
def test_keys_that_are_moved_are_in_halves_in_transformers(family):
    model = peaky_model(family)
    found = find_rotations(model, [0, 1], "a test")
    assert [each.interleaved for each in found if each is not None] == [False] * 2


def test_policies_of_unequal_counts_name_the_engine():
    model = peaky_model("llama")
    with pytest.raises(UsageError, match=r"under `adakv.*`, and llama.cpp has one length"):
        exported(model, "adakv(window=8)")
    with pytest.raises(UsageError, match=r"llama.cpp reads all of it"):
        exported(model, "quest")


# ---- the text and the file beside

FACTS = "The secret code for falcon: 7429103. The old lamp was near the school. Rain fell. " * 6


def test_virtual_ids_are_the_tokens_of_a_text(tmp_path):
    loaded = load()
    cache = kv.compress(loaded, FACTS, "snapkv", 64)
    names = {"model": loaded.model, "tokenizer": loaded.tokenizer}
    document = kv.export(cache, tmp_path / "book.bin", to="llamacpp", **names)
    ids = read_ids(tmp_path / "book.bin")
    assert ids == document.virtual_ids == loaded.tokenizer(document.text)["input_ids"]
    assert len(ids) == document.slots == 64
    for question in ("\nWho?", "\n7", "\n\nThe code"):
        assert loaded.tokenizer(document.text + question)["input_ids"][:64] == ids
    beside = json.loads((tmp_path / "book.bin.json").read_text())
    assert (beside["text"], beside["slots"], beside["policy"]) == (document.text, "64", "snapkv")
    other = kv.compress(loaded, FACTS, "keydiff", 64)
    again = kv.export(other, tmp_path / "b.bin", to="llamacpp", **names)
    assert len(again.virtual_ids) == 64
    assert again.text != document.text


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_the_text_of_a_chat_begins_the_message_of_the_user(system, tmp_path):
    """So a client that sends the text and a question has the engine make the ids of the state."""
    pytest.importorskip("gguf", reason="GGUF files need the package gguf")
    loaded = load(str(tiny_gguf.write(tmp_path / "tiny.gguf")))
    tokenizer = loaded.tokenizer
    cache = kv.compress(loaded, FACTS, "recency", 120, system=system)
    found = export_cache(cache, model=loaded.model, tokenizer=tokenizer, to="llamacpp")
    said = [{"role": "system", "content": system}] if system else []
    said.append({"role": "user", "content": found.metadata["text"] + "\nWhich code?"})
    sent = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
    assert sent[:120] == found.ids
    around = [found.metadata[f"question_{name}"] for name in ("before", "after")]
    rest = tokenizer("Which code?".join(around), add_special_tokens=False)["input_ids"]
    assert sent[120:] == rest
    assert found.metadata.get("system") == system


def test_too_few_slots_for_a_text_have_other_ids():
    loaded = load()
    cache = kv.compress(loaded, FACTS, "recency", 12)
    exported = export_cache(cache, model=loaded.model, tokenizer=loaded.tokenizer, to="llamacpp")
    assert "text" not in exported.metadata
    assert len(exported.ids) == 12


def test_a_file_that_is_no_state_is_told(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"qsgg")
    with pytest.raises(UsageError, match=r"no state of llama.cpp"):
        read_ids(tmp_path / "a.bin")
