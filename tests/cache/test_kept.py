"""Which tokens each layer and head holds, as `cache.show` shows them, and what became of others."""

import pytest
import torch

import kvtool
from kvtool.cache.features.trace import Trace, _put, rank_bytes
from kvtool.cache.whole.report import kept_tokens
from kvtool.models.load import load
from kvtool.models.reference.tasks import needle_prompt
from kvtool.policies.read.exact_topk import ExactTopK
from tests.models_for_tests import family_model, peaky_model, random_ids


@pytest.fixture(scope="module")
def loaded():
    return load()


def endless_model():
    """A random model that ends no answer."""
    model = peaky_model("llama")
    model.generation_config.eos_token_id = None
    return model


def read(model, policy, ids, budget, *, new=6, prefill="full", mask=None, record=True):
    """Read a text with plain `generate`, and return its cache."""
    cache = kvtool.build_cache(model, policy, budget, prefill=prefill)
    if record:
        cache.record()
    mask = torch.ones_like(ids) if mask is None else mask
    model.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
    )
    return cache


def positions(cache, layer, row=0):
    """The positions that each head holds, as sets."""
    return [set(head[head >= 0].tolist()) for head in cache.kept_positions(layer)[row]]


def same(one, other):
    """The same is shown of two texts."""
    assert (one.tokens, one.mark, one.reads) == (other.tokens, other.mark, other.reads)
    for ours, theirs in zip(one.layers, other.layers, strict=True):
        assert torch.equal(ours.kept, theirs.kept)
        assert (ours.marked is None) == (theirs.marked is None)
        assert ours.marked is None or torch.equal(ours.marked, theirs.marked)
    assert (one.score is None) == (other.score is None)
    assert one.score is None or torch.equal(one.score, other.score)


def held(layer):
    """The same of a `KeptLayer`."""
    return [set(head.nonzero()[:, 0].tolist()) for head in layer.kept]


@pytest.mark.parametrize(
    ("policy", "prefill"),
    [
        ("snapkv", "block:64"),
        ("rocketkv", "full"),
        ("d2o", "full"),
        ("h2o+calidrop", "block:64"),
    ],
)
def test_a_prompt_is_told_as_it_is_kept(loaded, policy, prefill):
    text, _ = needle_prompt(tokens=256, seed=0)
    ids = torch.tensor([loaded.tokenizer(text)["input_ids"]])
    cache = read(loaded.model, policy, ids, 64, prefill=prefill)
    told = kept_tokens(cache)
    assert told.tokens == cache.tokens_seen()[0]
    expected = torch.zeros(told.tokens)
    for layer in told.layers:
        own = positions(cache, layer.index)
        assert held(layer) == own
        for token in (token for head in own for token in head):
            expected[token] += 1
    heads = sum(len(layer.kept) for layer in told.layers)
    torch.testing.assert_close(told.share, expected / heads)
    marks = {"rocketkv": "read", "d2o": "merged", "h2o+calidrop": "offloaded"}
    assert told.mark == marks.get(policy)


def test_layers_with_a_window_are_left_out():
    model = family_model("gemma3")
    windows = [layer.window for layer in kvtool.build_cache(model, "h2o", 16).slot_layers]
    cache = read(model, "h2o", random_ids(40, batch=1), 16)
    assert [layer.index for layer in kept_tokens(cache).layers] == [
        i for i, window in enumerate(windows) if window is None
    ]
    assert None in windows
    assert set(windows) != {None}


@pytest.mark.parametrize("policy", ["quest", "d2o", "h2o+calidrop", "snapkv(window=8)"])
def test_a_padded_row_is_told_as_the_row_alone(policy):
    model = endless_model()
    ids, alone = random_ids(60, batch=2), random_ids(60, batch=2)[1:, 13:]
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    batch = read(model, policy, ids, 24, mask=mask)
    same(kept_tokens(batch, row=1), kept_tokens(read(model, policy, alone, 24)))


def test_what_calidrop_moved_to_host_memory_is_marked(loaded):
    ids = torch.tensor([loaded.tokenizer("The old lamp was near the school. " * 20)["input_ids"]])
    told = kept_tokens(read(loaded.model, "h2o+calidrop", ids, 64))
    for layer in told.layers:
        assert torch.equal(layer.marked, ~layer.kept)
    some = kept_tokens(read(loaded.model, "h2o+calidrop(calibration_size=8)", ids, 64, new=1))
    for layer in some.layers:
        assert layer.marked.sum(1).tolist() == [8] * len(layer.marked)


def test_what_a_reader_read_in_the_last_steps_is_marked(monkeypatch):
    model, steps = endless_model(), []
    choose = ExactTopK.choose

    def noted(self, view):
        choice = choose(self, view)
        steps.append(choice.slots)
        return choice

    monkeypatch.setattr(ExactTopK, "choose", noted)
    cache = read(model, "exact-topk", random_ids(60, batch=1), 12, new=13)
    told = kept_tokens(cache)
    layers = len(told.layers)
    assert told.reads == 8
    for layer in told.layers:
        last = [each[0] for each in steps[layer.index :: layers]][-8:]
        for head, marked in enumerate(layer.marked):
            expected = {slot for each in last for slot in each[head].flatten().tolist()}
            assert set(marked.nonzero()[:, 0].tolist()) == expected
    assert kept_tokens(read(model, "exact-topk", random_ids(60, batch=1), 12, new=1)).mark is None


def test_ranks_are_worked_out_by_head():
    importance = torch.tensor([[[0.1, 0.9, 0.5, 7.0, 0.3], [3.0, 2.0, 1.0, 0.0, -1.0]]])
    places = torch.tensor([[[0, 1, 2, 3, -1], [0, 1, 2, 3, 4]]])
    ranks = rank_bytes(importance, places, None)
    # 1 + place * 254 // 3 among four tokens, // 4 among five
    assert ranks.tolist() == [[[1, 170, 85, 255, 0], [255, 191, 128, 64, 1]]]
    first = torch.tensor([True, False, False, False, False]).expand(1, 2, 5)
    assert rank_bytes(importance, places, first)[..., 0].tolist() == [[255, 255]]


def test_the_score_is_the_rank_of_the_mean_rank():
    model = endless_model()
    cache = read(model, "h2o(recent=4)", random_ids(50, batch=1), 16, new=1)
    told = kept_tokens(cache)
    means = sum(Trace.of(layer).ranks[0].float().sum(0) for layer in cache.slot_layers)
    order = means.tolist()
    for token, score in enumerate(told.score.tolist()):
        assert score == 1 + sum(other < order[token] for other in order) * 254 // 49
    # all heads keep the last tokens, whatever their scores
    assert told.score[-4:].tolist() == [told.score.max()] * 4
    assert told.score[told.share == 1].float().mean() > told.score[told.share == 0].float().mean()


def test_a_prompt_that_fits_is_all_kept_and_never_judged():
    model = endless_model()
    told = kept_tokens(read(model, "h2o", random_ids(30, batch=1), 64, new=1))
    assert told.share.tolist() == [1] * 30
    assert (told.score, told.mark) == (None, None)


@pytest.mark.parametrize(
    ("policy", "prefill"),
    [("h2o+caote", "block:16"), ("d2o", "full"), ("quest", "block:16"), ("sirllm", "full")],
)
def test_recording_changes_no_choice(policy, prefill):
    model = endless_model()
    ids = random_ids(70, batch=1)
    shown, plain = (
        read(model, policy, ids, 24, new=8, prefill=prefill, record=record)
        for record in (True, False)
    )
    assert torch.equal(shown.input_ids, plain.input_ids)
    for layer in range(len(shown.slot_layers)):
        assert torch.equal(shown.kept_positions(layer), plain.kept_positions(layer))
    assert shown.report() == plain.report()


def test_beams_and_rollback_take_the_record_along():
    model = endless_model()
    cache = read(model, "quest", random_ids(60, batch=2), 16, new=4)
    before = kept_tokens(cache, 1)
    cache.batch_select_indices(torch.tensor([1]))
    after = kept_tokens(cache)
    same(after, before)
    with cache.rollback():
        ids = torch.cat([cache.input_ids[-1:], random_ids(9, batch=1)], 1)
        cache.remember(None)
        model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
        assert kept_tokens(cache).tokens > after.tokens
    same(kept_tokens(cache), after)


def test_what_is_noted_by_position_widens_a_table():
    table = torch.tensor([[[1, 2, 3], [4, 5, 6]]], dtype=torch.uint8)
    positions = torch.tensor([[[0, -1], [4, 2]]], dtype=torch.int32)
    values = torch.tensor([[[7, 8], [9, 10]]], dtype=torch.uint8)
    found = _put(table, positions, values)
    assert found.tolist() == [[[7, 2, 3, 0, 0], [4, 5, 10, 0, 9]]]
    nothing = torch.empty(1, 2, 0, dtype=torch.int32)
    assert _put(table, nothing, nothing) is table
