"""Moments of queries before RoPE: a model's own, in every family, batch, block and kernel."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

import kvtool
from kvtool.cache.features import queries
from kvtool.cache.features.queries import Moments
from kvtool.cache.steps import attend_block
from kvtool.generation import decode_step, prefill
from kvtool.maths.statistics import from_correlations
from tests import models_for_tests
from tests.cache.test_cache_positions import MORE
from tests.cache.test_kernels import fake_flash
from tests.cache.test_oracle import follow
from tests.models_for_tests import (
    FAMILIES,
    anchored_model,
    family_model,
    peaky_model,
    prompt,
    random_ids,
)
from tests.reference.expected import AskingOracle, Expected, turn_of
from tests.reference.policies import Caote, Chunked

pytestmark = pytest.mark.few(2)  # every policy goes through tests/contract

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}
FREE = ["full_attention"] * 4
SLIDING = {name: FAMILIES[name] for name in ("gemma3", "gpt_oss")}
OWN = MORE | {
    "yarn": ("llama", {"rope_parameters": YARN}),
    "granite": ("granite", {"attention_multiplier": 0.4}),
    "opt": ("opt", {"word_embed_proj_dim": 64, "ffn_dim": 96}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4}),
    "dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    **{name: (kind, changes | {"layer_types": FREE}) for name, (kind, changes) in SLIDING.items()},
}
TURNING = ["yarn", "qwen3", "granite", "gemma3", "gpt_oss", "gpt_neox", "glm4", "cohere"]


@pytest.fixture
def own_families(monkeypatch):
    monkeypatch.setattr(models_for_tests, "FAMILIES", FAMILIES | OWN)


@pytest.fixture
def model(family):
    yield kvtool.detach(anchored_model(family))
    kvtool.detach(anchored_model(family))


def expected(**options):
    inside = ",".join(f"{name}={value}" for name, value in options.items()).lower()
    return f"expected({inside})"


def states(cache):
    """What each layer has, a dictionary for those with moments."""
    return [Moments.of(layer).state for layer in cache.slot_layers if Moments.of(layer)]


def same_states(one, other, row=slice(None), codes=1, **tolerance):
    """`codes`: by how many a correlation may differ."""
    for ours, theirs in zip(states(one), states(other), strict=True):
        assert ours.keys() == theirs.keys()
        for name, number in ours.items():
            coded = {"atol": codes, "rtol": 0} if number.dtype == torch.int8 else tolerance
            torch.testing.assert_close(number[row], theirs[name], **coded)


# ---- against the model's own queries


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "mode", "options"),
    [
        ("llama", "block:20", {}),
        ("qwen3", "full", {"covariance": False, "sinks": 2, "epsilon": 0.5}),
        ("qwen3", "block:20", {"values": False}),
    ],
)
def test_kept_positions_and_logits_equal_the_oracle(model, mode, options):
    options = options | {"future": 8}
    twin = options | {"turn": turn_of(model)}
    texts = 20, mode, prompt(45)
    follow(model, lambda: Expected(20, **twin), expected(**options), *texts, 2, kind=AskingOracle)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llama"])
def test_with_modifiers_they_equal_the_oracle(model):
    options = {"future": 8, "values": False}
    twin = options | {"turn": turn_of(model)}
    for modifier, wrap in (
        ("caote", Caote),
        ("fastcaote", lambda base: Caote(base, fast=True)),
        ("chunk", lambda base: Chunked(base, 20)),
    ):
        follow(
            kvtool.detach(model),
            lambda wrap=wrap: wrap(Expected(24, **twin)),
            f"{expected(**options)}+{modifier}",
            24,
            "block:20",
            prompt(45),
            new=2,
            kind=AskingOracle,
        )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "scale"), [("granite", 0.4), ("yarn", None), ("cohere", None), ("glm4", None)]
)
def test_other_rotations_and_scales_equal_the_oracle(own_families, family, scale):
    """A factor beside the turn, a scale of the layer's own, pairs side by side, half a head."""
    model = family_model(family)
    twin = {"future": 8, "turn": turn_of(model), "scale": scale}
    follow(
        model,
        lambda: Expected(20, **twin),
        "expected(future=8)",
        20,
        "full",
        prompt(40),
        new=2,
        kind=AskingOracle,
    )


@pytest.mark.few(10)
@pytest.mark.parametrize("family", [*TURNING, "opt", "gpt2"])
def test_they_are_those_of_the_first_layers_queries_before_any_turn(own_families, family):
    """The first layer reads the embeddings alone: at position 0 its queries are not turned yet."""
    model, ids, seen = kvtool.attach(family_model(family)), random_ids(40), []
    place = torch.arange(40)[None] if family in ("opt", "gpt2") else torch.zeros(1, 40).long()
    full = kvtool.build_cache(model, "full")
    full.watch_steps(lambda step, call, out: seen.append(call.query[0].float()))
    with torch.no_grad():
        model(ids, position_ids=place, past_key_values=full)
    cache = kvtool.build_cache(model, "expected", 20)
    prefill(model, cache, ids)
    first = Moments.of(cache.slot_layers[0])
    shown, wanted = first.summary(), seen[0][:, 4:]
    assert (first.rotation is None) == (family in ("opt", "gpt2"))
    assert first.state["count"].tolist() == [[36.0] * len(wanted)]
    torch.testing.assert_close(shown.mean[0], wanted.mean(1), atol=1e-4, rtol=1e-4)
    variance = torch.stack([head.T.cov(correction=0) for head in wanted])
    widths = variance.diagonal(dim1=1, dim2=2).sqrt()
    half_a_code = widths[:, :, None] * widths[:, None] * (0.51 / 127)
    assert ((shown.covariance[0] - variance).abs() <= half_a_code + 1e-4).all()
    diagonals = [found.diagonal(dim1=1, dim2=2) for found in (shown.covariance[0], variance)]
    torch.testing.assert_close(*diagonals, atol=1e-4, rtol=1e-4)


def test_a_head_that_the_rotation_cannot_split_is_refused():
    model = peaky_model("llama")
    model.model.rotary_emb.inv_freq = torch.ones(9)
    with pytest.raises(kvtool.KvtoolError, match="turns 18 numbers, and its heads of 16 do not"):
        kvtool.build_cache(model, "expected", 20)


# ---- blocks, batches, kernels


def test_blocks_and_turns_equal_one_pass():
    model, ids = kvtool.attach(peaky_model("llama")), random_ids(61)
    whole, blocks, chunks, turns = (
        kvtool.build_cache(model, "expected", 80, prefill=mode)
        for mode in ("full", "block:16", "full", "full")
    )
    prefill(model, whole, ids), prefill(model, blocks, ids)
    prefill(model, turns, ids[:, :40]), prefill(model, turns, ids[:, 40:])
    same_states(turns, whole, codes=2, atol=1e-4, rtol=1e-4)
    same_states(blocks, whole, atol=1e-4, rtol=1e-4)
    model.generate(ids, past_key_values=chunks, max_new_tokens=5, prefill_chunk_size=7)
    # what is generated does not count; each chunk is a turn of its own, which is rounded
    same_states(chunks, whole, codes=5, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "fed", [prefill, lambda model, cache, ids: model(ids, past_key_values=cache)]
)
def test_a_prompt_in_blocks_is_rounded_once(monkeypatch, fed):
    model, ids, rounded = kvtool.attach(peaky_model("llama")), random_ids(61), []
    own = queries.to_correlations
    monkeypatch.setattr(queries, "to_correlations", lambda t: rounded.append(1) or own(t))
    cache = kvtool.build_cache(model, "expected", 20, prefill="block:16")
    with torch.no_grad():
        fed(model, cache, ids)
    assert len(rounded) == len(states(cache)) == 2


def test_a_later_turn_equals_the_twin_that_rounds_too():
    model, ids = kvtool.attach(peaky_model("llama")), random_ids(70)
    cache = kvtool.build_cache(model, "expected(future=8)", 200)
    oracle = AskingOracle(model, lambda: Expected(200, future=8, turn=turn_of(model)))
    found, held = [], []
    for turn in (slice(0, 40), slice(40, 60), slice(60, 70)):
        prefill(model, cache, ids[:, turn])
        oracle.feed(ids[0, turn].tolist())
        for policy in oracle.policies.values():
            policy.end_prompt()
        found.append([Moments.of(layer).summary() for layer in cache.slot_layers])
        held.append([list(policy.earlier.values()) for policy in oracle.policies.values()])
    kvtool.attach(model)
    for ours, theirs in zip(found, held, strict=True):
        for summary, heads in zip(ours, theirs, strict=True):
            count, mean, scatter = map(torch.tensor, zip(*heads, strict=True))
            torch.testing.assert_close(summary.mean[0], mean, atol=1e-4, rtol=1e-4)
            covariance = scatter / count[:, None, None]
            widths = covariance.diagonal(dim1=1, dim2=2).sqrt()
            step = widths[:, :, None] * widths[:, None] / 127
            apart = (summary.covariance[0] - covariance).abs() / step
            assert (apart > 0.02).float().mean() < 0.001  # where arithmetic decides the step
            assert apart.max() < 1.1


def test_scores_of_a_later_turn_see_what_was_held():
    """The first turn is cut by its exact covariance, the second by the rounded one and its own."""
    model, ids = kvtool.attach(peaky_model("llama")), random_ids(60)
    seen, cache = [], kvtool.build_cache(model, "expected", 200)
    moments = Moments.of(cache.slot_layers[0])
    shown = moments._shown
    moments._shown = lambda block: seen.append(shown(block)) or seen[-1]
    prefill(model, cache, ids[:, :40])
    exact, held = seen[0].view.moments[0], moments.summary()
    assert not torch.equal(exact.covariance, held.covariance)
    torch.testing.assert_close(exact.covariance, held.covariance, atol=0.05, rtol=0.05)
    prefill(model, cache, ids[:, 40:])
    last = seen[1].view.moments[0]
    assert not torch.equal(last.covariance, moments.summary().covariance)


def test_a_file_of_an_older_kvtool_is_read_and_held_as_a_new_one(tmp_path):
    from tests.cache.test_sealed_files import reseal

    model, path = kvtool.attach(peaky_model("llama")), tmp_path / "a.safetensors"
    cache = kvtool.build_cache(model, "expected", 20)
    prefill(model, cache, random_ids(50))
    kvtool.save_cache(cache, path)
    wrong = []

    def as_before(metadata, tensors):
        for index in range(2):
            names = [f"layer.{index}.moments.{name}" for name in ("squares", "correlations")]
            scatter = from_correlations(*map(tensors.pop, names))
            tensors[f"layer.{index}.moments.scatter"] = -scatter if wrong else scatter

    reseal(path, as_before)
    loaded = kvtool.load_cache(path, model)
    same_states(loaded, cache, codes=0, atol=0, rtol=0)
    assert loaded.report().state_bytes == cache.report().state_bytes
    kvtool.save_cache(cache, path)
    wrong.append(True)
    reseal(path, as_before)
    with pytest.raises(kvtool.KvtoolError, match="scatter` holds a variance below 0"):
        kvtool.load_cache(path, model)


def test_a_long_block_is_turned_in_parts(monkeypatch):
    model, ids = kvtool.attach(peaky_model("llama")), random_ids(61)
    whole, parts = (kvtool.build_cache(model, "expected", 20) for _ in range(2))
    prefill(model, whole, ids)
    monkeypatch.setattr(queries, "_ROWS", 9)
    prefill(model, parts, ids)
    same_states(parts, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["block:16", "full"])
def test_padding_is_no_part_of_a_rows_moments(mode):
    model, rows = kvtool.attach(peaky_model("llama")), [random_ids(n, seed=n) for n in (50, 23, 3)]
    ids = torch.zeros(3, 50, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, 50 - row.shape[1] :] = row[0]
    both = kvtool.build_cache(model, "expected", 80, prefill=mode)
    prefill(model, both, ids, (ids > 0).long())
    for i, row in enumerate(rows):
        alone = kvtool.build_cache(model, "expected", 80, prefill=mode)
        prefill(model, alone, row)
        same_states(both, alone, slice(i, i + 1), atol=1e-4, rtol=1e-4)
    assert [each["count"][:, 0].tolist() for each in states(both)] == [[46.0, 19.0, 0.0]] * 2


def test_every_kernel_feeds_them(monkeypatch):
    ran = []
    module = ModuleType("flash_attn")
    module.flash_attn_func = lambda *args, **kw: ran.append("flash") or fake_flash(*args, **kw)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    model, ids, found = kvtool.attach(peaky_model("llama")), random_ids(50), {}

    def run(kernel, policy="expected"):
        cache = kvtool.build_cache(model, policy, 20, prefill="block:16")
        cache.settings = replace(cache.settings, kernel=kernel)
        logits = [prefill(model, cache, ids), decode_step(model, cache, torch.tensor([5]))]
        found[len(found)] = cache, torch.stack(logits)

    for kernel in ("sdpa", "eager", "flash_attention_2"):
        run(kernel)

    def triton(layer, call, block, observed):
        ran.append("triton")
        return attend_block.explicit_block(layer, call, block, observed)

    monkeypatch.setattr(attend_block, "can_run", lambda *_: True)
    monkeypatch.setattr(attend_block, "count_block", triton)
    run("sdpa")
    assert {"flash", "triton"} == set(ran)
    for cache, logits in found.values():
        same_states(cache, found[0][0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(logits, found[0][1], atol=1e-4, rtol=1e-4)


# ---- bytes and files


def test_they_are_counted_among_the_state():
    model, ids = kvtool.attach(peaky_model("llama")), random_ids(50)
    sizes = {}
    for policy in ("snapkv(window=4)", "expected(covariance=false)", "expected"):
        cache = kvtool.build_cache(model, policy, 20)
        prefill(model, cache, ids)
        sizes[policy] = cache.report().state_bytes
    none, mean, whole = sizes.values()
    assert mean - none == 2 * 8 * (1 + 16) * 4  # layers, heads, numbers, bytes
    assert whole - none == 2 * 8 * ((1 + 16 + 16) * 4 + 16 * 15 // 2)  # correlations: a byte


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("count", lambda t: t - 99, "`layer.1.moments.count` holds numbers out of their range"),
        ("count", lambda t: t + 0.5, "`layer.1.moments.count` holds parts of a query"),
        ("mean", lambda t: t[:, :4], "`layer.1.moments.mean` is float32"),
        ("mean", lambda t: t / 0, "`layer.1.moments.mean` holds numbers that are not finite"),
        ("squares", lambda t: -t, "`layer.1.moments.squares` holds numbers out of their range"),
        ("squares", None, "`layer.1.moments.squares` is missing"),
        ("correlations", lambda t: t.float(), "`layer.1.moments.correlations` is float32"),
        ("correlations", lambda t: t * 0 - 128, "`layer.1.moments.correlations` holds numbers out"),
    ],
)
def test_what_does_not_fit_in_a_file_is_refused(tmp_path, name, change, told):
    from tests.cache.test_sealed_files import reseal

    model, path = kvtool.attach(peaky_model("llama")), tmp_path / "a.safetensors"
    cache = kvtool.build_cache(model, "expected", 20)
    prefill(model, cache, random_ids(50))
    kvtool.save_cache(cache, path)
    same_states(kvtool.load_cache(path, model), cache, atol=0, rtol=0)

    def alter(metadata, tensors):
        tensor = tensors.pop(f"layer.1.moments.{name}")
        if change is not None:
            tensors[f"layer.1.moments.{name}"] = change(tensor)

    reseal(path, alter)
    with pytest.raises(kvtool.KvtoolError, match=told):
        kvtool.load_cache(path, model)
