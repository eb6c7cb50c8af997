import math

import pytest

from kvtool.errors import UsageError
from kvtool.planning.rocketkv_stages import nominal_storage, page_size, plan_rocketkv, split_factor

TABLE = [  # S, max_new, t: c, r, C, prompt_budget, c2, P, k1 of D = 128, k2, pairs estimated
    ((32768, 0, 512), (64, 0.56, 3191, 3191, 6.2324, 3, 61, 256, 253.5)),
    ((32768, 128, 512), (64, 0.56, 3191, 3063, 6.2324, 3, 61, 256, 253.5)),
    ((131072, 128, 256), (512, 0.74, 1296, 1168, 5.0625, 3, 75, 128, 126.6)),
    ((4096, 512, 256), (16, 0.44, 1209, 697, 4.7227, 3, 81, 128, 127.5)),
    ((3072, 128, 2048), (1.5, 0.235098, 2792, 2664, 1.3633, 1, 93, 1024, 1014.3)),
]


@pytest.mark.parametrize(("given", "expected"), TABLE)
def test_the_worked_table(given, expected):
    context, new, budget = given
    plan = plan_rocketkv(context, budget, 128, max_new_tokens=new)
    c, r, stage1, prompt, c2, page, dims, top, estimated = expected
    assert not plan.dense
    assert plan.compression_ratio == c
    assert plan.split_factor == pytest.approx(r, abs=5e-7)
    assert (plan.stage1_tokens, plan.prompt_tokens) == (stage1, prompt)
    assert plan.stage1_tokens / budget == pytest.approx(c2, abs=5e-5)
    assert (plan.page_size, plan.head_dims, plan.top_k) == (page, dims, top)
    assert plan.pages * plan.head_dims / (2 * 128) == pytest.approx(estimated, abs=0.05)


def test_a_context_within_the_budget_is_dense():
    plan = plan_rocketkv(2048, 2048, 128, max_new_tokens=128)
    assert plan.dense
    assert (plan.stage1_tokens, plan.prompt_tokens, plan.top_k) == (2048, 1920, 2048)
    assert (plan.page_size, plan.head_dims) == (1, 128)
    assert (plan.storage(), plan.traffic(128)) == (1.0, 1.0)


def test_strict_selects_even_then():
    plan = plan_rocketkv(2048, 2048, 128, max_new_tokens=128, strict=True)
    assert not plan.dense
    assert (plan.compression_ratio, plan.split_factor) == (1, 0.2)
    assert (plan.stage1_tokens, plan.prompt_tokens) == (2048, 1920)
    assert (plan.page_size, plan.head_dims, plan.top_k) == (1, 128, 1024)


def test_the_split_factor_grows_with_the_compression_up_to_its_limit():
    assert split_factor(1) == 0.2
    assert split_factor(1024) == pytest.approx(0.8)
    assert split_factor(4096) == 0.8
    assert 64 ** split_factor(64) == pytest.approx(10.267, abs=5e-4)  # as in the paper
    assert 64 ** (1 - split_factor(64)) == pytest.approx(6.233, abs=1e-3)


def test_the_page_size_of_other_code_is_the_same():
    for tenths in range(10, 3000):
        ratio = tenths / 10
        assert page_size(ratio) == min(math.floor(ratio), math.ceil(math.sqrt(ratio)))


def test_a_decode_step_never_reads_more_than_the_budget_and_a_page():
    for context in (2000, 4096, 10_000, 32_768, 131_072):
        for budget in (64, 100, 256, 512, 1024):
            plan = plan_rocketkv(context, budget, 128)
            assert 1 <= plan.head_dims <= 128
            read = plan.traffic(128) * context
            assert read <= budget + plan.head_dims / 256  # the last page is not full
            assert read > 0.9 * budget


def test_a_prompt_may_keep_its_window_and_nothing_else():
    assert plan_rocketkv(4096, 32, 128, split=1.0).prompt_tokens == 32
    assert plan_rocketkv(4096, 40, 128, split=1.0, max_new_tokens=8).prompt_tokens == 32
    assert plan_rocketkv(4096, 33, 128, split=1.0, window=33).prompt_tokens == 33


def test_generated_tokens_keep_their_room():
    plan = plan_rocketkv(4096, 64, 128, max_new_tokens=1500)
    assert (plan.stage1_tokens, plan.prompt_tokens) == (3000, 1500)


def test_a_given_split_replaces_the_computed_one():
    nothing = plan_rocketkv(4096, 256, 128, split=0.0)
    assert nothing.stage1_tokens == 4096  # selection alone
    assert plan_rocketkv(4096, 256, 128, split=1.0).stage1_tokens == 256


@pytest.mark.parametrize(
    ("ratio", "exact", "paper", "all_exact", "all_paper"),
    [
        (8, 0.691919, 0.930079, 1.238159, 1.476319),
        (64, 0.136406, 0.175416, 1.039010, 1.078021),
        (128, 0.069018, 0.088659, 1.019641, 1.039282),
        (400, 0.019300, 0.025108, 1.005808, 1.011616),
    ],
)
def test_storage_by_formula(ratio, exact, paper, all_exact, all_paper):
    split = split_factor(ratio)
    for expected, options in [
        (exact, {}),
        (paper, {"doubled": True}),
        (all_exact, {"keeps_all": True}),
        (all_paper, {"keeps_all": True, "doubled": True}),
    ]:
        assert nominal_storage(ratio, split, **options) == pytest.approx(expected, abs=6e-7)


def test_storage_counts_tokens_and_a_pair_of_keys_per_page():
    plan = plan_rocketkv(32768, 512, 128)
    assert plan.pages == 1064
    assert plan.storage() == (3191 + 1064) / 32768


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((4096, 15), {}, "a budget of 16 tokens or more, got 15"),
        ((4096, 16), {"max_new_tokens": 0, "split": 1.0}, "keeps 16 tokens of the prompt"),
        ((200, 128), {"max_new_tokens": 180}, "keeps 20 tokens of the prompt"),
    ],
)
def test_budgets_that_leave_nothing_are_refused(arguments, options, message):
    with pytest.raises(UsageError, match=message):
        plan_rocketkv(*arguments, 128, **options)
