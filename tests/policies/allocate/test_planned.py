import random

import pytest

from kvtool.documents.plan import Target
from kvtool.planning.make_plan import make_plan
from kvtool.policies.allocate.d2o import D2O
from kvtool.policies.allocate.split import tokens_for_prompt
from kvtool.policies.allocate.uniform import Uniform
from kvtool.sizes import Budget, fraction_of
from tests.planning.documents import FULL, LINEAR, SLIDING, profile, shape


def plan(model=None, allocator=None, min_tokens=None, **target):
    return make_plan(
        model or shape(),
        allocator or D2O(),
        Target(**({"context": 1000} | target)),
        profile=profile(),
        min_tokens=min_tokens,
    ).document


def test_the_planned_prompt_gets_the_planned_tokens():
    rng = random.Random(0)
    for _ in range(200):
        n = rng.randint(30, 200_000)
        target = rng.choice([{"ratio": rng.randint(1, 100) / 100}, {"tokens": rng.randint(1, n)}])
        made = plan(context=n, **target)
        assert tokens_for_prompt(made, n) == made.layers.tokens


def test_a_ratio_is_scaled_to_the_prompt():
    made = plan(ratio=0.2)
    assert tokens_for_prompt(made, 2000) == [486, 486, 360, 268]
    for n in [*range(1, 80), 999, 1001, 4097, 100_003]:
        tokens = tokens_for_prompt(made, n)
        assert sum(tokens) == 4 * fraction_of(Budget.parse("20%").ratio, n)
        assert all(1 <= kept <= n for kept in tokens)
        assert tokens == sorted(tokens, reverse=True)


def test_a_short_prompt_keeps_the_least_of_each_layer_where_it_can():
    made = plan(ratio=0.2, min_tokens=100)
    assert min(tokens_for_prompt(made, 600)) == 100
    assert tokens_for_prompt(made, 300) == [60] * 4


def test_tokens_hold_as_they_are():
    made = plan(tokens=200)
    assert made.layers.tokens == [243, 243, 180, 134]
    for n in (243, 1000, 50_000):
        assert tokens_for_prompt(made, n) == [243, 243, 180, 134]


def test_what_a_short_prompt_cannot_fill_goes_to_the_other_layers():
    made = plan(tokens=200)
    assert tokens_for_prompt(made, 220) == [220, 220, 206, 154]
    assert sum(tokens_for_prompt(made, 201)) == 800
    assert max(tokens_for_prompt(made, 201)) == 201


@pytest.mark.parametrize("n", [1, 7, 150, 199, 200])
def test_a_prompt_that_fits_is_kept_whole_and_leaves_room_for_the_answer(n):
    tokens = tokens_for_prompt(plan(tokens=200), n)
    assert min(tokens) >= n
    assert sum(tokens) == 800
    assert tokens_for_prompt(plan(tokens=200, allocator=Uniform()), n) == [200] * 4


def test_all_of_a_prompt_is_all_of_it():
    assert tokens_for_prompt(plan(ratio=1), 37) == [37] * 4


def test_bytes_hold_as_planned():
    made = plan(bytes=803 * 256)
    # beside keys and values each slot has a position in 2 heads, and each layer a slot for the new
    # token: (774 + 4) * (256 + 8) = 205,392 of 205,568 bytes
    assert sum(made.layers.tokens) == 774
    assert tokens_for_prompt(made, 30_000) == made.layers.tokens


def test_a_target_beyond_the_planned_context_holds_for_longer_prompts():
    made = plan(tokens=512, context=256)
    assert made.layers.tokens == [256] * 4
    assert tokens_for_prompt(made, 4096) == [512] * 4


def test_layers_that_are_not_planned_keep_what_they_have():
    made = plan(shape(FULL, SLIDING, LINEAR, FULL), ratio=0.5, allocator=Uniform())
    for n in (10, 1000, 3000):
        assert tokens_for_prompt(made, n) == [n // 2, 63, 0, n // 2]
