"""Numbers of hidden states beside the slots: whose they are, and what they cost nobody else."""

import gc
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import kvtool
from kvtool import KvtoolError, PolicyError
from kvtool.cache.whole.replay import replay
from kvtool.generation import decode_step, prefill
from kvtool.generation.graphs import StaticDecoding
from kvtool.generation.shared_prefill import can_share
from kvtool.policies.parts import Score
from kvtool.policies.policy import Policy, compose
from kvtool.policies.table import policy_class
from tests.cache.test_calls import traced
from tests.models_for_tests import family_model, peaky_model, random_ids
from tests.tiers import first


@dataclass(frozen=True)
class Sum(Score):
    """Keep the tokens with the largest first numbers of their hidden states, one for each head."""

    name: ClassVar = "sum"
    paper: ClassVar = "-"
    statistics: ClassVar = ("sum",)
    sees_hidden: ClassVar = True

    def from_hidden(self, hidden, layer):
        return {"sum": hidden[..., :2].float().transpose(1, 2)}

    def importance(self, state, view, rows):
        return state["sum"]


@dataclass(frozen=True)
class AtEnd(Sum):
    """The same, which cuts prompts only."""

    name: ClassVar = "at-end"
    when: ClassVar = "prompt"


def attached(**changes):
    return kvtool.attach(peaky_model("llama", num_hidden_layers=2, **changes))


def seen_by(model, ids):
    """What enters the attention of each layer of a plain model, by its own hooks."""
    found = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: found.append(kwargs["hidden_states"]), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return found


def numbers(cache, layer):
    """The numbers beside the kept slots by position: (batch, kv_heads, slots)."""
    slots = cache.slot_layers[layer].sorted_slots()
    return slots.positions, slots.state["sum"]


def check(cache, hidden, rows):
    """Every kept token has the number of its own hidden state."""
    for layer, states in enumerate(hidden):
        positions, found = numbers(cache, layer)
        for row in rows:
            for head in range(2):
                kept = positions[row, head] >= 0
                own = states[0, positions[row, head][kept].long(), head]
                torch.testing.assert_close(found[row, head][kept], own, atol=2e-5, rtol=2e-4)
                assert kept.any()


@pytest.mark.parametrize(
    ("mode", "score", "budget", "modifier"),
    [
        ("full", AtEnd(), 90, "int8"),
        ("block:16", Sum(), 20, "ada"),
        ("layer:16", AtEnd(), 20, None),
        ("layer:16", Sum(), 90, None),
    ],
)
def test_a_number_is_that_of_its_own_token(mode, score, budget, modifier):
    model, ids = attached(), random_ids(60)
    policy = compose(score, [] if modifier is None else [policy_class(modifier)()])
    cache = kvtool.build_cache(model, policy, budget, prefill=mode.replace("layer", "block"))
    if mode.startswith("layer"):  # blocks inside a layer
        model(ids, past_key_values=cache)
    else:
        prefill(model, cache, ids)
    for token in ids[0, 5:15]:
        decode_step(model, cache, token[None])
    hidden = seen_by(model, torch.cat([ids, ids[:, 5:15]], 1))
    layers = 2 if budget == 90 and modifier != "int8" else 1  # what is evicted changes the next
    check(cache, hidden[:layers], [0])


@pytest.mark.parametrize("inside", [True, False])
def test_padding_has_no_numbers(inside):
    model, ids = attached(), random_ids(60, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :21] = 0
    cache = kvtool.build_cache(model, Policy(Sum()), 90, prefill="block:16")
    if inside:
        model(ids, attention_mask=mask, past_key_values=cache)
    else:
        prefill(model, cache, ids, mask)
    for token in ids[0, 5:9]:
        decode_step(model, cache, token.expand(2))
    more = ids[:1, 5:9]
    check(cache, seen_by(model, torch.cat([ids[1:], more], 1)), [1])
    positions, found = numbers(cache, 0)
    alone = seen_by(model, torch.cat([ids[:1, 21:], more], 1))[0]
    kept = positions[0, 0] >= 0
    torch.testing.assert_close(
        found[0, 0][kept], alone[0, positions[0, 0][kept].long(), 0], atol=2e-5, rtol=2e-4
    )


def test_compiled_steps_are_the_eager_ones():
    torch._dynamo.reset()
    model, ids = kvtool.attach(peaky_model("llama", num_hidden_layers=1)), random_ids(40)
    caches = [kvtool.build_cache(model, Policy(Sum()), 20) for _ in range(2)]
    for cache in caches:
        prefill(model, cache, ids)
    step = StaticDecoding(model, 12, backend="eager", compiled=True)
    for token in range(5, 9):
        logits = step(model, caches[0], torch.tensor([token]))
        torch.testing.assert_close(logits, decode_step(model, caches[1], torch.tensor([token])))
    for mine, theirs in zip(numbers(caches[0], 0), numbers(caches[1], 0), strict=True):
        torch.testing.assert_close(mine, theirs)


REFUSED = ("falcon", "gptj")


@pytest.mark.parametrize("family", first(3, [*REFUSED, "gemma3", "deepseek_v3", "llama4", "lfm2"]))
def test_families_show_their_hidden_states_or_are_refused(family):
    model = kvtool.attach(family_model(family))
    if family in REFUSED:
        with pytest.raises(KvtoolError, match=f"`{family}` does not hand them to it"):
            kvtool.build_cache(model, Policy(AtEnd()), 20)
        return
    cache = kvtool.build_cache(model, Policy(Whole()), 20)
    prefill(model, cache, random_ids(50))
    for layer in cache.slot_layers:
        if layer.window is None:
            assert layer.slots.state["whole"].abs().sum() > 0


@dataclass(frozen=True)
class Whole(Score):
    """One number for all heads."""

    name, paper, statistics, when = "whole", "-", ("whole",), "prompt"
    sees_hidden = True

    def from_hidden(self, hidden, layer):
        return {"whole": hidden.float().abs().sum(-1)[:, None]}

    def importance(self, state, view, rows):
        return state["whole"]


def steps_of(model, cache):
    token = random_ids(1)
    with torch.no_grad():
        for _ in range(4):
            model(token, past_key_values=cache)
        return traced(lambda: model(token, past_key_values=cache))


def test_other_caches_pay_nothing_once_it_is_gone():
    model, ids = attached(), random_ids(40)
    gc.freeze()  # what a long run of tests has made is looked through no further
    other = kvtool.build_cache(model, "h2o", 16)
    with torch.no_grad():
        model(ids, past_key_values=other)
    before: Counter = steps_of(model, other)
    cache = kvtool.build_cache(model, Policy(Sum()), 16)
    copied = cache.copy()
    hooks = model.model.layers[1].self_attn._forward_pre_hooks
    assert len(hooks) == 1
    kvtool.build_cache(model, Policy(AtEnd()), 16)
    assert len(hooks) == 1  # the same for all caches
    del cache
    gc.collect()
    with torch.no_grad():
        model(ids, past_key_values=copied)  # which still has them
    del copied
    gc.collect()
    gc.unfreeze()
    assert not hooks
    assert steps_of(model, other) == before


def test_what_is_detached_shows_nothing():
    model, ids = attached(), random_ids(40)
    cache = kvtool.build_cache(model, Policy(Sum()), 16)
    kvtool.detach(model)
    assert not model.model.layers[1].self_attn._forward_pre_hooks
    kvtool.attach(model)
    with pytest.raises(KvtoolError, match="has shown no hidden states") as refused:
        prefill(model, cache, ids)
    assert "build the cache anew" in refused.value.hint
    prefill(model, kvtool.build_cache(model, Policy(Sum()), 16), ids)


def test_it_is_not_replayed_from_another_run():
    model, ids = attached(), random_ids(40)
    cache = kvtool.build_cache(model, Policy(AtEnd()), 16)
    assert not can_share(model, cache, 40)
    lead = kvtool.build_cache(model, "full")
    lead.watch_steps(lambda step, call, out: replay(cache, step, call, out))
    with pytest.raises(KvtoolError, match="cannot be replayed layer by layer"):
        prefill(model, lead, ids)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (lambda hidden: {"sum": hidden[..., 0]}, "of 40 KV heads, and layer 0 has 2"),
        (
            lambda hidden: {"sum": hidden[..., :5].transpose(1, 2)},
            "of 5 KV heads, and layer 0 has 2",
        ),
        (lambda hidden: {"sum": hidden.nothing}, "from_hidden raised"),
    ],
)
def test_a_mistake_ends_in_one_line(found, told):
    @dataclass(frozen=True)
    class Wrong(Sum):
        def from_hidden(self, hidden, layer):
            return found(hidden)

    model = attached()
    with pytest.raises(PolicyError, match=told) as refused:
        prefill(model, kvtool.build_cache(model, Policy(Wrong()), 16), random_ids(40))
    assert "test_hidden_states.py, line" in str(refused.value) or refused.value.hint


def test_declarations_that_do_nothing_are_refused():
    def declared(**names):
        body = {"name": "d", "paper": "-", "importance": Sum.importance, **names}
        return Policy(dataclass(frozen=True)(type("Declared", (Score,), body))())

    made = Sum.from_hidden
    with pytest.raises(PolicyError, match="is called only where `sees_hidden` is true"):
        declared(from_hidden=made, statistics=("sum",))
    with pytest.raises(PolicyError, match="is missing, and it is called where"):
        declared(sees_hidden=True, statistics=("sum",))
    with pytest.raises(PolicyError, match="are empty, and there is nothing to fill"):
        declared(sees_hidden=True, from_hidden=made)
    with pytest.raises(PolicyError, match="sees_hidden is 3, not one of True, False"):
        declared(sees_hidden=3, from_hidden=made, statistics=("sum",))
