import math
import random
from fractions import Fraction

import pytest

from kvtool.maths.allocation import allocate, allocate_by_counts


def weights_of_all_kinds(rng, layers):
    """Equal, mild, or so far apart that their exponentials are 0 or infinite in any float."""
    kind = rng.choice(["equal", "mild", "steep", "extreme", "few values"])
    if kind == "equal":
        return [rng.uniform(-700, 700)] * layers
    if kind == "few values":
        return [rng.choice([-600.0, -1.0, 0.0, 600.0]) for _ in range(layers)]
    spread = {"mild": 1, "steep": 30, "extreme": 5000}[kind]
    return [rng.gauss(0, spread) for _ in range(layers)]


def limits(rng, layers):
    min_budgets = [rng.choice([0, 1, 8, rng.randint(0, 300)]) for _ in range(layers)]
    max_budgets = [low + rng.choice([0, 1, 50, rng.randint(0, 5000)]) for low in min_budgets]
    if rng.random() < 0.5:
        min_budgets, max_budgets = [min(min_budgets)] * layers, [max(max_budgets)] * layers
    return min_budgets, max_budgets


def cases(count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        layers = rng.choice([1, 2, 3, 4, 7, 32])
        min_budgets, max_budgets = limits(rng, layers)
        total = rng.randint(0, sum(max_budgets) + 100)
        yield weights_of_all_kinds(rng, layers), total, min_budgets, max_budgets


def test_sums_are_exact_and_limits_are_kept():
    out_of_range = 0
    for weights, total, min_budgets, max_budgets in cases(750, seed=0):
        split = allocate(weights, total, min_budgets, max_budgets)
        assert all(
            a <= x <= b for a, x, b in zip(min_budgets, split.tokens, max_budgets, strict=True)
        )
        assert split.total == min(max(total, sum(min_budgets)), sum(max_budgets))
        assert split.clamped == (split.total != total)
        out_of_range += split.clamped
    assert out_of_range > 20


def test_a_layer_of_more_weight_has_no_fewer_tokens():
    for weights, total, min_budgets, max_budgets in cases(400, seed=9):
        min_budgets, max_budgets = (
            [min(min_budgets)] * len(min_budgets),
            [max(max_budgets)] * len(max_budgets),
        )
        tokens = allocate(weights, total, min_budgets, max_budgets).tokens
        order = sorted(range(len(weights)), key=lambda i: (weights[i], -i))
        given = [tokens[i] for i in order]
        assert given == sorted(given), (weights, total)


def test_more_weight_for_one_layer_takes_no_token_from_it():
    rng = random.Random(3)
    for weights, total, min_budgets, max_budgets in cases(300, seed=4):
        layer = rng.randrange(len(weights))
        before = allocate(weights, total, min_budgets, max_budgets).tokens[layer]
        weights[layer] += rng.choice([1e-3, 0.5, 40.0])
        assert allocate(weights, total, min_budgets, max_budgets).tokens[layer] >= before


@pytest.mark.parametrize(
    ("weights", "total", "tokens"),
    [
        ([0.0, -1e17], 150, [100, 50]),
        ([-1e17, 0.0], 150, [50, 100]),
        ([1e300, 0.0, -1e300], 230, [100, 100, 30]),
        ([0.0, 0.0, -1e17, -1e17], 250, [100, 100, 25, 25]),
        ([2e17, 1e17, math.log(3), 0.0], 240, [100, 100, 30, 10]),
    ],
)
def test_weights_too_far_apart_for_a_float_fill_one_after_the_other(weights, total, tokens):
    """By hand: the lighter layers share what the limits of the heavier ones leave."""
    assert allocate(weights, total, [0] * len(weights), [100] * len(weights)).tokens == tokens


def slow_shares(weights, total, min_budgets, max_budgets):
    """Water-filling by its definition: fix the layers that break a limit, one side at a time."""
    fixed = {}
    while True:
        free = [i for i in range(len(weights)) if i not in fixed]
        if not free:
            return [fixed[i] for i in range(len(weights))]
        left = total - sum(fixed.values())
        parts = [math.exp(weights[i]) for i in free]
        shares = {i: left * part / sum(parts) for i, part in zip(free, parts, strict=True)}
        below = {i: min_budgets[i] for i in free if shares[i] < min_budgets[i]}
        above = {i: max_budgets[i] for i in free if shares[i] > max_budgets[i]}
        if not below and not above:
            return [fixed.get(i, shares.get(i)) for i in range(len(weights))]
        lack = sum(min_budgets[i] - shares[i] for i in below)
        excess = sum(shares[i] - max_budgets[i] for i in above)
        fixed |= below if lack >= excess else above


def slow_split(counts, total, min_budgets, max_budgets):
    """The same in exact fractions, and one token after the other to the largest remainder."""
    fixed = {}
    while len(fixed) < len(counts):
        free = [i for i in range(len(counts)) if i not in fixed]
        left, whole = total - sum(fixed.values()), sum(counts[i] for i in free)
        shares = {i: Fraction(left * counts[i], whole) for i in free}
        lack = {i: Fraction(min_budgets[i]) for i in free if shares[i] < min_budgets[i]}
        excess = {i: Fraction(max_budgets[i]) for i in free if shares[i] > max_budgets[i]}
        if not lack and not excess:
            fixed |= shares
        elif sum(min_budgets[i] - shares[i] for i in lack) >= sum(
            shares[i] - max_budgets[i] for i in excess
        ):
            fixed |= lack
        else:
            fixed |= excess
    tokens = {i: math.floor(share) for i, share in fixed.items()}
    while sum(tokens.values()) < total:
        open_layers = [i for i in tokens if tokens[i] < max_budgets[i]]
        tokens[max(open_layers, key=lambda i: (fixed[i] - tokens[i], -i))] += 1
    return [tokens[i] for i in range(len(counts))]


def test_counts_are_split_by_exact_remainders():
    rng = random.Random(2)
    for _ in range(300):
        layers = rng.choice([1, 2, 3, 7, 32])
        counts = [rng.choice([1, 3, 7, rng.randint(1, 4000)]) for _ in range(layers)]
        min_budgets, max_budgets = limits(rng, layers)
        total = rng.randint(sum(min_budgets), sum(max_budgets))
        expected = slow_split(counts, total, min_budgets, max_budgets)
        assert allocate_by_counts(counts, total, min_budgets, max_budgets).tokens == expected


def test_equal_remainders_of_counts_go_to_the_lower_index():
    """Half a token is left over in each; logarithms and exponentials distinguish the two."""
    assert allocate_by_counts([4, 12], 122, [0] * 2, [999] * 2).tokens == [31, 91]
    assert allocate([math.log(4), math.log(12)], 122, [0] * 2, [999] * 2).tokens == [30, 92]


def test_unbound_layers_keep_the_ratios_of_their_weights():
    rng = random.Random(5)
    for _ in range(200):
        layers = rng.randint(1, 9)
        weights = [rng.gauss(0, 1.5) for _ in range(layers)]
        min_budgets, max_budgets = (
            [rng.randint(0, 40) for _ in range(layers)],
            [rng.randint(60, 900)] * layers,
        )
        total = rng.randint(sum(min_budgets), sum(max_budgets))
        tokens = allocate(weights, total, min_budgets, max_budgets).tokens
        for got, share in zip(
            tokens, slow_shares(weights, total, min_budgets, max_budgets), strict=True
        ):
            assert abs(got - share) < 1


def test_what_is_left_goes_to_the_largest_remainders_and_ties_to_the_lower_index():
    equal = [0.0, 0.0, 0.0]
    assert allocate(equal, 100, [0] * 3, [100] * 3).tokens == [34, 33, 33]
    assert allocate(equal, 101, [0] * 3, [100] * 3).tokens == [34, 34, 33]
    shares = [math.log(x) for x in (1.2, 2.7, 3.1)]  # of 7: as they are
    assert allocate(shares, 7, [0] * 3, [9] * 3).tokens == [1, 3, 3]


def test_a_remainder_passes_by_a_layer_at_its_limit():
    shares = [math.log(x) for x in (2.9, 1.6, 1.5)]
    assert allocate(shares, 6, [0] * 3, [2, 9, 9]).tokens == [2, 2, 2]


def test_a_vanishing_weight_lands_on_the_lower_limit():
    assert allocate([0.0, -600.0, -5e6], 100, [4, 5, 6], [100] * 3).tokens == [89, 5, 6]
    assert allocate([0.0, -600.0, -5e6], 100, [0] * 3, [60] * 3).tokens == [60, 40, 0]


def test_weights_have_no_scale():
    weights = [0.3, -2.0, 1.0, 0.0]
    shifted = [weight + 12345.0 for weight in weights]
    limits = ([3] * 4, [90] * 4)
    assert allocate(weights, 200, *limits).tokens == allocate(shifted, 200, *limits).tokens


@pytest.mark.parametrize("weight", [float("-inf"), float("nan")])
def test_weights_that_are_no_numbers_are_refused(weight):
    with pytest.raises(ValueError, match="weight"):
        allocate([weight], 1, [0], [1])
