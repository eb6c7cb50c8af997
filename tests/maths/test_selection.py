import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.maths.selection import keep_top, lowest, pool_votes, top_mask
from tests.reference.selection import choose_kept

# few different numbers, so that most of them tie; slots in any order, some empty
SCORES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, float("inf"), float("-inf"), 1e-38])
SLOTS = st.integers(1, 13).flatmap(
    lambda n: st.tuples(
        st.lists(SCORES, min_size=n, max_size=n),
        st.permutations(range(n)),
        st.lists(st.booleans(), min_size=n, max_size=n),
    )
)


def tensors(scores, positions, flags):
    return (
        torch.tensor([[scores]], dtype=torch.float32),
        torch.tensor([[positions]], dtype=torch.int32),
        torch.tensor([[flags]]),
    )


@settings(max_examples=60)
@given(SLOTS, st.integers(1, 13))
def test_keep_top_is_a_stable_sort(slots, budget):
    scores, positions, forced = slots
    budget = min(budget, len(scores))
    if sum(forced) >= budget:
        forced = [False] * len(scores)
    numbers, places, mask = tensors(scores, positions, forced)
    indices, kept = keep_top(numbers, places, budget, mask, budget)
    by_position = [scores[positions.index(p)] for p in range(len(scores))]
    ahead = {p for p in range(len(scores)) if forced[positions.index(p)]}
    assert kept[0, 0].tolist() == choose_kept(by_position, budget, ahead)
    assert [positions[i] for i in indices[0, 0].tolist()] == kept[0, 0].tolist()


@settings(max_examples=60)
@given(SLOTS, st.integers(1, 13), st.sampled_from(["max", "avg"]))
def test_slots_that_are_known_to_be_in_order_give_the_same(slots, budget, pool):
    scores, positions, flags = slots
    budget, kernel = min(budget, len(scores)), 3
    numbers, places, mask = tensors(scores, [3 * p for p in sorted(positions)], flags)
    found = [keep_top(numbers, places, budget, mask, budget, in_order=each) for each in (0, 1)]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    votes = numbers.nan_to_num()
    given = (votes, places, mask)
    pooled = [pool_votes(*given, kernel=kernel, pool=pool, in_order=each) for each in (0, 1)]
    assert torch.equal(*pooled)


@settings(max_examples=60)
@given(SLOTS)
def test_lowest_is_what_keeping_all_but_one_leaves(slots):
    scores, positions, protected = slots
    if all(protected) or float("inf") in scores:
        return  # an infinite score may tie with protection, as the next test says
    slot = int(lowest(*tensors(scores, positions, protected)))
    by_position = [scores[positions.index(p)] for p in range(len(scores))]
    ahead = {p for p in range(len(scores)) if protected[positions.index(p)]}
    stay = choose_kept(by_position, len(scores) - 1, ahead)
    assert {positions[slot]} == set(range(len(scores))) - set(stay)


def test_protected_slots_stay_even_where_all_the_rest_is_infinite():
    inf = float("inf")
    scores, positions, protected = tensors([inf, inf, 1.0], [0, 1, 2], [False, False, True])
    assert int(lowest(scores, positions, protected)) == 1


@settings(max_examples=60)
@given(SLOTS, st.integers(0, 13))
def test_top_mask_marks_the_best(slots, count):
    scores, positions, among = slots
    count = min(count, sum(among))
    numbers, places, allowed = tensors(scores, positions, among)
    mask = top_mask(numbers, places, count, allowed)
    free = [i for i in range(len(scores)) if among[i]]
    best = sorted(free, key=lambda i: (-scores[i], positions[i]))[:count]
    assert mask[0, 0].nonzero()[:, 0].tolist() == sorted(best)
    assert torch.equal(mask, top_mask(numbers, places, torch.tensor([[[count]]]), allowed))


def test_rows_with_their_own_budget():
    scores = torch.tensor([[[1.0, 3.0, 2.0, 0.0]], [[1.0, 3.0, 2.0, 0.0]]])
    positions = torch.tensor([[[0, 1, 2, 3]], [[0, 1, 2, -1]]])
    budget = torch.tensor([3, 1])[:, None, None]
    indices, kept = keep_top(scores, positions, budget, None, 3)
    assert kept.tolist() == [[[0, 1, 2]], [[1, -1, -1]]]
    assert indices[0, 0].tolist() == [0, 1, 2]
    assert indices[1, 0, 0] == 1


def test_empty_slots_are_never_kept_before_stored_ones():
    scores = torch.tensor([[[9.0, float("-inf"), 9.0]]])
    positions = torch.tensor([[[-1, 0, -1]]])
    indices, kept = keep_top(scores, positions, 1, None, 1)
    assert (indices.item(), kept.item()) == (1, 0)
    assert not top_mask(scores, positions, 1)[0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_protection_needs_no_made_up_score(dtype):
    # 256 + 1 is 256 in bfloat16: a score of its own could tie with what it protects from
    scores = torch.tensor([[[256.0, 256.0, 1.0]]]).to(dtype)
    forced = torch.tensor([[[False, False, True]]])
    _, kept = keep_top(scores, torch.tensor([[[0, 1, 2]]]), 2, forced, 2)
    assert kept.tolist() == [[[0, 2]]]
