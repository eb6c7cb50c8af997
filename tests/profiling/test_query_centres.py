"""Centres of queries: a profile's against the queries themselves, and the file that it writes."""

import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvtool
import kvtool.models.load
from kvtool.cache.features.queries import Moments
from kvtool.errors import UsageError
from kvtool.generation import decode_step, prefill
from kvtool.policies import evidence
from kvtool.policies.numbers import KVHeads
from kvtool.profiling import query_centres
from kvtool.profiling.measure import measure
from kvtool.profiling.query_centres import QueryCentres, concentration
from kvtool.profiling.request import Plan
from kvtool.profiling.summary import summarise
from tests.cache.test_moments import OWN
from tests.models_for_tests import FAMILIES, family_model, peaky_model, random_ids
from tests.profiling.watching import watch

PLAN = Plan(("query_centres",), 0)
COMMAND = "profile --metrics query_centres --samples 2 --tokens 128 -o profile.yaml -q"


def written(model, path, samples=2, tokens=60):
    """The file of a profile of a small model."""
    from kvtool.cache.tensor_files.heads import heads_metadata
    from kvtool.cache.tensor_files.tensor_file import write_tensors

    found = measure(model, [random_ids(tokens, seed=seed) for seed in range(samples)], PLAN)
    write_tensors(path, found, heads_metadata(found))
    return found


@pytest.mark.parametrize("family", ["llama", "yarn", "glm4", "gpt2"])
def test_they_are_the_moments_of_the_texts(family, monkeypatch):
    """Which a cache of all queries has, whatever the family's rotation."""
    monkeypatch.setattr("tests.models_for_tests.FAMILIES", FAMILIES | OWN)
    monkeypatch.setattr(query_centres, "_ROWS", 23)
    model, texts = kvtool.attach(family_model(family)), [random_ids(60, seed=s) for s in (0, 1)]
    found = measure(model, texts, PLAN)
    states = []
    for ids in texts:
        cache = kvtool.build_cache(model, "triattention", 80)
        prefill(model, cache, ids)
        states.append([Moments.of(layer).state for layer in cache.slot_layers])
    for layer, own in enumerate(zip(*states, strict=True)):
        for name, ours in (("query_centres", "mean"), ("query_lengths", "lengths")):
            mean = sum(state[ours][0] for state in own) / 2
            close = {"atol": 1e-4, "rtol": 1e-4}
            torch.testing.assert_close(found[name][layer].float(), mean, **close)


def test_the_number_of_a_layer_is_how_far_its_queries_agree():
    model = kvtool.attach(peaky_model("llama"))
    found = measure(model, [random_ids(60)], PLAN)
    shares = concentration(found)
    pairs = torch.complex(*found["query_centres"].chunk(2, -1)).abs()
    torch.testing.assert_close(
        shares, pairs.sum(-1) / found["query_lengths"].sum(-1), atol=1e-5, rtol=1e-5
    )
    assert (shares > 0).all()
    assert (shares < 1).all()
    metrics, _ = summarise(found, PLAN)
    assert metrics.query_centres == pytest.approx(shares.mean(1).tolist(), rel=1e-5)


def test_one_query_is_its_own_centre():
    model = kvtool.attach(peaky_model("llama"))
    shares = concentration(measure(model, [random_ids(1)], PLAN))
    torch.testing.assert_close(shares, torch.ones_like(shares), atol=1e-5, rtol=1e-5)


def test_layers_that_slide_have_none():
    types = ["sliding_attention", "full_attention"]
    model = kvtool.attach(peaky_model("gemma3_text", sliding_window=8, layer_types=types))
    study = QueryCentres({0: None, 1: None})
    watch(model, random_ids(30), 2, study)
    assert list(study.results()["query_centres"]) == [1]
    found = measure(model, [random_ids(30)], PLAN)
    assert concentration(found).isnan().all(1).tolist() == [True, False]


def test_a_model_whose_queries_cannot_be_rotated_back_is_refused(monkeypatch):
    monkeypatch.setattr("tests.models_for_tests.FAMILIES", FAMILIES | OWN)
    told = "--metrics query_centres is not available for `llama`: it turns its keys by the length"
    with pytest.raises(kvtool.KvtoolError, match=told):
        measure(kvtool.attach(family_model("dynamic")), [random_ids(30)], PLAN)


# ---- the file


def test_the_file_serves_triattention(tmp_path, monkeypatch):
    from kvtool.cli.main import main

    monkeypatch.chdir(tmp_path)
    assert main(COMMAND.split()) == 0
    heads = load_file("profile.heads.safetensors")
    model = kvtool.attach(kvtool.models.load.load("reference").model)
    policy = "triattention(stats=profile.heads.safetensors)"
    cache = kvtool.build_cache(model, policy, 128)
    logits = prefill(model, cache, random_ids(90))
    assert decode_step(model, cache, logits.argmax(-1)).isfinite().all()
    for layer in cache.slot_layers:
        state = Moments.of(layer).state
        assert torch.equal(state["mean"][0], heads["query_centres"][layer.index].float())
        assert torch.equal(state["lengths"][0], heads["query_lengths"][layer.index].float())


def test_the_prompts_own_centres_as_a_file_decide_as_the_prompt_does(tmp_path):
    model, ids = kvtool.attach(peaky_model("llama")), random_ids(60)
    written(model, tmp_path / "a.safetensors", samples=1)
    settings = f"every=6,prompt=false,stats={tmp_path / 'a.safetensors'}"
    own = kvtool.build_cache(model, "triattention(every=6,prompt=false)", 20)
    other = kvtool.build_cache(model, f"triattention({settings})", 20)
    for cache in (own, other):
        prefill(model, cache, ids)
    for token in random_ids(20, seed=2)[0]:
        logits = [decode_step(model, cache, token[None]) for cache in (own, other)]
        torch.testing.assert_close(*logits)
    assert torch.equal(own.kept_positions(1), other.kept_positions(1))


def test_rows_files_and_beams_follow_the_files_centres(tmp_path):
    """The centres are those of the file whatever the batch is."""
    model, path = kvtool.attach(peaky_model("llama")), tmp_path / "a.safetensors"
    found = written(model, path)
    policy = f"triattention(every=6,prompt=false,stats={path})"
    ids, mask = random_ids(50, batch=2), torch.ones(2, 50, dtype=torch.long)
    mask[1, :20] = 0
    both = kvtool.build_cache(model, policy, 20)
    alone = kvtool.build_cache(model, policy, 20)
    prefill(model, both, ids, mask), prefill(model, alone, ids[1:, 20:])
    new = random_ids(8, seed=2, batch=2)
    for token in new.T:
        ours, single = decode_step(model, both, token), decode_step(model, alone, token[1:])
        torch.testing.assert_close(ours[1:], single, atol=1e-4, rtol=1e-4)
    kvtool.save_cache(both, tmp_path / "b.safetensors", model=model)
    loaded = kvtool.load_cache(tmp_path / "b.safetensors", model)
    loaded.reorder_cache(torch.tensor([1, 1, 0]))
    state = Moments.of(loaded.slot_layers[1]).state
    assert torch.equal(state["mean"], found["query_centres"][1].float().expand(3, -1, -1))
    assert state["count"].sum() == 0
    prefill(model, loaded, random_ids(9, batch=3))
    cut = decode_step(model, loaded, torch.tensor([3, 4, 5]))
    assert cut.isfinite().all()
    both.reset()
    prefill(model, both, ids[:1])
    assert len(Moments.of(both.slot_layers[0]).state["mean"]) == 1


def test_a_process_takes_the_centres_of_its_own_heads():
    class SecondHalf(KVHeads):
        def own(self, numbers):
            return numbers.chunk(2, 1)[1]

    model = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(model, "triattention(prompt=false)", 20)
    prefill(model, cache, random_ids(30))
    layer, source = cache.slot_layers[0], torch.Generator().manual_seed(0)
    layer.slots.heads = SecondHalf()
    centres = evidence.QueryCentres(
        torch.randn(8, 16, generator=source), torch.randn(8, 8, generator=source)
    )
    part = Moments(layer.policy.moments, None, centres=centres)
    call = SimpleNamespace(query=torch.zeros(3, 4, 5, 16), scale=1.0)
    part._take(centres, layer, call.query)
    assert torch.equal(part.state["mean"], centres.mean[4:].expand(3, -1, -1))
    assert torch.equal(part.state["lengths"], centres.lengths[4:].expand(3, -1, -1))


def test_a_file_of_another_model_is_refused(tmp_path):
    path, turned = tmp_path / "a.safetensors", {"rope_type": "default", "rope_theta": 500.0}
    written(kvtool.attach(peaky_model("llama")), path, samples=1, tokens=20)
    for change, told in [
        ({"num_hidden_layers": 3}, "2 layers, not 3"),
        ({"num_attention_heads": 4}, "layer 0 has 8 query heads of 16 numbers, not 4 of 16"),
        ({"head_dim": 32}, "layer 0 has 8 query heads of 16 numbers, not 8 of 32"),
        ({"rope_parameters": turned}, "layer 0 rotates in another way"),
    ]:
        model = peaky_model("llama", **change)
        with pytest.raises(UsageError, match="holds query centres of another model: ") as caught:
            kvtool.build_cache(model, f"triattention(stats={path})", 40)
        assert told in str(caught.value)
        assert "--metrics query_centres" in caught.value.hint


def test_a_file_that_lacks_them_or_was_changed_is_refused(tmp_path):
    model, path = kvtool.attach(peaky_model("llama")), tmp_path / "a.safetensors"
    policy = f"triattention(stats={path})"
    with pytest.raises(UsageError, match="triattention: no file of query centres at"):
        kvtool.build_cache(model, policy, 40)
    save_file({"key_basis": torch.zeros(2, 2)}, path)
    with pytest.raises(UsageError, match="holds no `query_centres`") as caught:
        kvtool.build_cache(model, policy, 40)
    assert "kvtool profile --metrics query_centres" in caught.value.hint
    found = written(model, path, samples=1, tokens=20)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    told = re.escape(f"`{path}` was changed after it was written")
    with pytest.raises(UsageError, match=told):
        kvtool.build_cache(model, policy, 40)
    found["query_centres"][1] = float("nan")
    save_file({name: number.contiguous() for name, number in found.items()}, path)
    with pytest.raises(UsageError, match="of another model: none for layer 1"):
        kvtool.build_cache(model, policy, 40)
    found["query_centres"] = found["query_centres"][0]
    save_file({name: number.contiguous() for name, number in found.items()}, path)
    with pytest.raises(UsageError, match="its tensors have other axes"):
        kvtool.build_cache(model, policy, 40)


def test_changed_key_bases_are_refused_as_well(tmp_path, monkeypatch):
    from kvtool.cache.tensor_files.heads import heads_metadata
    from kvtool.cache.tensor_files.tensor_file import write_tensors

    path, bases = tmp_path / "a.safetensors", {"key_basis": torch.eye(16).expand(2, 2, 16, 16)}
    bases = {name: tensor.contiguous() for name, tensor in bases.items()}
    write_tensors(path, bases, heads_metadata(bases))
    model = kvtool.attach(peaky_model("llama"))
    kvtool.build_cache(model, f"loki(d=4,basis={path})", 20)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(UsageError, match="its checksum does not match"):
        kvtool.build_cache(model, f"loki(d=4,basis={path})", 20)
