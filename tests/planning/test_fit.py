"""What a run takes of a machine's memory, and what would make it fit."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvtool.documents.memory import DeviceMemory
from kvtool.models import reference
from kvtool.plain_config import plain_config
from kvtool.planning.bytes import Text
from kvtool.planning.estimate import estimate_memory
from kvtool.planning.fit import Needs, Run, advice, remedies
from kvtool.planning.parameters import BITS, folder_bytes, weights_bytes
from tests.evaluation.variants import make_variants
from tests.models.published import LLAMA_3, QWEN_25_CODER

GIB = 2**30
CONFIG = plain_config(LLAMA_3)
WEIGHTS = {bits: weights_bytes(CONFIG, "auto", bits) for bits in (None, *BITS)}
TEXT = Text(32768 - 128, 128, 1, CONFIG.vocab_size)


def run_of(policy, budget=None, memory=None, prefill="full"):
    (variant,) = make_variants(
        [policy], [] if budget is None else [budget], prefill=prefill, baseline=False
    )
    return Run(CONFIG, "auto", variant, TEXT, WEIGHTS, memory)


def test_needs_worked_by_hand():
    needs = Needs(weights=1000, kv=200, state=30, working=400, memory=1500)
    assert (needs.total, needs.left, needs.fits) == (1400, 100, True)
    assert needs.reading == 170  # 400 at the peak, of which 230 are held to the end
    small = replace(needs, memory=1024)
    assert (small.left, small.fits) == (-376, False)
    assert small.verdict() == "does not fit: 376 B too much"
    unknown = replace(needs, weights=None)
    assert (unknown.total, unknown.left, unknown.fits) == (None, None, None)
    assert small.table()[-3:] == [
        "total                            1.4 KiB",
        "memory                           1.0 KiB",
        "left                              -376 B",
    ]


@pytest.mark.parametrize("name", ["full", "h2o", "snapkv+int8", "kvzip"])
def test_needs_are_those_of_a_dry_run(name):
    run = run_of(name, None if name == "full" else "20%", 24 * GIB)
    memory = DeviceMemory(device="cuda", free_bytes=24 * GIB, weights_bytes=WEIGHTS[None])
    found = estimate_memory(CONFIG, "auto", run.variant, TEXT, memory)
    needs = run.needs()
    assert (needs.kv, needs.state, needs.total) == (
        found.kv_bytes,
        found.state_bytes,
        found.peak_bytes,
    )
    assert needs.fits is found.fits


def test_kv_of_llama_worked_by_hand():
    """32 layers of 8 heads of 128 numbers, key and value, 2 bytes each: 128 KiB a token."""
    assert run_of("full").needs().kv == 128 * 1024 * 32768


def test_a_policy_that_waits_needs_the_full_cache_at_its_peak():
    full, waits = run_of("full", prefill="block").needs(), run_of("kvzip", "10%").needs()
    assert waits.kv < full.kv / 8
    assert waits.total > full.total


@pytest.mark.parametrize(
    ("policy", "budget", "memory"),
    [("full", None, 20), ("h2o", "20%", 16), ("kvzip", "20%", 18), ("roco", "20K", 20)],
)
def test_what_would_fit_fits_and_what_does_not_is_not_named(policy, budget, memory):
    run = run_of(policy, budget, memory * GIB)
    assert not run.needs().fits
    found = remedies(run)
    assert found
    assert all(needs.fits for _, needs in found)
    assert "what would: " in advice(run.needs(), found)


def test_where_keys_have_biases_4_bits_of_keys_are_the_last_remedy():
    config = plain_config(QWEN_25_CODER)
    text = Text(32768 - 128, 128, 1, config.vocab_size)
    weights = {None: weights_bytes(config, "auto")}
    run = replace(run_of("full", prefill="block"), config=config, text=text, weights=weights)
    peak = {
        codec: replace(run_of(f"full+{codec}", prefill="block"), config=config, text=text)
        .needs()
        .working
        + weights[None]
        for codec in ("int8", "k8v4", "int4")
    }
    for codec, named in (("int8", ["int8", "k8v4"]), ("k8v4", ["k8v4"]), ("int4", ["int4"])):
        found = remedies(replace(run, memory=peak[codec]))
        assert [flags for flags, _ in found] == [f"-p full+{each}" for each in named]


def test_large_blocks_of_a_device_leave_small_ones_as_a_remedy():
    """Of 2048 tokens on CUDA, and of 128, of which fewer bytes live at a time."""
    blocks = [
        replace(run_of("h2o", "20%", prefill=f"block:{size}")).needs().working
        for size in (128, 2048)
    ]
    assert blocks[0] < blocks[1]
    found = {}
    for peak, device in ((blocks[0], "cuda"), (blocks[1], "cuda:0"), (blocks[1], "cpu")):
        run = replace(run_of("h2o", "20%", peak + WEIGHTS[None]), device=device)
        flags = [each for each, _ in remedies(run)]
        found[peak, device] = [each for each in flags if "--prefill" in each]
        policy, size = run.variant.policy, 128 if device == "cpu" else 2048
        assert run.peak(policy, 4000, "block") == run.peak(policy, 4000, f"block:{size}")
    assert list(found.values()) == [
        ["--prefill block:128"],
        ["--prefill block"],
        ["--prefill block"],
    ]


def test_nothing_fits_into_no_memory():
    run = run_of("h2o", "20%", GIB)
    assert remedies(run) == []
    assert advice(run.needs(), []).endswith("no flag makes it fit")


@pytest.mark.parametrize("policy", ["h2o", "streaming+int8", "snapkv+caote"])
def test_the_largest_budget_fits_and_the_next_does_not(policy):
    run = run_of(policy, "50%", 18 * GIB, prefill="block")
    most = run.most_as_it_is_read()
    assert most is not None
    assert 0 < most < TEXT.prompt
    at = {
        n: run_of(policy, str(n), 18 * GIB, prefill="block").needs().fits for n in (most, most + 1)
    }
    assert at == {most: True, most + 1: False}


def test_a_large_memory_holds_the_whole_prompt():
    assert run_of("h2o", "50%", 200 * GIB).most_as_it_is_read() == TEXT.prompt


@pytest.mark.parametrize("policy", ["full", "quest"])
def test_no_budget_makes_these_hold_less(policy):
    assert run_of(policy, None if policy == "full" else "64", 18 * GIB).most_as_it_is_read() is None


def test_folder_bytes_are_those_of_the_tensors(tmp_path):
    tensors = {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert folder_bytes(tmp_path) == 3 * 5 * 4 + 7
    held = load_file(reference.path() / "model.safetensors").values()
    assert folder_bytes(reference.path()) == sum(each.nbytes for each in held)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\xff" * 80])
def test_other_files_have_no_known_size(tmp_path, content):
    assert folder_bytes(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(content)
    assert folder_bytes(tmp_path) is None
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    assert folder_bytes(tmp_path) is None
