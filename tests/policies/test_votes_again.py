"""The newest queries vote at every cut: worked example, the oracle, heads, families, refusals."""

import pytest
import torch

import kvtool
from kvtool import parse_policy
from kvtool.cache.steps.view import vote_again
from kvtool.errors import UsageError
from kvtool.generation import decode_step, prefill
from kvtool.policies.parts import SlotView
from kvtool.policies.policy import Policy
from kvtool.policies.read.quest import Quest
from tests.cache.test_oracle import Run, follow
from tests.models_for_tests import anchored_model, family_model, peaky_model, prompt, random_ids
from tests.policies.test_every import rows_are_the_rows_alone
from tests.reference.policies import VotesAgain, build
from tests.tiers import first

BUDGET = 20
KEYS = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 1], [2, 0, 0, 0], [0, 0, 1, 1], [0, 2, 0, 0]]
QUERIES = [[1, 0, 1, 0], [0, 1, 0, 1]]


class Newest:
    """Queries of the last two of six tokens, the newest one in the first row."""

    scale, softcap = 0.5, None
    positions = torch.tensor([[5, 4]])

    def by_kv_head(self, kv_heads):
        query = torch.tensor([QUERIES[1], QUERIES[0]], dtype=torch.float32)
        return query[None, None, None], self.positions >= 0

    def sinks_by_kv_head(self, kv_heads):
        return None


def test_worked_votes():
    """Query 4 sees 0 to 4: e^.5 e^.5 1 e^1 e^.5; query 5 all: 1 e^.5 e^1 1 e^.5 e^1."""
    policy = parse_policy("snapkv(window=2,kernel=3)+every")
    view = SlotView(
        values=(),
        positions=torch.arange(6)[None, None],
        tokens_seen=6,
        budget=4,
        held=6,
        keys=(torch.tensor(KEYS, dtype=torch.float32)[None, None],),
        queries=(Newest(),),
    )
    view, rows = vote_again(policy, view, None)
    first = [1.648721, 1.648721, 1.0, 2.718282, 1.648721]
    second = [1.0, 1.648721, 2.718282, 1.0, 1.648721, 2.718282]
    worked = [[w / sum(second) for w in second], [w / sum(first) for w in first] + [0.0]]
    assert rows.weights[0, 0, 0].tolist() == [pytest.approx(row, abs=1e-6) for row in worked]
    votes = [sum(column) for column in zip(*worked, strict=True)]
    pooled = [max(votes[0:2]), max(votes[0:3]), max(votes[1:4]), max(votes[2:4])]
    found = policy.ranking.importance({}, view, rows)[0, 0]
    assert found[:4].tolist() == pytest.approx(pooled, abs=1e-6)
    assert policy.ranking.protected({}, view, 2)[0, 0].tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize(
    ("mode", "modifier", "options", "family"),
    [
        ("full", "every", {"window": 5}, "llama"),
        # the last block is one token
        ("block:20", "every caote", {"window": 3, "kernel": 3, "pool": "avg"}, "qwen3"),
    ],
)
def test_kept_positions_and_logits_equal_the_oracle(mode, modifier, options, family):
    inside = ",".join(f"{key}={value}" for key, value in options.items())
    spelled = f"snapkv({inside})" + ("+caote" if "caote" in modifier else "") + "+every(steps=5)"
    follow(
        anchored_model(family),
        lambda: build("votes again", BUDGET, modifier, **options),
        spelled,
        BUDGET,
        mode,
        prompt(61),
        new=12,
    )


@pytest.mark.parametrize("base", first(1, ["adakv(window=4)", "snapkv(window=4)+ada(share=0)"]))
def test_heads_are_cut_back_to_what_the_prompt_has_left_them(base):
    model = anchored_model("llama")
    held = Run(model, f"{base}+every(steps=5)", BUDGET, "full", prompt(61)).kept()
    kvtool.detach(model)
    counts = [[len(head) for head in held[layer]] for layer in sorted(held)]
    assert any(len(set(own)) > 1 for own in counts)
    assert all(sum(own) == BUDGET * len(own) for own in counts)
    budgets = iter(counts)

    class Heads(VotesAgain):
        def __init__(self):
            super().__init__(BUDGET, window=4, budgets=next(budgets))

    follow(
        model,
        lambda: paced(Heads()),
        f"{base}+every(steps=5)",
        BUDGET,
        "full",
        prompt(61),
        new=12,
    )


def paced(policy):
    from tests.reference.policies import Paced

    return Paced(policy, 5)


@pytest.mark.parametrize(
    ("family", "base"),  # as it is, a cap, sinks
    [
        ("llama", "adakv(window=4)"),
        ("gemma2", "snapkv(window=4)"),
        ("gpt_oss", "pyramidkv(window=4)"),
    ],
)
def test_a_prompt_is_cut_as_without_it(family, base):
    kept = []
    for policy in (base, f"{base}+every(steps=5)"):
        model = family_model(family)
        cache = kvtool.build_cache(model, policy, BUDGET)
        prefill(model, cache, random_ids(50))
        kept.append([cache.kept_positions(layer).tolist() for layer in range(2)])
    assert kept[0] == kept[1]


@pytest.mark.parametrize(
    "case",
    first(2, [("adakv", "40%"), ("snapkv+caote", BUDGET), ("snapkv+chunk", "40%")]),
    ids=str,
)
def test_rows_that_are_cut_at_other_times_are_the_rows_alone(case):
    base, budget = case
    name, _, rest = base.partition("+")
    settings = {"chunk": "chunk(length=4)"}.get(rest, rest)
    spelled = f"{name}(window=4){'+' * bool(rest)}{settings}+every(steps=6)"
    rows_are_the_rows_alone(spelled, budget)


def test_the_newest_queries_vote_on_a_short_turn_too():
    """Those of the answer before it: a turn of one token does not decide alone."""
    model = peaky_model("llama")
    cache = kvtool.build_cache(model, "snapkv(window=4)+every(steps=6)", BUDGET)
    prefill(model, cache, random_ids(30))
    for token in random_ids(5, seed=9)[0]:
        decode_step(model, cache, token[None])
    prefill(model, cache, random_ids(1, seed=7))
    kept = cache.kept_positions(0)[0]
    assert kept.shape[-1] == BUDGET
    assert {32, 33, 34, 35} <= set(kept[0].tolist())


def test_what_makes_no_sense_is_refused():
    snapkv = parse_policy("snapkv+every")
    with pytest.raises(UsageError, match="the tables of `quest` only grow"):
        Policy(snapkv.score, pace=snapkv.pace, read=Quest(k=4))
    with pytest.raises(UsageError, match="cannot follow heads of unequal counts while they decode"):
        parse_policy("adakv+every+calidrop")
