"""Prompt caches of mlx-lm: read as its own loaders read them, and continued by transformers."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import kvtool as kv
from kvtool.errors import UsageError
from kvtool.watcher import Watcher
from tests.engines.vllm.test_export import compressed, continued
from tests.models_for_tests import family_model, peaky_model, random_ids


class Notes(Watcher):
    def __init__(self) -> None:
        self.notes = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def unflatten(items):
    """Lists and dictionaries from names with dots, as `mlx.utils.tree_unflatten` makes them."""
    if [*items] == [""]:
        return items[""]
    heads = {}
    for name, value in items.items():
        head, _, rest = name.partition(".")
        heads.setdefault(head, {})[rest] = value
    if all(head.isdigit() for head in heads):
        return [unflatten(heads[str(i)]) for i in range(len(heads))]
    return {head: unflatten(rest) for head, rest in heads.items()}


def read(path):
    """Metadata in its three parts, and the tensors of each layer."""
    with safe_open(path, framework="pt") as file:
        about = unflatten(file.metadata())
    return about, unflatten(load_file(path))


def test_the_newest_form_is_that_of_mlx_lm_since_0_32(tmp_path):
    model, path = peaky_model("llama"), tmp_path / "book.safetensors"
    document = kv.export(compressed(model, "snapkv(window=8)"), path, to="mlx")
    (metadata, classes, scalars), layers = read(path)
    assert metadata.keys() == {"model", "tokenizer_config"}
    assert (metadata["tokenizer_config"], classes) == ("{}", ["KVCache"] * 2)
    assert scalars == ["", ["0.2", "scalar"], ["1.2", "scalar"]]
    for keys, values, offset in layers:
        assert keys.shape == values.shape == (1, 2, 32, 16)
        assert (offset.item(), offset.shape, offset.dtype) == (32, (), torch.int32)
    assert (document.virtual_ids, document.slots) == ([], 32)


def test_older_releases_have_the_form_before(tmp_path):
    model, path = peaky_model("qwen3"), tmp_path / "book.safetensors"
    kv.export(compressed(model, "h2o"), path, to="mlx", engine_version="0.31.3", dtype="float16")
    (info, metadata, classes), layers = read(path)
    assert (info, classes) == (["", ""], ["KVCache"] * 2)
    assert metadata.keys() == {"model", "tokenizer_config"}
    assert [[each.dtype for each in layer] for layer in layers] == [[torch.float16] * 2] * 2


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_transformers_continues_the_prompt_cache(family, tmp_path):
    """mlx-lm turns keys in halves, as transformers does."""
    model, path = peaky_model(family), tmp_path / "book.safetensors"
    cache = compressed(model, "keydiff")
    kv.export(cache, path, to="mlx")
    question = random_ids(12, seed=5)[:, 1:]
    with cache.budgets.raising(), torch.no_grad():
        ours = model(question, past_key_values=cache).logits
    kv.detach(model)
    tensors = {"virtual_ids": torch.zeros(32)}
    for i, (keys, values, _) in enumerate(read(path)[1]):
        tensors |= {f"layer.{i}.keys": keys[0], f"layer.{i}.values": values[0]}
    assert (ours - continued(model, tensors, question)).abs().max() < 1e-4


def test_what_mlx_lm_does_not_take_is_refused(tmp_path):
    model, path = peaky_model("llama"), tmp_path / "a.safetensors"
    cache = compressed(model, "h2o")
    with pytest.raises(UsageError, match="`newest` is no release of mlx-lm"):
        kv.export(cache, path, to="mlx", engine_version="newest")
    with pytest.raises(UsageError, match="--type is not for --to mlx"):
        kv.export(cache, path, to="mlx", type="f16")
    gemma = family_model("gemma3")
    windows = compressed(gemma, "h2o", budget=48)
    with pytest.raises(UsageError, match="sliding window"):
        kv.export(windows, path, to="mlx")
    assert list(tmp_path.iterdir()) == []


def test_a_rope_base_that_mlx_lm_may_not_find_is_told(tmp_path):
    for base, told in ((10000.0, 0), (100000.0, 1)):
        rope = {"rope_type": "default", "rope_theta": base}
        model, watcher = peaky_model("llama", rope_parameters=rope), Notes()
        cache = compressed(model, "snapkv(window=8)")
        kv.export(cache, tmp_path / "a.safetensors", to="mlx", watcher=watcher)
        assert len(watcher.notes) == told
        assert all("the RoPE base is 100000" in each for each in watcher.notes)


def test_mlx_lm_loads_what_was_written(tmp_path):
    caches = pytest.importorskip("mlx_lm.models.cache", reason="loads with mlx-lm")
    model, path = peaky_model("llama"), tmp_path / "book.safetensors"
    release = ".".join(__import__("mlx_lm").__version__.split(".")[:2])
    kv.export(compressed(model, "snapkv(window=8)"), path, to="mlx", engine_version=release)
    layers, metadata = caches.load_prompt_cache(str(path), return_metadata=True)
    assert [each.offset for each in layers] == [32, 32]
    assert metadata["tokenizer_config"] == "{}"
