"""The largest batch for a memory: what is computed holds, and does not leave much unused."""

import pytest

import kvtool
from kvtool.errors import KvtoolError
from kvtool.generation.feeding import decode_step, prefill
from kvtool.planning.estimate import largest_batch, prompt_bytes
from tests.evaluation.variants import make_variants
from tests.models_for_tests import peaky_model, random_ids

N, NEW = 300, 40
ARMS = [
    ("full", "full"),
    ("roco@20%", "block:32"),
    ("snapkv@64", "block:32"),
    ("h2o+d2o-alloc@64", "full"),
]


def arm_of(text, prefill_mode="full"):
    policy, _, budget = text.partition("@")
    return make_variants(
        [policy], [budget] if budget else [], prefill=prefill_mode, baseline=False
    )[0]


@pytest.fixture(scope="module")
def model():
    return kvtool.attach(peaky_model("llama"))


@pytest.mark.parametrize(("text", "mode"), ARMS)
def test_a_row_takes_what_is_computed(model, text, mode):
    arm = arm_of(text, mode)
    cache = kvtool.build_cache(model, arm.policy, arm.budget, prefill=mode)
    logits = prefill(model, cache, random_ids(N, batch=2), new_tokens=NEW)
    for _ in range(NEW):
        logits = decode_step(model, cache, logits.argmax(-1))
    report = cache.report()
    held = (report.peak_bytes + report.state_bytes) / 2
    computed = prompt_bytes(model.config, "float32", arm, N, NEW)
    assert held <= computed <= 1.8 * held


def test_a_worked_row(model):
    # 2 layers of 2 heads x 16 x (k + v) x 4 bytes = 256 a token, and 2 positions of 4: 264
    # at the end of reading: 2 layers hold 64, one of them has the prompt and its 64 again
    arm = arm_of("streaming@64")
    expected = 264 * (2 * 64 + 300 + 64)
    assert prompt_bytes(model.config, "float32", arm, N, NEW) == expected
    assert largest_batch(model.config, "float32", arm, N, NEW, 10 * expected + 5) == 10
    with pytest.raises(KvtoolError, match=f"one row of 300 \\+ 40 tokens takes {expected}"):
        largest_batch(model.config, "float32", arm, N, NEW, expected - 1)


def test_a_reader_gives_no_batch(model):
    with pytest.raises(KvtoolError, match="`quest` stores tables beside its keys"):
        prompt_bytes(model.config, "float32", arm_of("quest@64"), N, NEW)


def test_a_budget_of_all_rows_gives_no_batch(model):
    with pytest.raises(KvtoolError, match="a budget of 1MiB is that of all rows"):
        prompt_bytes(model.config, "float32", arm_of("h2o@1MiB"), N, NEW)
