import random
from fractions import Fraction

import pytest

from kvtool.documents.plan import PlanDocument, Target
from kvtool.errors import UsageError
from kvtool.planning.make_plan import make_plan
from kvtool.policies.allocate.d2o import D2O, D2OReciprocal
from kvtool.policies.allocate.optimal import Optimal
from kvtool.policies.allocate.pyramid import Pyramid
from kvtool.policies.allocate.uniform import Uniform
from kvtool.policies.grammar import parse_policy
from kvtool.sizes import Budget
from tests.planning.documents import FULL, LINEAR, SLIDING, profile, shape


def plan(allocator=None, model=None, options=None, **target) -> PlanDocument:
    target = Target(**({"context": 1000} | target))
    return make_plan(model or shape(), allocator or Uniform(), target, **(options or {})).document


def test_d2o_from_a_profile():
    made = plan(D2O(), ratio=0.2, options={"profile": profile(), "min_tokens": 16})
    assert made.layers.tokens == [243, 243, 180, 134]
    assert made.layers.fractions == [0.243, 0.243, 0.18, 0.134]
    assert (made.layers.allocator, made.layers.min_tokens) == ("d2o", 16)
    made = plan(D2O(norm="raw"), ratio=0.2, options={"profile": profile(), "min_tokens": 16})
    assert made.layers.tokens == [732, 36, 16, 16]
    assert made.layers.allocator == "d2o(norm=raw)"


def test_the_norm_is_that_of_the_profiled_length():
    made = plan(D2O(), ratio=0.2, context=50_000, options={"profile": profile(), "min_tokens": 16})
    assert [round(tokens / 50) for tokens in made.layers.tokens] == [243, 243, 181, 134]


def test_sums_are_exact_for_every_kind_of_target():
    rng = random.Random(0)
    for _ in range(60):
        n = rng.randint(30, 5000)
        allocator = rng.choice([Uniform(), D2O(), D2O(norm="raw"), D2OReciprocal(), Pyramid()])
        kinds = rng.choice([(FULL,) * 4, (FULL, SLIDING, FULL, LINEAR)])
        model, used = shape(*kinds), profile(rng.randint(100, 2000))
        options = {"profile": used}
        free = kinds.count(FULL)
        ratio = rng.randint(1, 100) / 100
        made = plan(allocator, model, options, ratio=ratio, context=n)
        mean = max(1, Fraction(str(ratio)) * n // 1)
        assert sum(made.layers.tokens[i] for i in made.free_layers) == mean * free
        tokens = rng.randint(1, n)
        made = plan(allocator, model, options, tokens=tokens, context=n)
        assert sum(made.layers.tokens[i] for i in made.free_layers) == tokens * free
        batch, size = rng.randint(1, 4), rng.randint(600_000, 3_000_000)
        made = plan(allocator, model, options, bytes=size, batch=batch, context=n)
        assert made.totals.bytes <= made.totals.storage.bytes <= size
        whole = plan(model=model, tokens=n, batch=batch, context=n).totals.storage.bytes
        assert made.totals.storage.bytes > min(size, whole) - batch * (256 + 8)


def test_bytes_count_every_row_and_the_windows():
    model = shape(FULL, SLIDING, LINEAR)
    made = plan(model=model, tokens=100, batch=3)
    assert made.layers.tokens == [100, 63, 0]
    assert made.layers.fractions == [0.1, None, None]
    assert made.totals.tokens == 163
    assert made.totals.bytes == 163 * 256 * 3
    assert made.totals.share_of_full == pytest.approx(163 / 1063)
    assert made.free_layers == [0]


def test_a_short_prompt_does_not_fill_a_window():
    made = plan(model=shape(FULL, SLIDING), tokens=10, context=40)
    assert made.layers.tokens == [10, 63]
    assert made.totals.tokens == 50
    assert made.totals.share_of_full == pytest.approx(50 / 80)


def test_bytes_of_uneven_layers_come_from_their_own_sizes():
    made = plan(
        model=shape(FULL, FULL),
        tokens=10,
        options={"layers": shape(FULL, FULL).layer_shapes([512, 256])},
    )
    assert made.totals.bytes == 10 * 768
    assert made.totals.share_of_full == 0.01


def test_a_target_in_bytes_spends_what_uniform_layers_would_leave():
    slot = 256 + 2 * 4  # a position in each head; one slot of a layer takes the new token
    made = plan(bytes=(4 * 101 + 3) * slot + slot - 1)
    assert made.layers.tokens == [101, 101, 101, 100]
    assert made.totals.bytes == 403 * 256
    assert made.totals.storage.bytes == (403 + 4) * slot


def test_a_context_includes_what_is_generated():
    made = plan(ratio=0.2, context=1128, max_new_tokens=128)
    assert made.target.prompt_tokens == 1000
    assert made.layers.tokens == [200] * 4
    assert made.rocketkv.context == 1128
    assert made.rocketkv.stage1_tokens - made.rocketkv.prompt_tokens == 128


def test_more_than_the_prompt_keeps_it_whole_and_says_so():
    made = make_plan(shape(), Uniform(), Target(tokens=512, context=256))
    assert made.document.layers.tokens == [256] * 4
    assert made.document.totals.share_of_full == 1
    assert any("512 is more than all of a prompt of 256 tokens" in line for line in made.notes)
    assert made.document.rocketkv.dense


def test_the_least_of_a_layer():
    flat = {"profile": profile(f_variance=[0.0, 900.0, 900.0, 900.0])}
    steep = D2O(temperature=0.05)
    assert min(plan(steep, tokens=50, options=flat).layers.tokens) == 8
    assert min(plan(steep, tokens=5, options=flat).layers.tokens) == 5
    asked = flat | {"min_tokens": 20}
    assert min(plan(steep, tokens=50, options=asked).layers.tokens) == 20
    needs = flat | {"policy": parse_policy("snapkv")}
    made = plan(steep, tokens=50, options=needs)
    assert min(made.layers.tokens) == made.layers.min_tokens == 33
    assert made.policy == "snapkv"


def test_pyramid_takes_the_window_that_the_policy_keeps():
    needs = {"policy": parse_policy("snapkv")}
    made = plan(Pyramid(), tokens=128, context=4096, options=needs)
    assert made.layers.tokens[-1] == 32 + round((128 - 32) / 20)
    needs = {"policy": parse_policy("rkv(window=32)")}  # cuts while it decodes, and keeps it, too
    assert plan(Pyramid(), tokens=128, context=4096, options=needs).layers == made.layers
    needs = {"policy": parse_policy("expected")}  # has no window
    made = plan(Pyramid(), tokens=128, context=4096, options=needs)
    assert made.layers.tokens[-1] == 8 + round((128 - 8) / 20)


def test_loss_optimal_budgets_of_a_ratio_grow_with_the_prompt():
    used = profile(losses=[[0.5, 0.2, 0.1], [0.4, 0.3, 0.2], [0.1, 0.05, 0.01], [0.9, 0.8, 0.1]])
    options = {"profile": used}
    assert plan(Optimal(), ratio=0.2, options=options).layers.tokens == [256, 160, 128, 256]
    longer = plan(Optimal(), ratio=0.2, context=3000, options=options)
    assert longer.layers.tokens == [768, 480, 384, 768]
    as_they_are = plan(Optimal(), tokens=200, context=3000, options=options)
    assert sorted(as_they_are.layers.tokens) == [128, 160, 256, 256]


def test_unordered_budgets_of_a_profile_are_put_in_order():
    losses = [[0.2, 0.5, 0.1], [0.3, 0.4, 0.2], [0.05, 0.1, 0.01], [0.8, 0.9, 0.1]]
    used = profile(losses=losses, budgets=(128, 64, 256))
    made = plan(Optimal(), ratio=0.2, options={"profile": used})
    assert made.layers.tokens == [256, 160, 128, 256]


REFUSED = {  # allocator, model, options, target: what is said
    "no profile": (D2O(), None, {}, {"tokens": 9}, "`d2o` needs a profile with `f_variance`"),
    "no metric": (
        Optimal(),
        None,
        {"profile": profile()},
        {"tokens": 100},
        "`optimal` needs a profile with `answer_loss`, and this one lacks it",
    ),
    "a layer without": (
        D2O(),
        None,
        {"profile": profile(f_variance=[1.0, None, 2.0, 3.0])},
        {"tokens": 100},
        "no `f_variance` for layer 1",
    ),
    "no free layer": (Uniform(), shape(SLIDING), {}, {"tokens": 9}, "no layer whose budget is"),
    "unknown window": (
        Uniform(),
        shape(FULL, SLIDING, sliding_window=None),
        {},
        {"tokens": 9},
        "windows of unknown width",
    ),
    "few bytes": (Uniform(), None, {}, {"bytes": 1023}, "1 token in every layer take 2.1 KiB"),
    "few bytes for a policy": (
        Uniform(),
        None,
        {"policy": parse_policy("snapkv")},
        {"bytes": 20 * 1024},
        r"20.0 KiB is too small: 33 tokens in every layer \(policy `snapkv`\) take 34.0 KiB",
    ),
    "few tokens for a policy": (
        Uniform(),
        None,
        {"policy": parse_policy("snapkv")},
        {"tokens": 32},
        "32 is 32 tokens per layer, fewer than the 33 of policy `snapkv`",
    ),
    "a share too small": (
        Uniform(),
        None,
        {"policy": parse_policy("streaming")},
        {"ratio": 0.001},
        "0.1% of 1000 is 1 token per layer, fewer than the 5 of policy `streaming`",
    ),
    "least above the mean": (
        Uniform(),
        None,
        {"min_tokens": 64},
        {"tokens": 32},
        "fewer than the 64 of --min-tokens",
    ),
    "least below the policy's": (
        Uniform(),
        None,
        {"policy": parse_policy("snapkv"), "min_tokens": 10},
        {"tokens": 99},
        "a layer of 10 tokens is too small for policy `snapkv`",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_planned_is_refused(name):
    allocator, model, options, target, message = REFUSED[name]
    with pytest.raises(UsageError, match=message):
        plan(allocator, model, options, **target)


def test_the_smallest_bytes_that_are_told_work():
    needs = {"policy": parse_policy("snapkv")}
    with pytest.raises(UsageError) as refused:
        plan(model=shape(FULL, SLIDING), options=needs, bytes=9, batch=2)
    size = Budget.parse(refused.value.hint.removeprefix("--bytes ")).bytes
    held = plan(model=shape(FULL, SLIDING), options=needs, bytes=size, batch=2).totals.bytes
    assert size - 1024 // 10 <= held <= size  # of a tenth of a KiB
    with pytest.raises(UsageError):
        plan(model=shape(FULL, SLIDING), options=needs, bytes=held - 1, batch=2)


def test_latent_attention_has_no_plan_for_rocketkv():
    latent = shape(kv_heads=1, head_dim=24, kv_bytes_per_token=4 * 24 * 2)
    made = make_plan(latent, Uniform(), Target(tokens=64, context=512))
    assert made.document.rocketkv is None
    assert any("does not store keys and values per head" in line for line in made.notes)
    assert "rocketkv" not in made.document.to_data()


def test_a_small_budget_has_no_plan_for_rocketkv():
    made = make_plan(shape(), Uniform(), Target(tokens=8, context=512))
    assert made.document.rocketkv is None
    assert any("16 tokens or more, got 8" in line for line in made.notes)
