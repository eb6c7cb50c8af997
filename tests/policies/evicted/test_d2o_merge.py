"""D2O's merging: worked examples, then what must hold of it."""

import math

import pytest
import torch

from kvtool.policies.evicted import d2o_merge
from kvtool.policies.evicted.d2o_merge import (
    D2OMerge,
    merge_many,
    merge_one,
    nearest_kept,
    next_threshold,
    unit_keys,
)
from kvtool.policies.evicted.eviction import Eviction

KEPT = [[1.0, 0.0], [0.0, 1.0]]
KEPT_VALUES = [[1.0, 1.0], [2.0, 0.0]]


def one_head(rows):
    return torch.tensor([[rows]])


def leave(*args, **settings):
    """Tokens that leave beside those that stay -> memory, keys and values of those that stay."""
    return absorb(*args, **settings)[1:]


def absorb(
    keys, values, kept=KEPT, kept_values=KEPT_VALUES, decoded=False, memory=None, **settings
):
    """The same behind which of those that leave were merged."""
    stay, leaves = len(kept), len(keys)
    all_keys, all_values = one_head(kept + keys), one_head(kept_values + values)
    positions = torch.arange(stay + leaves, dtype=torch.int32)[None, None]
    kept_keys, kept_values = all_keys[:, :, :stay].clone(), all_values[:, :, :stay].clone()
    part = D2OMerge(**settings)
    memory = part.start(1, 1, torch.device("cpu")) if memory is None else memory
    merged = part.absorb(
        memory,
        Eviction(
            keys=all_keys,
            values=all_values,
            state={},
            evicted=torch.arange(stay, stay + leaves)[None, None],
            evicted_positions=positions[:, :, stay:],
            kept_keys=kept_keys,
            kept_values=kept_values,
            kept_state={},
            kept_positions=positions[:, :, :stay],
            tokens_seen=stay + leaves,
            layer=0,
            importance=None if decoded else torch.zeros(1, 1, stay + leaves),
        ),
    )
    return merged, memory, kept_keys[0, 0], kept_values[0, 0]


@pytest.mark.parametrize("decoded", [False, True])
def test_what_is_not_similar_enough_is_not_told_as_merged(decoded):
    evicted = [[0.8, 0.6], [0.6, 0.8], [-1.0, 0.0]]
    merged, memory, *_ = absorb(evicted, [[3.0, 1.0], [0.0, 2.0], [5.0, 5.0]])
    assert merged.tolist() == [[[True, True, False]]]
    if decoded:  # similarity 0 is below the threshold that there is since
        assert not absorb([[-1.0, 0.0]], [[5.0, 5.0]], decoded=True, memory=memory)[0].any()


def test_worked_prompt():
    # highest similarities .8, .8, 0 (to 0, 1, 1): mean .533333, so the third token is dropped;
    # weights e / (e + e^.8) = .549834 and .450166
    evicted = [[0.8, 0.6], [0.6, 0.8], [-1.0, 0.0]]
    similarity, target = nearest_kept(
        one_head(evicted), unit_keys(one_head(KEPT)), torch.tensor([[[0, 1]]], dtype=torch.int32)
    )
    torch.testing.assert_close(similarity, torch.tensor([[[0.8, 0.8, 0.0]]]))
    assert target.tolist() == [[[0, 1, 1]]]
    assert math.e / (math.e + math.exp(0.8)) == pytest.approx(0.549834, abs=1e-6)
    memory, keys, values = leave(evicted, [[3.0, 1.0], [0.0, 2.0], [5.0, 5.0]])
    torch.testing.assert_close(memory["tau"], torch.tensor([[0.533333]]), atol=1e-6, rtol=0)
    expected = torch.tensor([[0.909967, 0.270100], [0.270100, 0.909967]])
    torch.testing.assert_close(keys, expected, atol=1e-6, rtol=0)
    expected = torch.tensor([[1.900332, 1.0], [1.099668, 0.900332]])
    torch.testing.assert_close(values, expected, atol=1e-6, rtol=0)


def test_worked_two_into_one():
    # weights .379152 and twice .310424; each evicted token has its own, they sum to 1
    _, keys, values = leave([[0.8, 0.6], [0.8, -0.6]], [[3.0, 1.0], [1.0, 3.0]])
    torch.testing.assert_close(keys[0], torch.tensor([0.875830, 0.0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(values[0], torch.tensor([1.620848] * 2), atol=1e-6, rtol=0)
    assert keys[1].tolist() == KEPT[1]
    assert values[1].tolist() == KEPT_VALUES[1]


def test_worked_moving_threshold():
    # .7 * .7 + .3 * .533333 = .65; .7 * .4 + .3 * .65 = .475; .7 * .9 + .3 * .475 = .7725
    memory = {"tau": torch.tensor([[1.6 / 3]])}
    kept = [[1.0, 0.0], [-1.0, 0.0]]
    for similarity, tau, merges in [(0.7, 0.65, True), (0.4, 0.475, False), (0.9, 0.7725, True)]:
        key = [similarity, math.sqrt(1 - similarity**2)]
        memory, keys, _ = leave([key], [[3.0, 1.0]], kept=kept, decoded=True, memory=memory)
        torch.testing.assert_close(memory["tau"], torch.tensor([[tau]]), atol=1e-6, rtol=0)
        assert (keys[0].tolist() != kept[0]) == merges
        assert keys[1].tolist() == kept[1]


@pytest.mark.parametrize("beta", [0.05, 0.3, 0.7, 0.95])
def test_one_victim_is_judged_by_the_threshold_before_it_whatever_beta(beta):
    generator = torch.Generator().manual_seed(3)
    similarity = torch.rand(1, 1, 500, generator=generator)
    before = torch.rand(1, 500, generator=generator)
    after = next_threshold(
        before, similarity[0].T[None], torch.ones(1, 500, 1, dtype=torch.bool), beta
    )
    assert torch.equal(similarity[0] >= after, similarity[0] >= before)
    same = torch.full((1, 1), 0.3)
    assert next_threshold(same, same[None], torch.tensor([[[True]]]), beta).item() == same.item()


def test_a_head_that_loses_nothing_keeps_its_threshold():
    tau = torch.tensor([[0.2, float("nan")]])
    valid = torch.zeros(1, 2, 3, dtype=torch.bool)
    after = next_threshold(tau, torch.ones(1, 2, 3), valid, 0.7)
    torch.testing.assert_close(after, tau, equal_nan=True)


def test_ties_go_to_the_lower_position_wherever_it_lies():
    kept = one_head([[0.0, 1.0], [2.0, 0.0], [3.0, 0.0], [1.0, 0.0]])
    positions = torch.tensor([[[3, 9, 5, -1]]], dtype=torch.int32)
    _, target = nearest_kept(one_head([[1.0, 0.0]]), unit_keys(kept), positions)
    assert target.item() == 2  # 5 is before 9, and the last slot is empty


def test_one_token_is_merged_in_the_same_way_as_many():
    generator = torch.Generator().manual_seed(0)
    kept = torch.randn(2, 3, 7, 5, generator=generator)
    source = torch.randn(2, 3, 4, 5, generator=generator)
    evicted = torch.randint(0, 4, (2, 3, 1), generator=generator)
    target = torch.randint(0, 7, (2, 3, 1), generator=generator)
    weight = torch.rand(2, 3, 1, generator=generator).exp()
    weight[1, 2] = 0
    first, second = kept.clone(), kept.clone()
    merge_one(first, source.gather(2, evicted[..., None].expand(-1, -1, -1, 5)), target, weight)
    merge_many(second, source, evicted, target, weight)
    torch.testing.assert_close(first, second)
    assert torch.equal(first[1, 2], kept[1, 2])
    assert ((first != kept).any(-1).sum(-1) <= 1).all()


def test_values_alone():
    _, keys, values = leave([[0.8, 0.6]], [[3.0, 1.0]], merge="v")
    assert keys.tolist() == KEPT
    assert values[0].tolist() != KEPT_VALUES[0]


def test_bfloat16_is_averaged_in_float32():
    kept = torch.full((1, 1, 1, 2), 256.0, dtype=torch.bfloat16)
    source = torch.full((1, 1, 600, 2), 1.0, dtype=torch.bfloat16)
    evicted = torch.arange(600)[None, None]
    merge_many(kept, source, evicted, torch.zeros_like(evicted), torch.full(evicted.shape, math.e))
    assert kept[0, 0, 0, 0].item() == pytest.approx((256 + 600) / 601, rel=0.01)


def test_how_many_are_merged_at_a_time_changes_nothing(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, 12, 2, generator=generator).tolist()
    whole = absorb(keys, values)
    monkeypatch.setattr(d2o_merge, "_CHUNK", 5)
    for own, other in zip(absorb(keys, values), whole, strict=True):
        torch.testing.assert_close(own, other)


def test_a_gpu_merges_more_at_a_time_in_bounded_memory():
    kept = torch.empty(1, 8, 1024, 128, device="meta")
    evicted = torch.empty(1, 8, 15_360, device="meta")
    counts = [part.shape[-1] for (part,) in d2o_merge._chunks(kept, evicted)]
    assert sum(counts) == 15_360
    assert max(counts) * 8 * 1024 == d2o_merge._PAIRS
