"""KVzip in blocks: what each block leaves against plain loops on a model, and what is held."""

import itertools
import warnings
from unittest.mock import patch

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import kvtool
from kvtool import UsageError, parse_policy
from kvtool.cache.features import repetition
from kvtool.cache.features.repetition import Instructions, Repetition
from kvtool.cache.whole import cache as cache_module
from kvtool.errors import KvtoolWarning
from kvtool.generation import prefill
from kvtool.model_shape import layer_shapes
from kvtool.planning.bytes import range_bytes, slot_bytes
from kvtool.planning.peak import repeating_bytes
from kvtool.policies.allocate.joint import Joint
from kvtool.policies.allocate.problem import Heads
from tests.models_for_tests import family_model, peaky_model, random_ids
from tests.reference.kvzip_blocks import Streaming, kept_of
from tests.tiers import first

FIRST, LATER = (5, 9, 2, 44), (7, 3)
PROMPT, BUDGET, BLOCK = 37, 12, 13


def attached(**changes):
    """A model whose weights are nowhere near 1, where rounding would decide what stays."""
    model = peaky_model("llama", num_hidden_layers=2, **changes)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 0.3
    return kvtool.attach(model)


def built(model, policy="kvzip", budget=BUDGET, block=BLOCK, around=(0, 0)):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KvtoolWarning)  # blocks are short
        cache = kvtool.build_cache(model, policy, budget, prefill=f"block:{block}")
    Repetition.of(cache).instruct(Instructions(FIRST, LATER, *around))
    return cache


def read(model, ids, mask=None, **options):
    cache = built(model, **options)
    return cache, prefill(model, cache, ids, mask)


def positions(cache, layer, row=0):
    return [[j for j in head if j >= 0] for head in cache.kept_positions(layer)[row].tolist()]


def padded(*rows):
    width = max(row.shape[1] for row in rows)
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, width - row.shape[1] :], mask[i, width - row.shape[1] :] = row[0], 1
    return ids, mask


@pytest.mark.parametrize(
    ("length", "block", "around", "settings"),
    [
        (37, 13, (0, 0), ""),
        (37, 16, (6, 3), "sinks=2,plus=true"),
        (40, 12, (5, 6), "chunk=2048,sinks=0"),  # a rest of 4 is a block of its own
    ],
)
def test_what_stays_and_the_logits_equal_plain_loops(length, block, around, settings):
    model, ids = attached(), random_ids(length)
    sinks = int(dict(each.split("=") for each in settings.split(",") if each).get("sinks", 4))
    slow = Streaming(model, sinks, around, plus="plus" in settings)
    expected = slow.read(ids[0].tolist(), block, BUDGET, FIRST, LATER)
    policy = f"kvzip({settings})" if settings else "kvzip"
    cache, logits = read(model, ids, policy=policy, block=block, around=around)
    for layer in range(2):
        assert positions(cache, layer) == [sorted(slow.stored[layer, head]) for head in range(2)]
    torch.testing.assert_close(logits[0], expected[-1], atol=2e-4, rtol=2e-4)
    kept = [len(own) for own in slow.stored.values()]
    assert sum(kept) == 4 * BUDGET
    assert len({*kept}) > 1


def test_many_cuts_leave_what_one_cut_of_all_scores_would_leave():
    model, ids = attached(), random_ids(80)
    slow = Streaming(model)
    slow.read(ids[0].tolist(), 16, BUDGET, FIRST, LATER)
    layers = [[slow.all_scores[layer, head] for head in range(2)] for layer in range(2)]
    at_once = kept_of(layers, {place: [*range(80)] for place in slow.stored}, BUDGET)
    cache, _ = read(model, ids, block=16)
    for layer in range(2):
        assert positions(cache, layer) == [at_once[layer, head] for head in range(2)]


def stored_by_place(layers):
    """What is stored of each token, by layer, KV head and position."""
    for layer in layers:
        slots = layer.sorted_slots()
        for head, row in enumerate(slots.positions[0].tolist()):
            for slot, j in enumerate(row):
                if j >= 0:
                    stored = {name: all_of[0, head, slot] for name, all_of in slots.stored.items()}
                    yield (layer.index, head, j), stored


@pytest.mark.parametrize("settings", ["+int4", "(layers=each)", "(layers=each)+int4"])
def test_many_cuts_change_neither_scores_nor_codes(settings):
    """What stays is what one cut of all scores leaves, of all layers or of each, as first coded."""
    model, scores, codes = attached(head_dim=32), {}, {}
    split, whole = Joint.tokens_of, repetition.cut_repeated

    def note_scores(self, layers):
        for layer, heads in enumerate(layers):
            numbers, free = heads.importance[0], ~heads.protected[0] & (heads.positions[0] >= 0)
            for head, slot in free.nonzero().tolist():
                place = layer, head, int(heads.positions[0, head, slot])
                score = float(numbers[head, slot])
                assert scores.setdefault(place, score) == score
        return split(self, layers)

    def note_codes(layers, *args, **kwargs):
        for place, stored in stored_by_place(layers):
            known = codes.setdefault(place, stored)
            assert all(torch.equal(known[name], own) for name, own in stored.items())
        whole(layers, *args, **kwargs)

    with (
        patch.object(Joint, "tokens_of", note_scores),
        patch.object(repetition, "cut_repeated", note_codes),
    ):
        cache, _ = read(model, random_ids(80), policy=f"kvzip{settings}", block=16)
    assert len(codes) == 4 * 80
    by_layer = [
        [{j: s for (*own, j), s in scores.items() if own == [i, h]} for h in (0, 1)] for i in (0, 1)
    ]
    every = {(layer, head): [*range(80)] for layer in (0, 1) for head in (0, 1)}
    expected = kept_of(by_layer, every, BUDGET)
    if "each" in settings:
        expected = {}
        for layer, own in enumerate(by_layer):
            kept = kept_of([own], {(0, head): [*range(80)] for head in (0, 1)}, BUDGET)
            expected |= {(layer, head): kept[0, head] for head in (0, 1)}
    for layer in (0, 1):
        assert positions(cache, layer) == [expected[layer, head] for head in (0, 1)]
    for place, stored in stored_by_place(cache.slot_layers):
        assert all(torch.equal(codes[place][name], own) for name, own in stored.items())


def test_the_worked_example():
    """One layer, heads a and b, one sink: 4 pairs stay of 6, and then of 10."""

    def cut(importance, places):
        protected = torch.tensor([[[j == 0 for j in head] for head in places]])
        heads = Heads(2, torch.tensor([importance]), torch.tensor([places]), protected, 0, 6)
        (counts,) = Joint().tokens_of([heads])
        stay = []
        for own, head, count in zip(importance, places, counts[0].tolist(), strict=True):
            order = sorted(zip(own, head, strict=True), key=lambda pair: (pair[1] != 0, -pair[0]))
            stay.append(sorted(j for _, j in order[:count] if j >= 0))
        return stay

    scores = {"a": [0, 0.10, 0.60, 0.20, 0.70, 0.40], "b": [0, 0.30, 0.05, 0.01, 0.02, 0.15]}
    read, kept = [0, 1, 2], []
    kept = cut([scores["a"][:3], scores["b"][:3]], [read, read])
    assert kept == [[0, 2], [0, 1]]
    held = [[*head, 3, 4, 5] for head in kept]
    assert sum(map(len, held)) == 10
    again = cut([[scores[h][j] for j in own] for h, own in zip("ab", held, strict=True)], held)
    assert again == [[0, 2, 4], [0]]
    assert again == cut([scores["a"], scores["b"]], [[*range(6)]] * 2)


def test_layers_of_unequal_widths_compete():
    wide = Heads(2, torch.tensor([[[0.1, 0.9, 0.8]]]), torch.tensor([[[0, 1, 2]]]), None, 0, 3)
    narrow = Heads(2, torch.tensor([[[0.5]]]), torch.tensor([[[2]]]), None, 0, 3)
    assert [own.tolist() for own in Joint().tokens_of([wide, narrow])] == [[[3]], [[1]]]
    few = [Heads(1, each.importance, each.positions, None, 0, 3) for each in (wide, narrow)]
    assert [own.tolist() for own in Joint().tokens_of(few)] == [[[2]], [[0]]]


def test_equal_scores_stay_by_position_and_then_by_layer():
    """Slot 1 is position 3 in one head and position 2 in the other, which comes first."""
    one, other = (
        Heads(2, torch.tensor([[[0.9, 0.5]]]), torch.tensor([[[0, j]]]), None, 0, 10)
        for j in (3, 2)
    )
    three = [
        Heads(budget, each.importance, each.positions, None, 0, 10)
        for budget, each in ((2, one), (1, other))
    ]
    assert [own.item() for own in Joint().tokens_of(three)] == [1, 2]


@pytest.mark.parametrize("kv_heads", first(2, [2, 1]))
def test_a_padded_entry_equals_that_entry_alone(kv_heads):
    model = attached(num_key_value_heads=kv_heads)
    rows = [random_ids(61), random_ids(9, seed=3), random_ids(33, seed=4), random_ids(52, seed=5)]
    both, logits = read(model, *padded(*rows))
    for i, row in enumerate(rows):
        alone, own = read(model, row)
        torch.testing.assert_close(logits[i], own[0], atol=1e-5, rtol=1e-5)
        for layer in range(2):
            assert positions(both, layer, i) == positions(alone, layer)
    assert positions(both, 0, 1) == [list(range(9))] * kv_heads


def test_one_block_is_the_whole_prompt():
    model, ids = attached(), random_ids(PROMPT)
    whole = kvtool.build_cache(model, "kvzip", BUDGET)
    Repetition.of(whole).instruct(Instructions(FIRST, LATER))
    prefill(model, whole, ids)
    for block in (PROMPT, 30, 4096):  # a rest of 7 joins the block of 30
        cache, _ = read(model, ids, block=block)
        for layer in range(2):
            assert positions(cache, layer) == positions(whole, layer)


def test_what_fits_is_fed_once_and_ends_the_prompt():
    model, ids = attached(), random_ids(PROMPT)
    with patch.object(cache_module, "storing_nothing", side_effect=AssertionError("fed twice")):
        cache, logits = read(model, ids, budget=PROMPT)
    full = kvtool.build_cache(model, "full")
    torch.testing.assert_close(logits, prefill(model, full, ids), atol=1e-5, rtol=1e-5)
    assert cache.report().kept_per_layer == [PROMPT, PROMPT]
    model(random_ids(1), past_key_values=cache)  # a plain forward is refused before the cut


def held_at_cuts(model, ids, **options):
    """Bytes of all tensors of slots each time before something is cut, and the cache."""
    held, whole = [], repetition.cut_repeated

    def note(layers, *args, **kwargs):
        stores = [store.slots for layer in layers for store in layer.stores]
        held.append(sum(each.kv_bytes + each.state_bytes for each in stores))
        whole(layers, *args, **kwargs)

    with patch.object(repetition, "cut_repeated", note):
        cache, _ = read(model, ids, **options)
    return held, cache


@pytest.mark.parametrize("policy", ["kvzip", "kvzip+int8"])
def test_no_more_than_budget_and_block_are_stored(policy):
    model = attached()
    held, cache = held_at_cuts(model, random_ids(196), policy=policy, budget=20, block=32)
    shapes, codec = layer_shapes(model.config, "float32"), parse_policy(policy).codec
    slot, ranges = slot_bytes(shapes[0], 0, codec), 2 * range_bytes(shapes[0], codec)
    assert codec is not None or (slot, ranges) == (128 + 4, 0)
    assert len(held) == 6  # the last block has 36: a rest of 4 joined it
    assert held[0] == 32 * 4 * slot + ranges  # tokens x heads
    assert {*held[1:-1]} == {52 * 4 * (slot + 4) + ranges}  # with their weights
    planned, copy, _ = repeating_bytes(parse_policy(policy), shapes, [20 + 36] * 2, 196, 36)
    assert max(held) == held[-1] == planned == (20 + 36) * 4 * (slot + 4) + ranges
    report = cache.report()
    assert report.peak_bytes <= planned + copy
    assert report.kv_bytes == 20 * 4 * (slot - 4)
    stores = [store.slots for layer in cache.slot_layers for store in layer.stores]
    assert all(not store.state for store in stores)  # weights are gone with the last cut
    assert report.state_bytes == 4 * sum(each.positions.numel() for each in stores) + ranges


def alive_at_cuts(model, ids, **options):
    """Bytes that live at a time while something is cut, above those before."""
    whole = repetition.cut_repeated

    def note(*args, **kwargs):
        with record_function("cut"):
            whole(*args, **kwargs)

    with (
        patch.object(repetition, "cut_repeated", note),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
    ):
        read(model, ids, **options)
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    for cut in (event for event in events if event.name() == "cut"):
        end = cut.start_ns() + cut.duration_ns()
        own = [change for at, change in changes if cut.start_ns() <= at <= end]
        yield max(itertools.accumulate(own))


@pytest.mark.parametrize("layers", [1, 16])
def test_a_cut_takes_no_more_than_is_planned(layers):
    """Where many layers compete, their numbers take more than what one layer attends to."""
    model = kvtool.attach(peaky_model("llama", num_hidden_layers=layers))
    alive = list(alive_at_cuts(model, random_ids(196), budget=40, block=32))
    shapes = layer_shapes(model.config, "float32")
    _, *planned = repeating_bytes(parse_policy("kvzip"), shapes, [40 + 36] * layers, 196, 36)
    assert len(alive) == 6
    assert max(alive) <= max(planned)
    if layers == 16:
        assert max(planned) == 48 * 16 * 2 * 76 < 1.2 * max(alive)


def test_the_peak_is_a_fraction_of_the_whole_prompts():
    model, ids = attached(), random_ids(400)
    whole = kvtool.build_cache(model, "kvzip", 24)
    Repetition.of(whole).instruct(Instructions(FIRST, LATER))
    prefill(model, whole, ids)
    cache, _ = read(model, ids, budget=24, block=24)
    assert 3 * cache.report().peak_bytes <= whole.report().peak_bytes


@pytest.mark.parametrize(
    "name", first(2, ["gemma3", "deepseek_v3", "qwen3_next", "gpt_oss", "gemma2"])
)
def test_families_hold_the_budget_and_go_on(name):
    """Sliding windows, latents, recurrent states, learned sinks, soft caps."""
    model, ids = kvtool.attach(family_model(name)), random_ids(90)
    cache, fits = (built(model, budget=tokens, block=25) for tokens in (30, 90))
    prefill(model, cache, ids)
    full = kvtool.build_cache(model, "full", prefill="block:25")
    torch.testing.assert_close(
        prefill(model, fits, ids), prefill(model, full, ids), atol=2e-5, rtol=2e-5
    )
    free = [layer for layer in cache.slot_layers if layer.window is None]
    kept = [(cache.kept_positions(layer.index) >= 0).sum(-1) for layer in free]
    assert sum(each.sum() for each in kept) == sum(30 * each.numel() for each in kept)
    for layer in free:
        stored = cache.kept_positions(layer.index)
        assert (stored[..., :4] == torch.arange(4)).all()
    assert torch.isfinite(prefill(model, cache, random_ids(5, seed=4))).all()
    assert cache.tokens_seen() == [95]


@pytest.mark.parametrize("policy", ["kvzip", "kvzip+int8"])
def test_turns_rollback_and_files_after_it(policy, tmp_path):
    model, ids, turn = attached(), random_ids(60), random_ids(21, seed=2)
    cache, _ = read(model, ids, policy=policy)
    kvtool.save_cache(cache, tmp_path / "cache")
    again = kvtool.load_cache(tmp_path / "cache", model)
    before = [positions(cache, layer) for layer in range(2)]
    with cache.rollback():
        expected = prefill(model, cache, turn)
    assert [positions(cache, layer) for layer in range(2)] == before
    for each in (cache, again):
        torch.testing.assert_close(prefill(model, each, turn), expected, atol=1e-5, rtol=1e-5)
        later = list(range(60, 81))
        for layer in range(2):
            assert positions(each, layer) == [own + later for own in before[layer]]


def test_a_rolled_back_prompt_leaves_an_empty_cache():
    model, ids = attached(), random_ids(PROMPT)
    cache = built(model)
    with cache.rollback():
        prefill(model, cache, ids)
    assert cache.get_seq_length() == 0
    fresh, logits = read(model, ids)
    torch.testing.assert_close(prefill(model, cache, ids), logits)
    for layer in range(2):
        assert positions(cache, layer) == positions(fresh, layer)


def test_short_blocks_warn():
    model = attached()
    with pytest.warns(KvtoolWarning, match="blocks of 64 tokens cost `kvzip` answers"):
        kvtool.build_cache(model, "kvzip", 20, prefill="block:64")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvtool.build_cache(model, "kvzip", 20, prefill="block:256")
        kvtool.build_cache(model, "h2o", 20, prefill="block:64")


def test_a_block_is_512_tokens_where_none_is_said():
    assert kvtool.build_cache(attached(), "kvzip", 20, prefill="block").prefill == "block:512"
    assert kvtool.build_cache(attached(), "h2o", 20, prefill="block").prefill == "block:128"


@pytest.mark.parametrize(
    ("modifier", "told"),
    [
        ("refit", "last queries see of all of it"),
        ("calidrop", "`calidrop` would change what they stand for"),
        ("critical", "`critical` would change what they stand for"),
    ],
)
def test_what_would_change_earlier_scores_is_refused(modifier, told):
    with pytest.raises(UsageError, match=told):
        kvtool.build_cache(attached(), f"kvzip+{modifier}", 20, prefill="block")


def test_budgets_below_what_always_stays_are_refused():
    with pytest.raises(UsageError, match="budget 12 is not above the 14 tokens around the text"):
        read(attached(), random_ids(PROMPT), around=(10, 4))
