"""KVzip: scores and choice against plain loops on a model, and what it is refused for."""

import gc
import math
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch

import kvtool
from kvtool import KvtoolError, UsageError, parse_policy
from kvtool.cache.features import repetition
from kvtool.cache.features.repetition import Instructions, Repetition
from kvtool.cache.whole import cache as cache_module
from kvtool.generation import compress, generate, prefill
from kvtool.maths.projection import weights_by_output
from kvtool.models.load import load
from kvtool.policies.evidence import OutputProjection
from kvtool.policies.parts import Evidence, Score
from kvtool.policies.policy import Policy
from tests.models_for_tests import family_model, peaky_model, random_ids
from tests.reference import kvzip as slow
from tests.tiers import first

FIRST, LATER = (5, 9, 2, 44), (7, 3)
PROMPT, BUDGET = 37, 12


def attached(name="llama", **changes):
    return kvtool.attach(peaky_model(name, num_hidden_layers=2, **changes))


def cut(model, policy, ids, budget=BUDGET, mask=None, around=(0, 0)):
    """A cache that has read a prompt, and the weights that it was cut by, by layer."""
    cache, noted = kvtool.build_cache(model, policy, budget), []
    Repetition.of(cache).instruct(Instructions(FIRST, LATER, *around))
    whole = repetition.cut_repeated

    def note(layers, weights, spans, *, last):
        first = min(start for start, _ in spans)
        noted.append({i: by_position(own, first) for i, own in weights.by_layer.items()})
        whole(layers, weights, spans, last=last)

    with patch.object(repetition, "cut_repeated", note):
        prefill(model, cache, ids, mask)
    return cache, (noted[0] if noted else {})


def by_position(weights, first):
    return torch.nn.functional.pad(weights, (first, 0))


def looped(model, ids, chunk, sinks=4, around=(0, 0), plus=False):
    """The same weights by plain loops: of each layer and KV head, by position."""
    row, (before, behind) = ids[0].tolist(), around
    begin, end = max(sinks, before), len(row) - behind
    found = [[{}, {}] for _ in range(2)]
    for start in range(begin, end, chunk):
        own = range(start, min(start + chunk, end))
        told = FIRST if start == begin else (*LATER, *row[max(begin, start - 8) : start])
        seen, entered, cache = [], [], kvtool.build_cache(model, "full")
        prefill(model, cache, ids)
        hooks = [
            each.self_attn.register_forward_pre_hook(noting(entered), with_kwargs=True)
            for each in model.model.layers
        ]
        cache.watch_steps(lambda step, call, out, seen=seen: seen.append(call))
        prefill(model, cache, torch.tensor([[*told, *(row[j] for j in own)]]))
        for hook in hooks:
            hook.remove()
        for layer, call in enumerate(seen):
            given = call.query[0].tolist(), call.key[0].tolist()
            group = len(given[0]) // len(given[1])
            more = {}
            if plus:
                weight = model.model.layers[layer].self_attn.o_proj.weight
                more["hidden"] = [math.hypot(*state) for state in entered[layer][0].tolist()]
                more["lengths"] = [
                    [slow.length(columns.tolist(), value) for value in values]
                    for columns, values in zip(
                        weight.chunk(len(given[0]), 1),
                        call.value[0, :, : len(row)].repeat_interleave(group, 0).tolist(),
                        strict=True,
                    )
                ]
            by_head = slow.weights(*given, group, call.scale, len(row), sinks, own, **more)
            for head, scores in enumerate(by_head):
                found[layer][head] |= scores
    return found


def noting(entered):
    return lambda module, args, kwargs: entered.append(kwargs["hidden_states"])


def positions(cache, layer, row=0):
    return [[j for j in head if j >= 0] for head in cache.kept_positions(layer)[row].tolist()]


@pytest.mark.parametrize(
    ("chunk", "sinks", "around", "plus"),
    [(13, 2, (0, 0), False), (9, 4, (6, 3), True)],
)
def test_weights_and_choice_equal_plain_loops(chunk, sinks, around, plus):
    model, ids = attached(), random_ids(PROMPT)
    expected = looped(model, ids, chunk, sinks, around, plus)
    policy = f"kvzip(chunk={chunk},sinks={sinks},plus={str(plus).lower()})"
    cache, found = cut(model, policy, ids, around=around)
    for layer, heads in enumerate(expected):
        for head, scores in enumerate(heads):
            ours = found[layer][0, head][list(scores)]
            torch.testing.assert_close(ours, torch.tensor(list(scores.values())))
            scores.update(zip(scores, ours.tolist(), strict=True))  # near 1 they differ by rounding
    stay = slow.kept(expected, PROMPT, BUDGET)
    for (layer, head), own in stay.items():
        assert positions(cache, layer)[head] == own
    assert plus or len({len(own) for own in stay.values()}) > 1  # heads hold unequal counts
    assert sum(map(len, stay.values())) == 4 * BUDGET
    outside = [*range(max(sinks, around[0])), *range(PROMPT - around[1], PROMPT)]
    assert all(set(outside) <= set(own) for own in stay.values())


def test_worked_weights_of_what_comes_out():
    # |W v| 1.4142, 4.4721, 4.2426, 2.2361, 3.3166, 6.6332; |h| 2 and 1
    rows = [[0.1, 0.3, 0.2, 0.2, 0.1, 0.1], [0.05, 0.05, 0.4, 0.2, 0.2, 0.1]]
    values = torch.tensor([[1, 0], [0, 2], [3, 0], [0, 1], [1, 1], [2, 2]], dtype=torch.float32)
    projection = OutputProjection(torch.tensor([[1.0, 2], [0, 1], [-1, 0]]))
    lengths = projection.lengths(values[None, None], 2)
    hidden = torch.tensor([[[0.0, 2.0], [1.0, 0.0]]])
    found = weights_by_output(torch.tensor(rows)[None, None, None], lengths, hidden)
    expected = [0.070711, 0.670820, 1.697056, 0.447214, 0.663325, 0.663325]
    torch.testing.assert_close(found.amax(3)[0, 0, 0], torch.tensor(expected))


def test_what_comes_out_changes_the_choice_and_hooks_go_with_the_cache():
    model, ids = attached(), random_ids(PROMPT)
    hooks = model.model.layers[0].self_attn._forward_pre_hooks
    plain, _ = cut(model, "kvzip", ids)
    assert not hooks
    plus, _ = cut(model, "kvzip(plus=true)", ids)
    assert len(hooks) == 1
    assert any(positions(plain, i) != positions(plus, i) for i in range(2))
    del plus
    gc.collect()
    assert not hooks


def test_plus_takes_no_other_weighing_of_values():
    with pytest.raises(UsageError, match=r"`kvzip` weighs them already; kvzip\+critical"):
        parse_policy("kvzip(plus=true)+critical")


def test_heads_of_each_layer_compete_where_that_is_asked_for():
    model, ids = attached(), random_ids(PROMPT)
    expected = looped(model, ids, 2048)
    cache, found = cut(model, "kvzip(layers=each)", ids)
    for layer in range(2):
        for head, scores in enumerate(expected[layer]):
            scores.update((j, found[layer][0, head, j].item()) for j in scores)
        stay = slow.kept([expected[layer]], PROMPT, BUDGET)
        assert positions(cache, layer) == [stay[0, 0], stay[0, 1]]
        assert sum(map(len, stay.values())) == 2 * BUDGET


def test_what_fits_is_fed_once():
    model, ids = attached(), random_ids(PROMPT)
    with patch.object(cache_module, "storing_nothing", side_effect=AssertionError("fed twice")):
        cache, noted = cut(model, "kvzip", ids, budget=PROMPT)
    assert noted == {}
    assert cache.report().kept_per_layer == [PROMPT, PROMPT]


def test_a_padded_row_that_fits_stays_beside_one_that_is_cut():
    model, rows = attached(), [random_ids(PROMPT), random_ids(9, seed=3)]
    ids, mask = torch.zeros(2, PROMPT, dtype=torch.long), torch.zeros(2, PROMPT, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, PROMPT - row.shape[1] :], mask[i, PROMPT - row.shape[1] :] = row[0], 1
    both, _ = cut(model, "kvzip(chunk=13)", ids, mask=mask)
    for i, row in enumerate(rows):
        alone, _ = cut(model, "kvzip(chunk=13)", row)
        for layer in range(2):
            assert positions(both, layer, i) == positions(alone, layer)
    assert positions(both, 0, 1) == [list(range(9))] * 2


def test_a_reset_cache_forgets_what_stood_around_its_text():
    model, ids = attached(), random_ids(PROMPT)
    cache, _ = cut(model, "kvzip", ids, around=(6, 3))
    fresh, _ = cut(model, "kvzip", ids)
    cache.reset()
    prefill(model, cache, ids)
    for layer in range(2):
        assert positions(cache, layer) == positions(fresh, layer)


def test_later_texts_are_appended_and_nothing_is_cut_again():
    model = attached()
    cache, _ = cut(model, "kvzip", random_ids(PROMPT))
    before = [positions(cache, layer) for layer in range(2)]
    prefill(model, cache, random_ids(40, seed=2))
    later = list(range(PROMPT, PROMPT + 40))
    for layer in range(2):
        assert positions(cache, layer) == [own + later for own in before[layer]]


def test_memory_is_the_full_caches_until_the_cut_and_then_the_budgets():
    model, ids = attached(), random_ids(200)
    cache, _ = cut(model, "kvzip", ids, budget=20)
    report, token = cache.report(), 2 * 2 * 16 * 4 * 2  # layers, KV heads, dim, bytes, K and V
    assert report.kv_bytes == 20 * token
    assert report.allocated_bytes <= report.kv_bytes * 8 / 7
    assert report.peak_bytes >= 200 * token
    assert kvtool.build_cache(model, "kvzip", 20).report().peak_bytes == 0


@pytest.mark.parametrize("name", first(2, ["gemma3", "deepseek_v3", "gpt_oss", "qwen3_next"]))
def test_families_hold_the_budget_and_go_on_as_before(name):
    """Sliding windows, soft caps, learned sinks, latents and recurrent states."""
    model, ids = kvtool.attach(family_model(name)), random_ids(64)
    cache, fits = (kvtool.build_cache(model, "kvzip(chunk=25)", tokens) for tokens in (20, 64))
    for each in (cache, fits):
        Repetition.of(each).instruct(Instructions(FIRST, LATER))
    first, full = prefill(model, cache, ids), kvtool.build_cache(model, "full")
    assert torch.equal(first, prefill(model, full, ids))  # which come before the cut
    prefill(model, fits, ids)
    free = [layer for layer in cache.slot_layers if layer.window is None]
    kept = [(cache.kept_positions(layer.index) >= 0).sum(-1) for layer in free]
    assert sum(each.sum() for each in kept) == sum(20 * each.numel() for each in kept)
    turn = random_ids(5, seed=4)
    torch.testing.assert_close(
        prefill(model, fits, turn), prefill(model, full, turn), atol=2e-5, rtol=2e-5
    )
    assert torch.isfinite(prefill(model, cache, turn)).all()
    assert cache.tokens_seen() == [69]


def test_recurrent_states_are_those_of_the_prompt_alone():
    model, ids = kvtool.attach(family_model("qwen3_next")), random_ids(64)
    cache, full = kvtool.build_cache(model, "kvzip", 20), kvtool.build_cache(model, "full")
    Repetition.of(cache).instruct(Instructions(FIRST, LATER))
    prefill(model, cache, ids), prefill(model, full, ids)
    states = [
        (mine.recurrent_states, theirs.recurrent_states)
        for mine, theirs in zip(cache.layers, full.layers, strict=True)
        if hasattr(mine, "recurrent_states")
    ]
    assert states
    for mine, theirs in states:
        torch.testing.assert_close(mine, theirs)


@pytest.fixture
def reference():
    loaded = load()
    kvtool.attach(loaded.model)
    return loaded.model, loaded.tokenizer


def test_a_tokenizer_says_the_instruction(reference):
    model, tokenizer = reference
    ids = tokenizer("The code is 7429103. " * 20, return_tensors="pt").input_ids
    cache = kvtool.build_cache(model, "kvzip", 40)
    with pytest.raises(UsageError, match="no tokenizer to say so") as refused:
        compress(model, cache, ids)
    assert "tokenizer=tokenizer" in refused.value.hint
    assert cache.get_seq_length() == 0
    compress(model, cache, ids, tokenizer=tokenizer)
    said = tokenizer.decode(Repetition.of(cache).instructions.first)
    assert said == "\n\nRepeat the previous context exactly."
    generate(model, tokenizer, kvtool.build_cache(model, "kvzip", 40), ids, max_new_tokens=2)
    own = kvtool.build_cache(model, "kvzip(instruction=Say it again.)", 40)
    compress(model, own, ids, tokenizer=tokenizer)
    for told in (Repetition.of(own).instructions.first, Repetition.of(own).instructions.later):
        assert tokenizer.decode(told) == "Say it again."


def test_plain_forwards_and_compressed_calls_are_refused():
    model, ids = attached(), random_ids(PROMPT)
    cache = kvtool.build_cache(model, "kvzip", BUDGET)
    for feed in (
        lambda: model(ids, past_key_values=cache),
        lambda: model.generate(ids, past_key_values=cache),
    ):
        with pytest.raises(KvtoolError, match="`generate` of transformers, reads it once"):
            feed()
    for refuse in (
        lambda: kvtool.attach(model, "kvzip", 20),
        lambda: kvtool.compressed(model, "kvzip", 20).__enter__(),
    ):
        with pytest.raises(UsageError, match="`generate` of transformers reads it once"):
            refuse()


def test_what_is_never_repeated_must_leave_room():
    with pytest.raises(UsageError, match="budget 4 is not above sinks 4 of policy `kvzip`"):
        parse_policy("kvzip").check_budget(4)
    with pytest.raises(UsageError, match="budget 12 is not above the 14 tokens around the text"):
        cut(attached(), "kvzip", random_ids(PROMPT), around=(10, 4))


@pytest.mark.parametrize(
    ("modifier", "told"),
    [
        ("caote", "weighs values by attention scores"),
        ("ada", "compete for one budget, of all layers or of each"),
        ("d2o-alloc", "compete for one budget, of all layers or of each"),
        ("chunk", "`kvzip` lets them differ"),
        ("every", "scores prompts only"),
    ],
)
def test_modifiers_without_sense_are_refused_with_the_reason(modifier, told):
    with pytest.raises(UsageError, match=told):
        parse_policy(f"kvzip+{modifier}")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("sinks=-1", "kvzip: sinks must be 0 or more, got -1"),
        ("chunk=0", "kvzip: chunk must be 1 or more, got 0"),
        ("layers=all", "layers"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, told):
    with pytest.raises(UsageError, match=told):
        parse_policy(f"kvzip({settings})")


def test_scores_that_cannot_go_by_a_repetition_are_refused():
    @dataclass(frozen=True)
    class Other(Score):
        name, paper, evidence, when = "other", "-", Evidence.REPETITION, "always"

        def importance(self, state, view, rows):
            return view.positions.float()

    with pytest.raises(UsageError, match="so it can cut prompts only, not always"):
        Policy(Other())
