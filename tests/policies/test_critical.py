"""CriticalKV: both stages against the worked example and plain loops, alone and on models."""

from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

import kvtool
from kvtool import KvtoolError, UsageError, parse_policy
from kvtool.cache.hooks.modules import _read, find_projections
from kvtool.cache.steps import block as block_module
from kvtool.generation import decode_step, prefill
from kvtool.generation.shared_prefill import can_share, prefill_shared
from kvtool.maths import projection
from kvtool.maths.projection import projected_lengths
from kvtool.maths.selection import keep_top
from kvtool.policies.evidence import OutputProjection
from kvtool.policies.parts import Evidence, Rescore, Score, SlotView
from kvtool.policies.policy import Policy
from kvtool.policies.rescore.critical import Critical
from tests.models_for_tests import any_cache, family_model, peaky_model, random_ids
from tests.reference import critical as slow

VALUES = [[1, 0], [0, 2], [3, 0], [0, 1], [1, 1], [2, 2]]
COLUMNS = [[1, 2], [0, 1], [-1, 0]]  # of the one head: a row for each number that comes out
SCORES = [0.30, 0.05, 0.25, 0.10, 0.20, 0.10]


def judged(scores, values, weight, budget, forced=None, **how):
    """The numbers by which slots are chosen, and what is kept, by head."""
    scores = torch.tensor(scores, dtype=torch.float32)[None]
    places = torch.arange(scores.shape[2], dtype=torch.int32).expand_as(scores)
    view = SlotView(
        (torch.tensor(values, dtype=torch.float32)[None],),
        places,
        scores.shape[2],
        budget,
        scores.shape[2],
        projections=(OutputProjection(torch.tensor(weight, dtype=torch.float32)),),
    )
    mask = None
    if forced is not None:
        mask = torch.isin(places, torch.tensor(list(forced), dtype=torch.int32))
        scores = scores.masked_fill(mask, float("inf"))
    order = Critical(**how).rescore(scores, view)
    most = budget if isinstance(budget, int) else int(budget.max())
    kept = keep_top(order, places, budget, mask, most)[1][0].tolist()
    return order[0].tolist(), [[p for p in head if p >= 0] for head in kept]


def test_worked_lengths_and_choice():
    assert slow.lengths(VALUES, [COLUMNS]) == [2, 6, 6, 3, 5, 10]
    values = torch.tensor(VALUES, dtype=torch.float32)[None, None]
    found = projected_lengths(values, torch.tensor(COLUMNS, dtype=torch.float32), 1)
    assert found.tolist() == [[[[2, 6, 6, 3, 5, 10]]]]
    [order], [kept] = judged([SCORES], [VALUES], COLUMNS, 4)
    assert order[0] == order[2] == float("inf")
    assert order[1::2] == pytest.approx([0.3006, 0.3003, 1.0010])
    assert order[4] == pytest.approx(1.0005)
    assert kept == slow.kept(SCORES, [2, 6, 6, 3, 5, 10], 4) == [0, 2, 4, 5]
    assert judged([SCORES], [VALUES], COLUMNS, 4, first=0)[1] == [[0, 2, 4, 5]]  # one at least
    assert judged([SCORES], [VALUES], COLUMNS, 4, first=1)[1] == [[0, 2, 3, 4]]  # the base's


def test_euclidean_lengths_and_pieces_of_long_caches(monkeypatch):
    values, weight = torch.randn(2, 2, 37, 4), torch.randn(10, 24)
    found = {norm: projected_lengths(values, weight, norm) for norm in (1, 2)}
    by_head = weight.unflatten(1, (2, 3, 4))
    projected = torch.einsum("bksd,okgd->bkgso", values, by_head)
    for norm, lengths in found.items():
        assert lengths.shape == (2, 2, 3, 37)
        torch.testing.assert_close(lengths, torch.linalg.vector_norm(projected, norm, -1))
        monkeypatch.setattr(projection, "_NUMBERS", 100)  # 5 slots at a time
        torch.testing.assert_close(projected_lengths(values, weight, norm), lengths)
        monkeypatch.undo()


def test_protected_tokens_are_the_first_of_the_best():
    # without 5 and 3 in the first stage it would be 0 and 2
    assert judged([SCORES], [VALUES], COLUMNS, 4, forced=[3, 5])[1] == [[2, 3, 4, 5]]
    assert slow.kept(SCORES, [2, 6, 6, 3, 5, 10], 4, forced=[3, 5]) == [2, 3, 4, 5]


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]), st.data())
def test_what_is_kept_equals_plain_loops(seed, first, data):
    source = torch.Generator().manual_seed(seed)
    slots = data.draw(st.integers(2, 20))
    scores = (torch.randint(0, 6, (2, slots), generator=source) / 4).tolist()  # with ties
    values = torch.randint(-3, 4, (2, slots, 2), generator=source).float().tolist()
    weight = torch.randint(-3, 4, (3, 8), generator=source).float()  # two heads in a group
    budget = [data.draw(st.integers(1, slots)) for _ in range(2)]
    forced = data.draw(st.lists(st.integers(0, slots - 1), max_size=min(budget) - 1, unique=True))
    told = torch.tensor(budget)[None, :, None]
    found = judged(scores, values, weight.tolist(), told, forced or None, first=first)[1]
    for head in range(2):
        columns = [weight[:, part : part + 2].tolist() for part in (4 * head, 4 * head + 2)]
        lengths = slow.lengths(values[head], columns)
        expected = slow.kept(scores[head], lengths, budget[head], first, 1e-4, forced)
        assert found[head] == expected


def attached(name="llama", **changes):
    return kvtool.attach(peaky_model(name, num_hidden_layers=2, **changes))


def looked_at(model, policy, budget, ids, mask=None):
    """A cache that has read a prompt, and what each layer was cut by: its scores and values."""
    cache, seen = any_cache(model, policy, budget), []
    cut = block_module.cut

    def note(layer, view, state, joined, importance, protected, split=None):
        seen.append((importance, view.values[0], view.positions, protected))
        return cut(layer, view, state, joined, importance, protected, split)

    with (
        patch.object(block_module, "cut", note),
        patch("kvtool.cache.features.repetition.cut", note),
    ):
        prefill(model, cache, ids, mask)
    return cache, seen


@pytest.mark.parametrize(
    "base",
    [
        "snapkv(window=4,kernel=3)",
        "adakv(window=4,kernel=3)",
        "pyramidkv(window=4,kernel=3,beta=2)",
        "expected(values=false)",
        "kvzip",
    ],
)
def test_both_stages_in_each_heads_budget_equal_plain_loops(base):
    model, ids = attached(), random_ids(45)
    cache, seen = looked_at(model, f"{base}+critical", 16, ids)
    plain, _ = looked_at(model, base, 16, ids)
    assert [each.budget.max_budget for each in cache.slot_layers] == [
        each.budget.max_budget for each in plain.slot_layers
    ]
    differ = 0
    for layer, (importance, values, _, protected) in enumerate(seen):
        weight = model.model.layers[layer].self_attn.o_proj.weight
        kept = cache.kept_positions(layer)[0].tolist()
        for head in range(2):
            group = weight.shape[1] // values.shape[-1] // 2
            width = values.shape[-1]
            starts = [(head * group + member) * width for member in range(group)]
            columns = [weight[:, start : start + width].tolist() for start in starts]
            lengths = slow.lengths(values[0, head].tolist(), columns)
            forced = []
            if protected is not None:
                forced = protected.expand_as(importance)[0, head].nonzero()[:, 0].tolist()
            found = [p for p in kept[head] if p >= 0]
            before = [p for p in plain.kept_positions(layer)[0, head].tolist() if p >= 0]
            assert len(found) == len(before)  # heads compete by the base's scores
            scores = importance[0, head].tolist()
            assert found == slow.kept(scores, lengths, len(found), forced=forced)
            differ += found != before
    assert differ


@pytest.mark.parametrize("base", ["snapkv(window=4,kernel=3)", "adakv(window=4,kernel=3)"])
def test_it_cuts_again_at_a_pace(base):
    model = attached()
    cache = kvtool.build_cache(model, f"{base}+critical+every(steps=6)", 16)
    rows = kvtool.build_cache(model, f"{base}+critical+every(steps=6)", 16)
    prefill(model, cache, random_ids(45))
    prefill(model, rows, random_ids(45).expand(2, -1))
    for token in range(5, 19):
        decode_step(model, cache, torch.tensor([token]))
        decode_step(model, rows, torch.tensor([token, token]))
    for layer in range(2):
        kept = cache.kept_positions(layer)
        assert torch.equal(rows.kept_positions(layer), kept.expand(2, -1, -1))
        held = (kept >= 0).sum(-1).float()
        assert held.mean() <= 22
        assert kept.max() == 58


def test_heads_apart_have_the_columns_of_their_own():
    values, weight = torch.randn(3, 4, 7, 5), torch.randn(6, 40)  # two heads in a group
    whole = OutputProjection(weight).lengths(values, 1)
    entries, heads = torch.tensor([2, 0, 1, 2, 1]), torch.tensor([3, 1, 1, 0, 2])
    lanes = OutputProjection(weight, heads, 4).lengths(values[entries, heads][:, None], 1)
    torch.testing.assert_close(lanes, whole[entries, heads][:, None])


def test_it_cuts_alike_where_a_prompt_is_read_once_for_several_caches():
    model, ids = attached(), random_ids(45)
    alone = kvtool.build_cache(model, "snapkv(window=4)+critical", 16)
    prefill(model, alone, ids)
    shared = [kvtool.build_cache(model, "snapkv(window=4)+critical", 16) for _ in range(2)]
    assert all(can_share(model, cache, 45) for cache in shared)
    prefill_shared(model, shared, ids)
    for layer in range(2):
        for cache in shared:
            assert torch.equal(cache.kept_positions(layer), alone.kept_positions(layer))


NOT_FOUND = {
    "falcon": "runs its own eager attention",
    "gptj": "runs its own eager attention",
    "deepseek_v3": "stores latents in place of values",
    "qwen3_next": "changes the output of its heads before it projects it",
}


@pytest.mark.parametrize("family", [*NOT_FOUND, "llama", "gpt_neox", "phi3", "falcon_h1", "lfm2"])
def test_the_projection_of_a_family_is_found_or_refused(family):
    model, policy = kvtool.attach(family_model(family)), parse_policy("snapkv+critical")
    if family in NOT_FOUND:
        with pytest.raises(KvtoolError, match=f"`{model.config.model_type}` {NOT_FOUND[family]}"):
            kvtool.build_cache(model, policy, 64)
        return
    modules = {id(each.weight): name for name, each in model.named_modules() if is_linear(each)}
    found = find_projections(model, policy)
    names = [modules[id(each.module().weight)] for each in found.values()]
    assert all(name.endswith(("o_proj", "out_proj", "dense")) for name in names), names
    assert all(f".{layer}." in name for layer, name in zip(found, names, strict=True))


def is_linear(module):
    return isinstance(module, nn.Linear)


class Packed(nn.Linear):
    """A layer whose weight some library has packed."""


def test_layers_that_are_not_plain_are_refused_with_the_reason():
    def without(change):
        model = peaky_model("llama", num_hidden_layers=2)
        change(model.model.layers[1].self_attn)
        with pytest.raises(KvtoolError) as refused:
            kvtool.build_cache(model, "snapkv+critical", 64)
        assert refused.value.hint == "take a policy that does not: snapkv"
        return str(refused.value)

    def pack(attention):
        attention.o_proj.__class__ = Packed

    def normalise(attention):
        width = attention.o_proj.in_features
        attention.o_proj = nn.Sequential(nn.LayerNorm(width), attention.o_proj)

    assert "by a `Packed`, which is no plain linear layer" in without(pack)
    assert "by a `Sequential`, which is no plain linear layer" in without(normalise)


def test_weights_that_are_no_plain_numbers_are_refused_with_the_reason():
    def told(weight, width=4):
        layer = nn.Linear(4, 6, bias=False)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        return _read(layer, width)

    assert "in codes (torch.uint8)" in told(torch.zeros(6, 4, dtype=torch.uint8))
    assert "in codes (torch.float8_e4m3fn)" in told(torch.zeros(6, 4).to(torch.float8_e4m3fn))
    assert "off the device" in told(torch.zeros(6, 4, device="meta"))
    assert "splits the output projection" in told(torch.zeros(6, 4), width=8)
    turned = Conv1D(6, 4)  # GPT-2's, which stores (in, out)
    assert torch.equal(_read(turned, 4)(), turned.weight.T)


def test_a_copy_of_a_cache_looks_at_the_same_weights():
    model, ids = attached(), random_ids(45)
    cache = kvtool.build_cache(model, "snapkv(window=4)+critical", 16)
    other = cache.copy()
    part = other.slot_layers[1].parts["projection"]
    weight = model.model.layers[1].self_attn.o_proj.weight
    assert part.seen().weight.data_ptr() == weight.data_ptr()
    for each in (cache, other):
        prefill(model, each, ids)
    assert torch.equal(cache.kept_positions(1), other.kept_positions(1))


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("snapkv+critical+caote", "`critical` and `caote` exclude each other; keep one"),
        ("snapkv+fastcaote+critical", "`fastcaote` and `critical` exclude each other; keep one"),
        ("h2o+critical", "and `h2o` evicts decoded tokens, too"),
        ("keydiff+critical", "and `keydiff` evicts decoded tokens, too"),
        ("full+critical", "and `full` does not cut it so"),
        ("pyramidinfer+critical", "and `pyramidinfer` does not cut it so"),
        ("duoattention+critical", "`duoattention`"),
        ("rocketkv+critical", "`critical` has no part in it"),
        ("expected+critical", r"`expected` weighs them already; expected\(values=false\)"),
        ("snapkv+chunk+critical", "`critical` chooses in each head by its values"),
        ("snapkv+critical(first=1.5)", "first must be between 0 and 1, got 1.5"),
        ("snapkv+critical(epsilon=-1)", "epsilon must be 0 or more, got -1"),
    ],
)
def test_what_makes_no_sense_is_refused(policy, told):
    with pytest.raises(UsageError, match=told):
        parse_policy(policy)


def test_any_part_from_outside_may_look_at_the_projection():
    @dataclass(frozen=True)
    class Longest(Score):
        """Keep what the output projection makes longest."""

        name, paper, when, evidence = "longest", "-", "prompt", Evidence.KEYS
        sees_projection = True

        def importance(self, state, view, rows):
            return view.projections[0].lengths(view.values[0], 2).mean(2)

    @dataclass(frozen=True)
    class Doubled(Rescore):
        name, paper, sees_projection = "doubled", "-", True

        def rescore(self, importance, view):
            return importance * view.projections[0].lengths(view.values[0], 1).mean(2)

    model, ids = attached(), random_ids(45)
    for policy in (Policy(Longest()), Policy(parse_policy("snapkv").score, Doubled())):
        cache = kvtool.build_cache(model, policy, 40)
        prefill(model, cache, ids)
        assert cache.report().kept_per_layer == [40, 40]

    @dataclass(frozen=True)
    class Steady(Longest):
        name, when = "steady", "always"

    with pytest.raises(UsageError, match="too dear for every decoded token"):
        Policy(Steady())
