"""Scores from outside: what they return and touch is checked, and reported with file and line."""

import inspect
import re
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import kvtool
from kvtool.errors import PolicyError, UsageError
from kvtool.generation import decode_step, prefill
from kvtool.policies.draws import drawn_for
from kvtool.policies.parts import Evicted, Evidence, Rescore, Score, Select
from kvtool.policies.policy import Policy, compose
from kvtool.policies.scores.h2o import H2O
from tests.models_for_tests import peaky_model, random_ids

BUDGET, PROMPT = 20, 40


@dataclass(frozen=True)
class Own(Score):
    """Accumulated attention and a recent window, with nothing wrong."""

    recent: int = 4
    seed: int = 0

    name: ClassVar = "own"
    paper: ClassVar = "-"
    evidence: ClassVar = Evidence.COLUMNS
    statistics: ClassVar = ("attention_sum",)
    attention: ClassVar = True

    def importance(self, state, view, rows):
        return state["attention_sum"]

    def protected(self, state, view, evicted):
        return view.recent(self.recent)

    def reserved(self, budget):
        return {"recent": self.recent}


def run(policy, new=3, batch=1, mask=None):
    """A prompt above the budget, and decoded tokens: the cache."""
    model = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(model, policy, BUDGET)
    prefill(model, cache, random_ids(PROMPT, batch=batch), mask)
    for token in random_ids(new, seed=1, batch=batch).T:
        decode_step(model, cache, token)
    return cache


def kept(cache):
    return [cache.kept_positions(layer).tolist() for layer in range(2)]


def broken(hook, function):
    """Own, with one hook or declaration replaced."""
    return dataclass(frozen=True)(type("Broken", (Own,), {hook: function, "__module__": __name__}))


def test_what_is_right_decides_as_its_twin_in_the_package():
    assert kept(run(Policy(Own()))) == kept(run("h2o(recent=4)"))


def test_a_score_of_the_package_is_not_wrapped():
    policy = kvtool.parse_policy("h2o+caote")
    assert policy.ranking is policy.score
    assert policy.rescoring is policy.rescore
    assert kvtool.parse_policy("snapkv+chunk").selecting is not None


def test_a_plain_forward_that_tracks_gradients_is_no_mistake_of_the_score():
    class Peak(Own):
        evidence: ClassVar = Evidence.ALL_ROWS

        def observe(self, state, view, rows):
            seen = state["attention_sum"][..., : rows.slots]
            torch.maximum(seen, rows.group_mean().amax(2), out=seen)

    model = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(model, Policy(Peak()), BUDGET)
    model(random_ids(PROMPT), past_key_values=cache)
    assert cache.kept_positions(0).shape[2] == BUDGET


def only_while_decoding(wrong):
    def importance(self, state, view, rows):
        return wrong(state["attention_sum"]) if view.block == 1 else state["attention_sum"]

    return importance


def rebinds(self, state, view, rows):
    state["attention_sum"] = state["attention_sum"] * 2
    return state["attention_sum"]


def adds_a_name(self, state, view, rows):
    state["mine"] = state["attention_sum"]
    return state["attention_sum"]


def exits(self, state, view, rows):
    raise SystemExit(0)


def raises(self, state, view, rows):
    return state["attention_sum"] / len([]) + 1 // 0


HOOKS = {
    "infinite": (
        "importance",
        lambda self, state, view, rows: state["attention_sum"] - float("inf"),
        "returns -inf for a token that is stored",
    ),
    "not a number": (
        "importance",
        lambda self, state, view, rows: state["attention_sum"] * float("nan"),
        "returns nan for a token that is stored",
    ),
    "not a number later": (
        "importance",
        only_while_decoding(lambda number: number * float("nan")),
        "returns nan for a token that is stored",
    ),
    "a shape later": (
        "importance",
        only_while_decoding(lambda number: number[0]),
        r"returns a tensor of shape \(2, 21\), not \(1, 1 or 2, 21\): batch, KV heads, slots",
    ),
    "one slot less": (
        "importance",
        lambda self, state, view, rows: state["attention_sum"][..., 1:],
        r"returns a tensor of shape \(1, 2, 39\), not \(1, 1 or 2, 40\): batch, KV",
    ),
    "no result": ("importance", lambda *shown: None, r"returns None, not \(1, 1 or 2, 40\)"),
    "rebinds": ("importance", rebinds, "does not support item assignment"),
    "adds a name": ("importance", adds_a_name, "does not support item assignment"),
    "asks another name": (
        "importance",
        lambda self, state, view, rows: state["attention_summ"],
        "raised KeyError: 'attention_summ'",
    ),
    "raises": ("importance", raises, "raised ZeroDivisionError: "),
    "exits": ("importance", exits, "raised SystemExit: 0"),
}


@pytest.mark.parametrize(("hook", "function", "told"), HOOKS.values(), ids=HOOKS)
def test_a_mistake_is_told_in_one_line_with_its_place(hook, function, told):
    with pytest.raises(PolicyError, match=told) as raised:
        run(Policy(broken(hook, function)()), batch=1)
    message = raised.value.report()
    assert message.startswith(f"{__name__}:Broken: {hook} ")
    assert "\n" not in message
    lines, first = inspect.getsourcelines(function)
    line = int(re.search(r"\(test_guard\.py, line (\d+)\)", message)[1])
    assert first <= line < first + len(lines)
    assert raised.value.exit_code == 1


def test_empty_slots_may_have_any_number():
    """A short entry of a padded batch has slots that nothing is in."""

    def mean(self, state, view, rows):
        return state["attention_sum"] / (view.positions >= 0).float()

    mask = torch.ones(2, PROMPT, dtype=torch.long)
    mask[1, :30] = 0
    cache = run(Policy(broken("importance", mean)()), batch=2, mask=mask)
    assert kept(cache) == kept(run("h2o(recent=4)", batch=2, mask=mask))


def observing(function):
    score = broken("observe", function)
    score.evidence = Evidence.ALL_ROWS
    return Policy(score())


def test_observe_writes_to_its_statistics_in_place():
    def rebinds_there(self, state, view, rows):
        state["attention_sum"] = state["attention_sum"] + 1

    with pytest.raises(PolicyError, match=r"observe raised TypeError: .* item assignment"):
        run(observing(rebinds_there))


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("statistics", ("attention_summ",), "`attention_summ`, which nobody sums.*did you mean"),
        ("statistics", "attention_sum", "are 'attention_sum', not a tuple of names"),
        ("statistics", ("count", "count"), "name `count` twice"),
        ("statistics", ("turn",), "or as kvtool names its own"),
        ("statistics", (), "are empty"),
        ("evidence", Evidence.ALL_ROWS, "observe is missing, and it is called where"),
        ("observe", lambda *shown: None, "is called only where evidence is ALL_ROWS"),
        ("evidence", "columns", "evidence is 'columns', not one of"),
        ("when", "ever", "when is 'ever', not one of always, prompt, never"),
        ("attention", lambda self: True, "attention is a method, and is read as a property"),
        ("min_budget", property(lambda self: 0), "min_budget is 0, not a count"),
        ("pace", property(lambda self: 3), "pace is 3, not one of None, Pace"),
        ("evicted", property(lambda self: 1 // 0), "evicted raised ZeroDivisionError"),
    ],
)
def test_declarations_that_would_do_nothing_are_refused(name, value, told):
    with pytest.raises(PolicyError, match=told) as raised:
        Policy(broken(name, value)())
    assert re.search(r"Broken: .*\((test_guard\.py, line \d+|in .*)\)", raised.value.message)


def test_what_is_reserved_of_every_budget_ends():
    policy = Policy(broken("reserved", lambda self, budget: {"recent": budget})())
    with pytest.raises(PolicyError, match=r"reserved counts .* tokens of a budget of"):
        _ = policy.min_budget


def test_other_parts_from_outside_are_checked_alike():
    class Halved(Rescore):
        name, paper = "halved", "-"

        def rescore(self, importance, view):
            return importance[:, :, 1:]

    class Backwards(Select):
        name, paper = "backwards", "-"

        def order(self, importance, view, protected):
            return importance.sum(1, keepdim=True) * float("nan")

    halved, backwards = (dataclass(frozen=True)(each) for each in (Halved, Backwards))
    h2o, snapkv = (kvtool.parse_policy(text) for text in ("h2o", "snapkv(window=4)"))
    with pytest.raises(PolicyError, match=r"Halved: rescore returns .* \(1, 2, 39\)"):
        run(replace(h2o, rescore=halved()))
    with pytest.raises(PolicyError, match=r"Backwards: order returns nan"):
        run(replace(snapkv, select=backwards()))


def test_a_use_of_evicted_tokens_that_nobody_would_run_is_refused():
    @dataclass(frozen=True)
    class Kept(Evicted):
        name, paper = "kept", "-"

    with pytest.raises(UsageError, match="`kept` is no Merging, so no evicted token reaches it"):
        replace(kvtool.parse_policy("h2o"), evicted=Kept())


def test_a_rescore_says_how_a_score_allows_it():
    silent = broken("attention", False)
    with pytest.raises(UsageError, match=f"`{__name__}:Broken` has none") as raised:
        compose(silent(), [kvtool.parse_policy("h2o+caote").rescore])
    assert "attention: ClassVar = True" in raised.value.hint


def test_a_score_that_says_that_it_draws_has_a_seed_of_its_own_for_each_text():
    drawing = broken("draws", True)
    seeds = {drawn_for(Policy(drawing(seed=7)), text).score.seed for text in ("a", "b", "c")}
    assert len(seeds) == 3
    assert drawn_for(Policy(Own(seed=7)), "a").score.seed == 7


def test_a_score_that_draws_without_a_seed_is_refused():
    @dataclass(frozen=True)
    class Seedless(Score):
        name: ClassVar = "seedless"
        paper: ClassVar = "-"
        draws: ClassVar = True

        def importance(self, state, view, rows):
            return torch.rand(view.positions.shape)

    with pytest.raises(PolicyError, match="draws is true, and there is no setting `seed`"):
        Policy(Seedless())


def test_a_score_that_goes_on_from_one_of_the_package_may_leave_observing_to_it():
    class Rows(H2O):
        evidence = Evidence.ALL_ROWS

    assert Policy(Rows()).observes_rows
