"""CaM: worked examples, then what must hold of it."""

import math

import pytest
import torch

from kvtool.policies.evicted.cam import CaM, merge_probability, spans
from kvtool.policies.evicted.eviction import Eviction

OWN, TARGETS = [2.0, 4.0], [[1.0, 1.0], [3.0, 0.0], [0.0, 2.0]]


def leave(part, sums, values, evicted, kept, decoded=False, order=None, tokens_seen=None):
    """Values of the kept tokens, by position, after some have left one head."""
    count = len(sums)
    places = torch.tensor(order if order is not None else range(count))
    values = torch.tensor([values])[None][:, :, places]
    state = {"attention_sum": torch.tensor([[sums]])[:, :, places]}
    slot = {position: i for i, position in enumerate(places.tolist())}
    out = torch.tensor([[[slot[p] for p in evicted]]])
    stay = torch.tensor([[[slot[p] for p in kept]]])
    if decoded:
        kept_values, kept_state = values, state
        kept_positions = places.to(torch.int32)[None, None].scatter(2, out, -1)
    else:
        kept_values = values[:, :, stay[0, 0]].clone()
        kept_state = {"attention_sum": state["attention_sum"].gather(2, stay)}
        kept_positions = torch.tensor([[kept]], dtype=torch.int32)
    eviction = Eviction(
        keys=values,
        values=values,
        state=state,
        evicted=out,
        evicted_positions=torch.tensor([[evicted]], dtype=torch.int32),
        kept_keys=kept_values,
        kept_values=kept_values,
        kept_state=kept_state,
        kept_positions=kept_positions,
        tokens_seen=count if tokens_seen is None else tokens_seen,
        layer=0,
        importance=None if decoded else torch.zeros(1, 1, count),
    )
    before = kept_values.clone()
    merged = part.absorb({}, eviction)
    if out.shape[2] == 1:  # what is reported is what was done
        assert merged.item() == (not torch.equal(kept_values, before))
    return kept_values[0, 0, stay[0, 0]] if decoded else kept_values[0, 0]


def seed_that_merges(chance_below):
    """A seed whose draw for position 0 at 4 tokens seen is below a number, as a twin finds it."""
    from tests.reference.merging import CaM as Slow

    return next(seed for seed in range(100) if Slow(0, seed=seed).draw(0, 4, 0) < chance_below)


@pytest.mark.parametrize("decoded", [False, True])
def test_worked_example(decoded):
    # .3 / mean(.2, .4, .4) = .9; merged, each target gets a third of [2, 4]
    chance = merge_probability(torch.tensor(0.3), torch.tensor(1.0), torch.tensor(3))
    assert chance.item() == pytest.approx(0.9)
    part = CaM(m=3, seed=seed_that_merges(0.9))
    sums = [0.3, 0.2, 0.4, 0.4]
    got = leave(part, sums, [OWN, *TARGETS], [0], [1, 2, 3], decoded=decoded)
    expected = torch.tensor([[1.6667, 2.3333], [3.6667, 1.3333], [0.6667, 3.3333]])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    part = CaM(m=3, deterministic=True)
    got = leave(part, sums, [OWN, *TARGETS], [0], [1, 2, 3], decoded=decoded)
    expected = torch.tensor(TARGETS) + 0.9 / 3 * torch.tensor(OWN)
    torch.testing.assert_close(got, expected)


def test_an_unmerged_token_changes_nothing():
    from tests.reference.merging import CaM as Slow

    seed = next(seed for seed in range(100) if Slow(0, seed=seed).draw(0, 4, 0) >= 0.9)
    got = leave(CaM(m=3, seed=seed), [0.3, 0.2, 0.4, 0.4], [OWN, *TARGETS], [0], [1, 2, 3])
    assert got.tolist() == TARGETS


@pytest.mark.parametrize("decoded", [False, True])
def test_slots_may_lie_in_any_order_and_only_followers_count(decoded):
    values = [[float(10**i)] for i in range(5)]
    part = CaM(m=2, deterministic=True)
    order = [3, 1, 4, 0, 2] if decoded else None
    got = leave(part, [1.0] * 5, values, [1], [0, 2, 3, 4], decoded=decoded, order=order)
    assert got[:, 0].tolist() == [1, 100 + 5, 1000 + 5, 10000]
    got = leave(part, [1.0] * 5, values, [3], [0, 1, 2, 4], decoded=decoded, order=order)
    assert got[:, 0].tolist() == [1, 10, 100, 11000]  # one follower takes it all
    got = leave(part, [1.0] * 5, values, [4], [0, 1, 2, 3], decoded=decoded, order=order)
    assert got[:, 0].tolist() == [1, 10, 100, 1000]  # none follows


def test_many_victims_add_up_from_what_was_before():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(40, 3, generator=generator)
    sums = torch.rand(40, generator=generator)
    kept = sorted(torch.randperm(40, generator=generator)[:9].tolist())
    evicted = [p for p in range(40) if p not in kept]
    got = leave(CaM(m=4, deterministic=True), sums.tolist(), values.tolist(), evicted, kept)
    expected = values.clone()
    for i in evicted:
        targets = [j for j in kept if j > i][:4]
        if targets:
            chance = min(float(sums[i] / sums[targets].mean()), 1.0)
            expected[targets] += chance * values[i] / len(targets)
    torch.testing.assert_close(got, expected[kept], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize("m", [1, 3, 32])
def test_followers_of_next_to_no_attention_are_summed_by_themselves(decoded, m):
    """Beside a sink of 1e4, whose running sums in float64 are multiples of 1.8e-12."""
    sums = [1e4, 3.8e-22, *[1e-15] * 3, 2.5e3, 1e-21, 2e-15, 3e-15]
    kept, evicted = [0, 2, 3, 4, 5, 7, 8], [1] if decoded else [1, 6]
    values = [[1.0 if p in evicted else 0.0] for p in range(len(sums))]
    part = CaM(m=m, deterministic=True)
    got = leave(part, sums, values, evicted, kept, decoded=decoded)[:, 0]
    expected = dict.fromkeys(kept, 0.0)
    for victim in evicted:
        targets = [p for p in kept if p > victim][:m]
        chance = min(sums[victim] * len(targets) / math.fsum(sums[p] for p in targets), 1.0)
        for p in targets:
            expected[p] += chance / len(targets)
    assert 0 < max(expected.values()) < 1e-6
    torch.testing.assert_close(got, torch.tensor(list(expected.values())), rtol=1e-5, atol=1e-20)


def test_zeros():
    nothing, one = torch.tensor(0.0), torch.tensor(1)
    assert merge_probability(nothing, nothing, one).item() == 0
    assert merge_probability(torch.tensor(0.1), nothing, one).item() == 1
    assert merge_probability(torch.tensor(0.1), nothing, torch.tensor(0)).item() == 0


def test_the_draws_have_the_expectation_of_the_deterministic_form():
    hits = 0
    for seed in range(400):
        got = leave(CaM(m=1, seed=seed), [0.3, 1.0], [[1.0], [0.0]], [0], [1])
        hits += got.item()
    assert abs(hits - 120) < 5 * (400 * 0.3 * 0.7) ** 0.5


def test_spans_end_where_a_head_holds_fewer():
    first, last = spans(torch.tensor([[[1, 5, 9]]]), torch.tensor([[[0, 2, 4, 6, -1]]]), m=2)
    assert first.tolist() == [[[1, 3, 4]]]
    assert last.tolist() == [[[3, 4, 4]]]
