"""Expected Attention: scores and choice against the worked example, the slow twin and a model."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtool
from kvtool import parse_policy
from kvtool.errors import UsageError
from kvtool.generation import prefill
from kvtool.maths.rotation import Rotation
from kvtool.maths.statistics import add_moments
from kvtool.policies.evidence import MomentsAsked, QueryMoments
from kvtool.policies.parts import Evidence, Score, SlotView
from kvtool.policies.policy import Policy
from tests.models_for_tests import peaky_model, random_ids
from tests.reference.expected import Expected, halves

KEYS = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 1], [2, 0, 0, 0], [0, 0, 1, 1], [0, 2, 0, 0]]
VALUES = [[1, 0], [0, 2], [3, 0], [0, 1], [1, 1], [2, 2]]
QUERIES = [[1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 0, 0], [2, 0, 0, 0], [0, 0, 1, 1]]  # from token 1 on
FREQUENCIES = [1.0, 0.1]


def moments_of(queries, sinks, rotation=None, scale=None):
    """Of (heads, tokens, dim), those of the first tokens left out."""
    heads, _, dim = queries.shape
    zeros = torch.zeros(1, heads), torch.zeros(1, heads, dim), torch.zeros(1, heads, dim, dim)
    asked = queries[None, :, sinks:]
    count, mean, scatter = add_moments(*zeros, asked, torch.ones(1, asked.shape[2]).bool())
    covariance = scatter / count.clamp(min=1)[..., None, None]
    return QueryMoments(mean, covariance, dim**-0.5 if scale is None else scale, rotation)


def view_of(keys, values, moments, places=None, held=None):
    """Slots, (kv_heads, slots, dim) each."""
    heads, slots, _ = keys.shape
    places = torch.arange(slots) if places is None else places
    return SlotView(
        values=(values[None],),
        positions=places.to(torch.int32).expand(1, heads, slots),
        tokens_seen=int(places.max()) + 1,
        budget=slots - 1,
        held=slots if held is None else held,
        keys=(keys[None],),
        moments=() if moments is None else (moments,),
    )


def scores(policy, view):
    return parse_policy(policy).ranking.importance({}, view, None)[0]


def slow(keys, queries, vectors, **options):
    """Scores of the twin, by head, of slots in the order of their positions."""
    twin = Expected(1, **options)
    twin.look([dict(enumerate(head.tolist())) for head in keys])
    twin.hear(queries.tolist())
    places = range(keys.shape[1])
    found = []
    for head in range(len(keys)):
        found.append(twin.scores(head, places, dict(enumerate(vectors[head].tolist()))))
    return torch.tensor(found)


def test_worked_attention_and_scores():
    keys, values = torch.tensor(KEYS)[None].float(), torch.tensor(VALUES)[None].float()
    queries = torch.tensor([[9.0] * 4, *QUERIES])[None]  # that of the sink counts for nothing
    rotation = Rotation(torch.tensor(FREQUENCIES), False)
    view = view_of(keys, values, moments_of(queries, 1, rotation))
    attention = torch.tensor([[0, 0.185851, 0.170656, 0.282667, 0.205536, 0.155290]])
    expected = torch.tensor([[0, 0.371701, 0.511969, 0.282667, 0.290672, 0.439227]])
    found = scores("expected(sinks=1,future=2,values=false)", view)
    torch.testing.assert_close(found, attention, atol=1e-6, rtol=0)
    found = scores("expected(sinks=1,future=2,epsilon=0)", view)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    options = {"sinks": 1, "future": 2, "epsilon": 0, "turn": halves(FREQUENCIES)}
    twin = slow(keys, queries, values, **options)
    torch.testing.assert_close(twin, expected, atol=1e-6, rtol=0)
    twin = slow(keys, queries, values, **options | {"values": False})
    torch.testing.assert_close(twin, attention, atol=1e-6, rtol=0)


def test_epsilon_is_added_before_the_length_of_the_value_counts():
    """(0.170656 + 0.25) * 3 = 1.261968; the sink, whose attention does not count, keeps 0."""
    keys, values = torch.tensor(KEYS)[None].float(), torch.tensor(VALUES)[None].float()
    queries = torch.tensor([[9.0] * 4, *QUERIES])[None]
    view = view_of(keys, values, moments_of(queries, 1, Rotation(torch.tensor(FREQUENCIES), False)))
    found = scores("expected(sinks=1,future=2,epsilon=0.25)", view)
    weighed = torch.tensor([[0, 0.871702, 1.261968, 0.532667, 0.644225, 1.146333]])
    torch.testing.assert_close(found, weighed, atol=2e-6, rtol=0)
    options = {"sinks": 1, "future": 2, "epsilon": 0.25, "turn": halves(FREQUENCIES)}
    torch.testing.assert_close(slow(keys, queries, values, **options), weighed, atol=2e-6, rtol=0)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.data())
def test_scores_equal_the_slow_twin_in_any_order_of_slots(seed, data):
    source = torch.Generator().manual_seed(seed)
    heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    slots, sinks = data.draw(st.integers(2, 12)), data.draw(st.integers(0, 3))
    dim, pairs = 5, data.draw(st.integers(0, 2))  # what lies behind the pairs has no position
    keys, values = (torch.randn(heads, slots, size, generator=source) for size in (dim, 3))
    queries = torch.randn(heads * group, slots, dim, generator=source) + 2
    frequencies = [1.0, 0.03][:pairs]
    rotation = Rotation(torch.tensor(frequencies), False) if pairs else None
    turn = halves(frequencies) if pairs else None
    options = {
        "sinks": sinks,
        "future": data.draw(st.integers(1, 9)),
        "covariance": data.draw(st.booleans()),
        "values": data.draw(st.booleans()),
        "epsilon": data.draw(st.sampled_from([0.0, 0.01, 2.0])),
    }
    scale = data.draw(st.sampled_from([None, 0.2]))
    moments = moments_of(queries, sinks, rotation, scale)
    if not options["covariance"]:
        moments = QueryMoments(moments.mean, None, moments.scale, rotation)
    places = torch.randperm(slots, generator=source)
    view = view_of(keys[:, places], values[:, places], moments, places)
    spelled = ",".join(f"{name}={value}" for name, value in options.items()).lower()
    ours = scores(f"expected({spelled})", view)[:, places.argsort()]
    theirs = slow(keys, queries, values, turn=turn, scale=scale, **options)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-4)


def test_an_empty_slot_gets_nothing_and_takes_nothing():
    source = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 9, 4, generator=source), torch.randn(2, 9, 3, generator=source)
    queries = torch.randn(4, 9, 4, generator=source)
    places = torch.tensor([0, 1, -1, 3, 4, -1, 6, 7, 8])
    stored = places >= 0
    moments = moments_of(queries, 2, Rotation(torch.tensor(FREQUENCIES), True))
    held = torch.tensor([[[7], [7]]])
    found = scores("expected(sinks=2,epsilon=1)", view_of(keys, values, moments, places, held))
    kept = view_of(keys[:, stored], values[:, stored], moments, places[stored])
    assert (found[:, ~stored] == 0).all()
    assert (found[:, stored][:, 2:] > 0).all()
    torch.testing.assert_close(found[:, stored], scores("expected(sinks=2,epsilon=1)", kept))


def test_many_slots_are_scored_as_few_are():
    source = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(1, 2500, 4, generator=source) for _ in range(2))
    moments = moments_of(torch.randn(1, 30, 4, generator=source), 0)  # one head: one softmax
    whole = scores("expected(sinks=0,epsilon=0)", view_of(keys, values, moments))
    odd = torch.arange(2500) % 7 == 3
    some = view_of(keys[:, odd], values[:, odd], moments)
    ratio = whole[:, odd] / scores("expected(sinks=0,epsilon=0)", some)
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio), atol=0, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("sinks=-1", "expected: sinks must be 0 or more, got -1"),
        ("epsilon=-0.1", "expected: epsilon must be 0 or more, got -0.1"),
        ("epsilon=1e999", "expected: epsilon must be a finite number, got inf"),
        ("future=0", "expected: future must be 1 or more, got 0"),
        ("future=3000000000", "expected: future must be at most 2147483647"),
        ("values=2", "values"),
        ("positions=cache", "has no parameter `positions`"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, told):
    with pytest.raises(UsageError, match=told):
        kvtool.parse_policy(f"expected({settings})")


def test_the_sinks_are_below_the_budget():
    with pytest.raises(UsageError, match="budget 4 is not above sinks 4 of policy `expected`"):
        parse_policy("expected").check_budget(4)
    parse_policy("expected").check_budget(5)
    parse_policy("expected(sinks=0)").check_budget(1)


@pytest.mark.parametrize(
    ("cuts", "places", "told"),
    [
        ("prompt", "cache", "`other` turns queries back from their place in the text"),
        ("always", "text", "or decoded tokens at a pace of its own, not always"),
        ("never", "text", "or decoded tokens at a pace of its own, not never"),
    ],
)
def test_scores_that_cannot_go_by_moments_are_refused(cuts, places, told):
    @dataclass(frozen=True)
    class Other(Score):
        name, paper, evidence = "other", "-", Evidence.MOMENTS
        when, positions = cuts, places
        importance = parse_policy("expected").score.importance

    with pytest.raises(UsageError, match=told):
        Policy(Other())


def test_any_score_may_ask_for_moments_of_its_own():
    """The logits of the mean query as it is, the first token's left out."""

    @dataclass(frozen=True)
    class Mean(Score):
        name, paper, evidence, when = "mean", "-", Evidence.MOMENTS, "prompt"

        @property
        def moments(self):
            return MomentsAsked(sinks=1, covariance=False)

        def importance(self, state, view, rows):
            assert view.moments[0].covariance is None
            mean = view.moments[0].mean.unflatten(1, (view.keys[0].shape[1], -1)).mean(2)
            return (view.keys[0].float() @ mean[..., None])[..., 0]

    model, ids, seen = kvtool.attach(peaky_model("llama")), random_ids(40), []
    full = kvtool.build_cache(model, "full")
    full.watch_steps(lambda step, call, out: seen.append((call.query, call.key)))
    with torch.no_grad():  # at position 0 the first layer turns nothing
        model(ids, position_ids=torch.zeros_like(ids), past_key_values=full)
    (query, _), cache = seen[0], kvtool.build_cache(model, Policy(Mean()), 12)
    full = kvtool.build_cache(model, "full")
    full.watch_steps(lambda step, call, out: seen.append((call.query, call.key)))
    prefill(model, full, ids), prefill(model, cache, ids)
    keys = seen[2][1][0]
    mean = query[0, :, 1:].mean(1).view(2, 4, -1).mean(1)
    best = (keys @ mean[..., None])[..., 0].topk(12).indices.sort(-1).values
    assert torch.equal(cache.kept_positions(0)[0], best)
