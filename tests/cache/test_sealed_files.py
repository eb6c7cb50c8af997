"""A cache file with a right checksum is still compared with policy and model, field by field."""

import functools
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvtool
from kvtool.cache.files.checks import FileTensors, _check_codes
from kvtool.cache.files.format import read_metadata
from kvtool.cache.tensor_files.tensor_file import digest_of
from kvtool.generation import compress
from kvtool.policies.codec.int4 import Int4
from tests.models_for_tests import peaky_model, random_ids


@pytest.fixture(scope="module")
def model():
    return kvtool.attach(peaky_model("llama"))


@pytest.fixture(scope="module")
def contents(model, tmp_path_factory):
    """The bytes of a cache's file; each kind of cache is made once."""

    @functools.cache
    def read(policy, budget):
        cache = kvtool.build_cache(model, policy, budget)
        compress(model, cache, random_ids(50))
        path = tmp_path_factory.mktemp("saved") / "a.safetensors"
        kvtool.save_cache(cache, path, model=model)
        return path.read_bytes()

    return read


@pytest.fixture
def saved(contents, tmp_path):
    def save(policy, budget=20):
        path = tmp_path / "a.safetensors"
        path.write_bytes(contents(policy, budget))
        return path

    return save


def reseal(path, change):
    """Alter metadata and tensors, and make the checksum that of what is then there."""
    metadata, tensors = read_metadata(path), load_file(path)
    metadata.pop("sha256")
    change(metadata, tensors)
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(tensors, path, metadata | {"sha256": digest_of(tensors, metadata)})


def put(name, value):
    return lambda metadata, tensors: tensors.update({name: value(tensors[name])})


def nan_at(tensor):
    tensor = tensor.clone()
    tensor.view(-1)[3] = float("nan")
    return tensor


CASES = {
    "no keys": (lambda m, t: t.pop("layer.0.keys"), "`layer.0.keys` are missing"),
    "no values": (lambda m, t: t.pop("layer.1.values"), "`layer.1.values` is missing"),
    "no budget": (lambda m, t: t.pop("layer.0.budget"), "`layer.0.budget` is missing"),
    "no statistic": (lambda m, t: t.pop("layer.1.state.attention_sum"), "sum` is missing"),
    "a stranger": (lambda m, t: t.update(x=torch.zeros(1)), "`x` belongs to no cache"),
    "NaN keys": (put("layer.0.keys", nan_at), "`layer.0.keys` holds numbers that are not finite"),
    "NaN logits": (put("next_logits", nan_at), "`next_logits` holds numbers that are not finite"),
    "heads": (put("layer.1.keys", lambda t: t[:, :1]), r"\[1, 1, 20, 16\], not float32 \[1, 2,"),
    "dtype": (put("layer.1.values", torch.Tensor.half), "is float16"),
    "rank": (put("layer.0.positions", lambda t: t[0]), "`layer.0.positions` is int64"),
    "a later token": (put("layer.0.positions", lambda t: t + 1), "out of their range"),
    "order": (put("layer.0.positions", lambda t: t.flip(-1)), "not in ascending order"),
    "an empty slot": (
        put("layer.0.positions", lambda t: torch.cat([t[..., :-1], t[..., :1] * 0 - 1], -1)),
        "empty slots where no row or head is shorter",
    ),
    "another budget": (put("layer.0.budget", lambda t: t + 9), "is not the cache's budget 20"),
    "a negative sum": (put("layer.0.state.attention_sum", lambda t: t - 99), "out of their range"),
    "unknown tokens": (put("input_ids", lambda t: t + 96), "`input_ids` holds numbers out of"),
    "seen": (lambda m, t: m.update(tokens_seen="49"), "rows have seen 50 tokens"),
    "no number": (lambda m, t: m.update(seen="many"), "`seen` is no number of tokens"),
    "no policy": (lambda m, t: m.pop("policy"), "`policy` is missing"),
    "a policy": (lambda m, t: m.update(policy="h3o"), "no policy named `h3o`"),
    "other statistics": (lambda m, t: m.update(policy="tova"), "attention_sum` belongs to no"),
    "everything kept": (lambda m, t: m.update(policy="full", budget=""), "out of|lacks|belongs"),
    "a plan": (lambda m, t: m.update(plan="[1]"), "must be a mapping"),
    "a deep plan": (lambda m, t: m.update(plan="[" * 9000), "levels deep"),
    "a prefill": (lambda m, t: m.update(prefill="block:x"), "is not a number of tokens"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_no_cache_has_written_is_refused(case, model, saved):
    change, told = CASES[case]
    path = saved("h2o")
    reseal(path, change)
    with pytest.raises(kvtool.KvtoolError, match=told) as caught:
        kvtool.load_cache(path, model)
    assert "not a sound cache file" in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "name", "change", "told"),
    [
        ("d2o", "spread.held", lambda t: t + 99, "out of their range"),
        ("d2o", "layer.0.memory.tau", lambda t: t * 0 + torch.inf, "not finite"),
        ("h2o+ada", "layer.0.head_budgets", lambda t: t * 0, "more tokens than its budget"),
        ("quest", "read.ends", lambda t: t + 1, "out of their range"),
        ("quest", "layer.1.positions", lambda t: t.flip(-1), "ascending"),
        ("full", "layer.1.positions", lambda t: t[..., :-1], "not float32|not int64|is"),
        ("streaming(positions=cache)", "layer.0.state.turn", lambda t: t + 0.5, "parts of a pos"),
        ("h2o+calidrop", "layer.0.calibration.memory.out", nan_at, "not finite"),
        ("h2o+calidrop", "layer.0.calibration.store.shelf.0", lambda t: t[:, :, :1], "shelf"),
        ("duoattention", "head_ranks", lambda t: t * 0, "not the places of all heads"),
        ("h2o+int8", "layer.0.key_exponent", lambda t: t * 0 - 16, "out of their range"),
        ("h2o+int8", "layer.0.value_scales", lambda t: -t, "out of their range"),
        ("sirllm(sinks=2)", "state.surprisal", lambda t: t[:, :-1], "`state.surprisal` is"),
    ],
)
def test_parts_of_policies_are_checked_too(policy, name, change, told, model, saved):
    path = saved(policy, None if policy == "full" else 20)
    kvtool.load_cache(path, model)
    reseal(path, put(name, change))
    with pytest.raises(kvtool.KvtoolError, match=told):
        kvtool.load_cache(path, model)


def test_all_scales_of_a_key_have_one_sign(tmp_path):
    """Kernels and plain torch would read different ones."""
    codes, scales = Int4().encode(torch.randn(1, 2, 3, 64))
    signs = torch.tensor([1.0, -1.0, 1.0]).view(1, 1, 3, 1)
    for wrong in (False, True):
        scales = (scales.abs() * signs).half()
        scales[0, 0, 0, 1] *= 1 - 2 * wrong
        tensors = {"layer.0.keys": codes, "layer.0.key_scales": scales}
        file = FileTensors(tmp_path / "a.safetensors", tensors, 3, 1)
        with pytest.raises(kvtool.KvtoolError, match="signs") if wrong else nullcontext():
            _check_codes(file, Int4(), "layer.0.key", (1, 2, 3), 64, signs=True)


def test_a_policy_that_only_selects_lacks_no_token(model, saved):
    """What it has chosen to read are slots of theirs: the file's own kept count must reach them."""
    path = saved("rocketkv-mt(window=4)", 24)

    def cut(metadata, tensors):
        for name in ("keys", "values", "positions"):
            tensors[f"layer.0.{name}"] = tensors[f"layer.0.{name}"][:, :, :30]

    reseal(path, cut)
    with pytest.raises(kvtool.KvtoolError, match="lacks tokens, and its policy keeps all"):
        kvtool.load_cache(path, model)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: torch.where(torch.arange(t.shape[1])[:, None] > 0, t[..., :1], t), "ascending"),
        (
            lambda t: t.index_fill(2, torch.tensor([t.shape[2] - 1]), -1).index_put(
                (torch.tensor(0), torch.tensor(0), torch.tensor(t.shape[2] - 1)), t[0, 0, -1]
            ),
            "unequal counts",
        ),
        (lambda t: t * 0 - 1, "unequal counts"),
    ],
)
def test_what_is_chosen_to_be_read_is_checked(change, told, model, saved):
    path = saved("rocketkv-mt(window=4)", 24)
    kvtool.load_cache(path, model)
    reseal(path, put("layer.0.marked", change))
    with pytest.raises(kvtool.KvtoolError, match=told):
        kvtool.load_cache(path, model)
