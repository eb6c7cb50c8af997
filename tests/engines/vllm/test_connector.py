"""The connector over a stub of vLLM: what it claims, loads and refuses."""

from __future__ import annotations

import ast
import functools
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import kvtool
from kvtool.engines.vllm.folder import Folder
from kvtool.engines.vllm.format import facts_of, read_exported
from kvtool.generation import prefill
from tests.engines.vllm import stub
from tests.engines.vllm.stub import Engine, Layer, Request
from tests.models_for_tests import family_model, random_ids

SLOTS = 40
QUESTION = [5, 6, 7]
LAYERS = 4


@functools.cache
def model():
    return family_model("llama")


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """A folder with two caches of the same model."""
    folder = tmp_path_factory.mktemp("exported")
    for seed, name in enumerate(("emma", "persuasion")):
        cache = kvtool.build_cache(model(), "recency", budget=SLOTS)
        prefill(model(), cache, random_ids(70, seed=seed))
        kvtool.export(cache, folder / f"{name}.safetensors")
    return folder


@pytest.fixture
def folder(exported, tmp_path):
    """A copy, to be changed."""
    for file in exported.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def layers(heads=2, **more):
    names = {f"model.layers.{i}.self_attn.attn": Layer(heads, 16, 40 * 96) for i in range(LAYERS)}
    return names | more


def engine(monkeypatch, folder, *, block=32, rank=0, size=1, heads=2, more=None, **changes):
    module = stub.load(monkeypatch, rank, size)
    settings = stub.config(model().config, folder, block, **changes)
    return Engine(module, settings, layers(heads, **(more or {})), groups=changes.get("groups", 1))


def ids_of(folder, name="emma"):
    return list(read_exported(folder / f"{name}.safetensors").ids)


def assert_loaded(running, request, folder, name="emma", heads=slice(None), start=0):
    tensors = load_file(folder / f"{name}.safetensors")
    for i, layer in enumerate(name for name in running.layers if name.startswith("model.")):
        pages = running.read(request, layer, SLOTS)
        for part, found in zip(("keys", "values"), pages, strict=True):
            wanted = tensors[f"layer.{i}.{part}"][heads].transpose(0, 1)
            assert torch.equal(found[start:], wanted[start:])
            assert not found[:start].any()


# ---- loading


@pytest.mark.parametrize("block", [8, 96])
def test_two_caches_and_a_text_in_one_step(monkeypatch, folder, block):
    running = engine(monkeypatch, folder, block=block)
    emma = Request("a", [*ids_of(folder), *QUESTION])
    other = Request("b", [*ids_of(folder, "persuasion"), *QUESTION])
    text = Request("c", list(range(60)))
    claimed, failed = running.step(emma, text, other)
    assert (claimed, failed) == ([SLOTS, 0, SLOTS], set())
    assert_loaded(running, emma, folder)
    assert_loaded(running, other, folder, "persuasion")
    assert not running.read(text, "model.layers.0.self_attn.attn", 60).any()
    assert text.cache_salt is emma.cache_salt is None


@pytest.mark.parametrize("computed", [32, 40])
def test_slots_that_the_engine_has_cached_are_not_loaded_again(monkeypatch, folder, computed):
    running = engine(monkeypatch, folder, block=8)
    request = Request("a", [*ids_of(folder), *QUESTION])
    claimed, failed = running.step(request, computed=computed)
    assert (claimed, failed) == ([SLOTS - computed], set())
    assert_loaded(running, request, folder, start=computed)


def test_a_preempted_request_loads_again(monkeypatch, folder):
    running = engine(monkeypatch, folder)
    request = Request("a", [*ids_of(folder), *QUESTION])
    running.step(request)
    for layer in running.layers.values():
        layer.kv_cache.zero_()
    running.scheduler.on_new_request = lambda request: None  # which comes once
    assert running.step(request) == ([SLOTS], set())
    assert_loaded(running, request, folder)


@pytest.mark.parametrize(("rank", "size", "heads"), [(0, 2, [0]), (1, 2, [1]), (3, 4, [1])])
def test_a_tensor_parallel_rank_loads_its_heads(monkeypatch, folder, rank, size, heads):
    running = engine(monkeypatch, folder, rank=rank, size=size, heads=1)
    request = Request("a", [*ids_of(folder), *QUESTION])
    assert running.step(request) == ([SLOTS], set())
    assert_loaded(running, request, folder, heads=heads)


def test_layers_of_a_draft_model_are_left_alone(monkeypatch, folder):
    more = {
        "draft_model.model.layers.0.self_attn.attn": Layer(2, 16, 40 * 96),
        f"mtp.layers.{LAYERS}.self_attn.attn": Layer(1, 8, 40 * 96),
        "model.layers.0.mlp.experts": object(),
    }
    running = engine(monkeypatch, folder, more=more)
    request = Request("a", [*ids_of(folder), *QUESTION])
    assert running.step(request) == ([SLOTS], set())
    assert not any(layer.kv_cache.any() for layer in list(more.values())[:2])


def test_a_cache_is_read_once_by_a_worker(monkeypatch, folder):
    running = engine(monkeypatch, folder)
    request = functools.partial(Request, ids=[*ids_of(folder), *QUESTION])
    running.step(request("a"))
    held = running.worker._held._held
    [cache] = held.values()
    running.step(request("b"))
    assert list(held.values()) == [cache]
    assert cache.nbytes == sum(
        tensor.nbytes
        for name, tensor in load_file(folder / "emma.safetensors").items()
        if name.startswith("layer.")
    )


def test_the_caches_used_last_are_held(monkeypatch, folder):
    module = stub.load(monkeypatch)
    held = module.HeldCaches(torch.float32, most=1)
    for name in ("emma", "persuasion", "persuasion"):
        file = read_exported(folder / f"{name}.safetensors")
        held.open(str(file.path), file.metadata["digest"])
        assert [*held._held] == [file.metadata["digest"]]


def test_caches_are_loaded_in_the_dtype_of_the_engine(monkeypatch, folder):
    module = stub.load(monkeypatch)
    file = read_exported(folder / "emma.safetensors")
    cache = module.HeldCaches(torch.bfloat16).open(str(file.path), file.metadata["digest"])
    assert cache.layer(0)[0].dtype == torch.bfloat16


# ---- refusing one request alone


def refusals(folder):
    emma, other = ids_of(folder), ids_of(folder, "persuasion")
    asks = [*emma, *QUESTION]
    return {
        "an unknown name": (asks, {"params": {"kvtool": "gone"}}, "asks for `gone`"),
        "another name": (asks, {"params": {"kvtool": "persuasion"}}, "those of `emma`"),
        "a name and a text": ([*range(50)], {"params": {"kvtool": "emma"}}, "no virtual ids"),
        "other ids behind": ([*emma[:20], *other[20:], 5], {}, "a part of the virtual ids"),
        "a part": (emma[:20], {}, "a part of the virtual ids"),
        "no question": (emma, {}, "no question is behind"),
        "prompt logprobs": (asks, {"prompt_logprobs": 1}, "need the text itself"),
        "an adapter": (asks, {"lora": object()}, "without the LoRA adapter"),
        "pooling": (asks, {"pooling": True}, "a pooling model"),
    }


def test_a_request_is_refused_and_its_neighbour_is_not(monkeypatch, folder):
    for case, (ids, more, told) in refusals(folder).items():
        running = engine(monkeypatch, folder)
        refused, neighbour = Request("a", ids, **more), Request("b", [*ids_of(folder), *QUESTION])
        (claimed, _), failed = running.step(refused, neighbour)
        assert 0 < claimed < len(ids), case
        assert failed == set(running.blocks["a"][:1]), case
        assert_loaded(running, neighbour, folder)
        assert any(told in line for line in running.said), case
        assert refused.cache_salt is not None, case
        assert refused.block_hashes == [(refused.cache_salt, tuple(ids))], case
        assert neighbour.cache_salt is None, case


def test_a_request_that_skips_the_prefix_cache_is_served(monkeypatch, folder):
    running = engine(monkeypatch, folder)
    request = Request("a", [*ids_of(folder), *QUESTION], repetition_penalty=1.1)
    request.skip_reading_prefix_cache = True
    assert running.step(request) == ([SLOTS], set())
    assert any("repetition_penalty counts virtual ids" in line for line in running.said)


def test_a_virtual_prompt_without_its_file_is_never_read_as_text(monkeypatch, folder):
    file, away = folder / "emma.safetensors", folder / "emma.away"
    asks = [*ids_of(folder), *QUESTION]
    file.rename(away)
    running = engine(monkeypatch, folder)
    for name in ("a", "b"):
        (claimed,), failed = running.step(Request(name, asks))
        assert claimed > 0
        assert failed == set(running.blocks[name][:1])
        assert any(f"request {name} is refused: no cache in" in line for line in running.said)
    away.rename(file)
    request = Request("c", asks)
    assert running.step(request) == ([SLOTS], set())
    assert_loaded(running, request, folder)
    file.unlink()
    assert running.step(Request("d", asks))[1] == set(running.blocks["d"][:1])


def test_a_file_that_vanishes_before_it_is_loaded_ends_the_request(monkeypatch, folder):
    running, emma = engine(monkeypatch, folder), ids_of(folder)
    find = running.scheduler._folder.find
    cache = find(emma)
    monkeypatch.setattr(
        running.scheduler._folder, "find", lambda ids: cache if ids[0] == emma[0] else find(ids)
    )
    (folder / "emma.safetensors").rename(folder / "away")
    request = Request("a", [*emma, *QUESTION])
    neighbour = Request("b", [*ids_of(folder, "persuasion"), *QUESTION])
    claimed, failed = running.step(request, neighbour)
    assert claimed == [SLOTS, SLOTS]
    assert failed == set(running.blocks["a"][:2])
    assert_loaded(running, neighbour, folder, "persuasion")


def test_a_file_that_is_replaced_is_another_cache(monkeypatch, folder):
    running = engine(monkeypatch, folder)
    old = [*ids_of(folder), *QUESTION]
    (folder / "persuasion.safetensors").replace(folder / "emma.safetensors")
    assert running.step(Request("a", old))[1] == set(running.blocks["a"][:1])
    new = Request("b", [*ids_of(folder), *QUESTION], params={"kvtool": "emma"})
    assert running.step(new) == ([SLOTS], set())
    module = stub.load(monkeypatch)
    with pytest.raises(ValueError, match="holds another cache by now"):
        module.HeldCaches(torch.float32).open(str(folder / "emma.safetensors"), "old")


def test_a_cache_of_another_model_is_refused(monkeypatch, folder):
    path = folder / "emma.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    metadata["facts"] = metadata["facts"].replace('"rope_theta": 10000.0', '"rope_theta": 500000.0')
    save_file(tensors, path, metadata)
    running = engine(monkeypatch, folder)
    request = Request("a", [*ids_of(folder), *QUESTION])
    assert running.step(request)[1] == set(running.blocks["a"][:1])
    told = "of another model: rope.rope_theta is 10000.0 in the engine and 500000.0 in the file"
    assert any(told in line for line in running.said)


def test_heads_that_do_not_fit_end_the_request(monkeypatch, folder):
    running = engine(monkeypatch, folder, heads=4)
    request = Request("a", [*ids_of(folder), *QUESTION])
    claimed, failed = running.step(request)
    assert (claimed, failed) == ([SLOTS], set(running.blocks["a"][:2]))
    assert any("has other heads than the cache" in line for line in running.said)


def test_no_layers_at_all_end_the_request(monkeypatch, folder):
    running = engine(monkeypatch, folder)
    running.layers = {}
    running.step(request := Request("a", [*ids_of(folder), *QUESTION]))
    assert any("no attention layers that kvtool knows" in line for line in running.said)
    running.scheduler.request_finished(request, [])
    assert running.scheduler._asked == {}


# ---- the folder and the engine


def test_other_files_of_a_folder_are_left_out_with_the_reason(monkeypatch, folder):
    (folder / "torn.safetensors").write_bytes((folder / "emma.safetensors").read_bytes()[:-9])
    save_file({"x": torch.ones(1)}, folder / "weights.safetensors")
    save_file(
        {"x": torch.ones(1)},
        folder / "lacks.safetensors",
        {"kind": "kvtool.virtual-prompt", "schema_version": "1"},
    )
    save_file(
        {"x": torch.ones(1)},
        folder / "newer.safetensors",
        {"kind": "kvtool.virtual-prompt", "schema_version": "9"},
    )
    (folder / "note.txt").write_text("")
    said = []
    found = Folder(folder, facts_of(model().config), said.append)
    found.scan()
    assert len(found) == 2
    assert len(said) == 4
    for told in ("not a whole file of an exported cache", "no cache that kvtool has exported"):
        assert sum(told in line for line in said) == 2
    found.scan()
    assert len(said) == 4  # each once


ENGINES = {
    "no folder": ({"folder": None}, "needs `folder`"),
    "a folder that is not there": ({"folder": "/gone"}, "needs `folder`.* got '/gone'"),
    "recomputing": ({"failure": "recompute"}, "must be `fail`"),
    "several kinds of layers": ({"groups": 2}, "--disable-hybrid-kv-cache-manager"),
    "context parallelism": ({"context": 2}, "context parallelism"),
}


@pytest.mark.parametrize("case", ENGINES)
def test_an_engine_that_cannot_load_is_refused(monkeypatch, folder, case):
    changes, told = ENGINES[case]
    where = changes.pop("folder", folder) if "folder" in changes else folder
    with pytest.raises(ValueError, match=f"kvtool: .*{told}"):
        engine(monkeypatch, where, **changes)


def test_the_connector_needs_vllm_torch_and_safetensors_only():
    package, seen, pending = Path(kvtool.__file__).parent, set(), ["engines/vllm/connector.py"]
    found = set()
    while pending:
        file = pending.pop()
        for node in ast.parse((package / file).read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                if name.startswith("kvtool."):
                    inner = f"{name.removeprefix('kvtool.').replace('.', '/')}.py"
                    pending += [inner] if inner not in seen else []
                    seen.add(inner)
                else:
                    found.add(name.split(".")[0])
    assert found - sys.stdlib_module_names == {"vllm", "torch", "safetensors"}
    assert all(name.startswith("engines/vllm/") for name in seen)


def test_links_are_followed(monkeypatch, folder, tmp_path_factory):
    shared = tmp_path_factory.mktemp("shared")
    os.symlink(folder / "emma.safetensors", shared / "novel.safetensors")
    running = engine(monkeypatch, shared)
    request = Request("a", [*ids_of(folder), *QUESTION], params={"kvtool": "novel"})
    assert running.step(request) == ([SLOTS], set())
