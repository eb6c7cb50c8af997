"""The peak that a dry run shows, against the tensors that live at a time."""

import gc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import kvtool
from kvtool.documents.memory import DeviceMemory
from kvtool.generation import decode_step, prefill
from kvtool.models.placement import weight_bytes
from kvtool.planning.bytes import Text
from kvtool.planning.estimate import estimate_memory
from kvtool.policies.table import BASES
from kvtool.sizes import LONG_PROMPT
from tests.evaluation.variants import make_variants
from tests.models_for_tests import cutting, family_model, peaky_model, random_ids
from tests.tiers import first

NOTHING = DeviceMemory(device="cpu", free_bytes=None, weights_bytes=0)
PROMPT, NEW = 900, 5
ARMS = [  # and how each reads its prompt: kinds of evidence, buffers, tables and codes
    ("streaming+int8@99%", "full"),
    ("d2o@64", "full"),
    ("rkv@25%", "block:64"),
    ("quest@64", "full"),
    # the exhaustive tier from here
    ("full+fp8@", "block:64"),
    ("full@", "block:64"),
    ("full+int4@", "full"),
    ("h2o+caote@64", "block:64"),
    ("h2o+calidrop@64", "full"),
    ("h2o+pyramid@64", "block:64"),
    ("h2o+int4@64", "block:64"),
    ("snapkv+fp8@20%", "full"),
    ("sparq@20%", "block:64"),
    ("expected+k8v4@25%", "block:64"),
    ("rkv+int8@50%", "full"),
]
EVERY = [name for name in BASES if name not in ("full", "kvzip", "d2o", "rkv")]
LEAST, MOST = 0.8, 2.4  # shares of what is measured that the estimate stays between
HEADS = 3.0  # the larger of them where heads or pages are counted as if all were full


@pytest.fixture(scope="module")
def model():
    return kvtool.attach(peaky_model("llama", head_dim=32))


def arm_of(text, mode):
    policy, _, budget = text.partition("@")
    return make_variants([policy], [budget] if budget else [], prefill=mode, baseline=False)[0]


def most_alive(work) -> int:
    """The most bytes of tensors that live at a time meanwhile, above those at the beginning."""
    gc.disable()  # or it may free what an earlier run left
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            work()
    finally:
        gc.enable()
    events = profiled.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def run(model, arm, rows=1, prompt=PROMPT):
    cache = kvtool.build_cache(model, arm.policy, arm.budget, prefill=arm.prefill)
    prefill(model, cache, random_ids(prompt, batch=rows), new_tokens=NEW)
    for token in range(3, 3 + NEW - 1):
        decode_step(model, cache, torch.tensor([token] * rows))


def told_and_measured(model, arm, prompt=PROMPT, rows=1):
    """The estimate of a run's peak, and what lives at a time in it."""
    text = Text(prompt, NEW, rows)
    told = estimate_memory(model.config, "float32", arm, text, NOTHING).peak_bytes
    return told, most_alive(lambda: run(model, arm, rows, prompt))


@pytest.mark.parametrize("case", first(4, ARMS), ids=" ".join)
def test_the_peak_is_near_what_lives_at_a_time(model, case):
    arm = arm_of(*case)
    run(model, arm)  # what is made once is there
    told, measured = told_and_measured(model, arm)
    assert LEAST * measured < told < MOST * measured


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", EVERY)
def test_the_peak_of_every_policy(model, name):
    """The margin on the page; `kvzip` repeats a prompt, which these random ids are not."""
    for mode in ("full", "block:64"):
        arm = arm_of(f"{cutting(name)}@25%", mode)
        run(model, arm)
        told, measured = told_and_measured(model, arm)
        loose = name in ("duoattention", "rocketkv-mt")
        assert LEAST * measured < told < (HEADS if loose else MOST) * measured


def test_rows_take_their_share(model):
    arm = arm_of("h2o@64", "full")
    one, four = (
        estimate_memory(model.config, "float32", arm, Text(PROMPT, NEW, rows), NOTHING)
        for rows in (1, 4)
    )
    assert four.kv_bytes == 4 * one.kv_bytes
    assert 3.9 * one.peak_bytes < four.peak_bytes <= 4 * one.peak_bytes
    measured = most_alive(lambda: run(model, arm, rows=4))
    assert LEAST * measured < four.peak_bytes < MOST * measured


@pytest.mark.exhaustive
def test_weights_of_long_prompts_take_a_tile(model):
    """However many rows there are."""
    for rows in (1, 4):
        told, measured = told_and_measured(model, arm_of("h2o@64", "full"), LONG_PROMPT, rows)
        assert LEAST * measured < told < MOST * measured


def test_weights_and_host_memory_are_in_the_peak(model):
    arm = arm_of("h2o+calidrop@64", "full")
    found = {}
    for device, weights in (("cpu", 0), ("cpu", 1000), ("cuda:0", 0), ("cpu", None)):
        memory = DeviceMemory(device=device, free_bytes=2**20, weights_bytes=weights)
        found[device, weights] = estimate_memory(
            model.config, "float32", arm, Text(PROMPT, NEW), memory
        )
    plain = found["cpu", 0]
    assert found["cpu", 1000].peak_bytes == plain.peak_bytes + 1000
    assert plain.peak_bytes - found["cuda:0", 0].peak_bytes == plain.host_bytes > 0
    assert (found["cpu", None].peak_bytes, found["cpu", None].fits) == (None, None)
    assert plain.fits is (plain.peak_bytes <= 2**20)


@pytest.mark.parametrize("name", ["gptj", "gpt_oss", "deepseek_v3", "falcon_h1", "gemma3n"])
def test_weights_of_families(name):
    model = family_model(name)
    tensors = [*model.parameters(), *model.buffers()]
    held = sum(each.numel() * each.element_size() for each in tensors)
    assert weight_bytes(model.config, "float32") == held
    (arm,) = make_variants(["streaming"], ["40"], baseline=False)
    assert estimate_memory(model.config, "float32", arm, Text(90, 4), NOTHING).peak_bytes > 0


def test_half_as_wide_weights_take_half_the_bytes(model):
    wide, narrow = (weight_bytes(model.config, dtype) for dtype in ("float32", "bfloat16"))
    assert 0.5 <= narrow / wide < 0.51  # the rotation's frequencies stay as they are
