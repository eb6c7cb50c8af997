"""Refitted values in a cache: those of a slow reference implementation, whatever stores them."""

from unittest.mock import patch

import pytest
import torch

import kvtool
from kvtool import KvtoolError, UsageError
from kvtool.cache.features import repetition
from kvtool.cache.features.held_queries import HeldQueries
from kvtool.generation import decode_step, prefill
from tests.models_for_tests import (
    anchored_model,
    any_cache,
    family_model,
    peaky_model,
    prompt,
    random_ids,
)
from tests.reference import policies
from tests.reference.refit import RefitOracle, refit

PROMPT, BUDGET, QUERIES, RIDGE = 41, 14, 5, 0.05
REFIT = f"refit(queries={QUERIES},ridge={RIDGE})"


def attached(name="llama", **changes):
    return kvtool.attach(peaky_model(name, num_hidden_layers=2, **changes))


def fed(model, policy, ids, mask=None, budget=BUDGET):
    """A cache that has read a prompt, and the call of each layer that attended it."""
    cache, calls = any_cache(model, policy, budget), []
    cache.watch_steps(lambda step, call, out: calls.append(call))
    prefill(model, cache, ids, mask)
    return cache, calls


def stored(cache, layer):
    """Positions and values that a layer holds, (batch, kv_heads, slots, ..)."""
    own = cache.slot_layers[layer]
    slots = own.sorted_slots()
    form = own.slots.form if own.ragged is None else own.ragged.whole_form(own.slots.form)
    return slots.positions, form.dequantise_values(slots.stored)


def last_rows(call, row, heads, new):
    """The last queries of some query heads of a batch entry, as the slow twin takes them."""
    columns = [i for i, place in enumerate(new) if place >= 0][-QUERIES:]
    sinks = [None] * call.query.shape[1] if call.sinks is None else call.sinks.flatten().tolist()
    query = call.query[row].tolist()
    return [(new[i], query[head][i], sinks[head]) for head in heads for i in columns]


def check(cache, layer, call, rows_of=None, tolerance=1e-4):
    """Every head of every batch entry holds the values of the slow twin."""
    positions, values = stored(cache, layer)
    batch, heads = positions.shape[:2]
    group, lost = call.query.shape[1] // heads, 0
    for row in range(batch):
        new = list(range(call.q_len)) if call.positions is None else call.positions[row].tolist()
        for head in range(heads):
            kept = [p for p in positions[row, head].tolist() if p >= 0]
            keys, before = (
                {p: each[row, head, i].tolist() for i, p in enumerate(new) if p >= 0}
                for each in (call.raw_key, call.raw_value)
            )
            if len(kept) == len(keys):
                expected = [before[p] for p in kept]
            else:
                own = range(head * group, (head + 1) * group)
                rows = (rows_of or last_rows)(call, row, own, new)
                how = RIDGE, call.scale, call.softcap
                fitted = refit(rows, keys, before, kept, *how)
                expected, lost = [fitted[p] for p in kept], lost + 1
                plain = torch.tensor([before[p] for p in kept])
                assert not torch.allclose(torch.tensor(expected), plain, atol=1e-2)
            ours = values[row, head, : len(kept)].float()
            torch.testing.assert_close(ours, torch.tensor(expected), atol=tolerance, rtol=tolerance)
    return lost


def padded(*rows):
    width = max(row.shape[1] for row in rows)
    ids, mask = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
    for i, row in enumerate(rows):
        ids[i, width - row.shape[1] :], mask[i, width - row.shape[1] :] = row[0], 1
    return ids, mask


POLICIES = [
    "pyramidkv(window=4)",
    "snapkv(window=4)+caote+ada",
    "expected",
    "snapkv(window=4)+chunk(length=5)",
    "pyramidinfer(min_context=2)",
]


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_values_of_each_row_and_head_are_those_of_the_slow_twin(policy):
    """Two rows that are cut, one of them shorter than the queries' number of columns, one fits."""
    rows = [random_ids(PROMPT), random_ids(BUDGET + 9, seed=3), random_ids(4, seed=5)]
    cache, calls = fed(attached(), f"{policy}+{REFIT}", *padded(*rows))
    for layer, call in enumerate(calls):
        assert check(cache, layer, call) >= 2


@pytest.mark.parametrize("family", ["qwen3"])
def test_turns_are_cut_and_refitted_again(family):
    """A turn of more tokens than there are queries, and one of fewer; tokens between them."""
    model = kvtool.detach(anchored_model(family))
    slow = RefitOracle(model, lambda: policies.build("snapkv", 20, window=4), 6, 0.05)
    ids, texts = prompt(45), [prompt(17, seed=2), prompt(3, seed=3)]
    expected = [slow.feed(ids)]
    for text in texts:
        slow.in_prompt = False
        expected += [slow.feed([token]) for token in (7, 9)]
        slow.in_prompt = True
        expected += [slow.feed(text[1:])]
    kvtool.attach(model)
    cache = kvtool.build_cache(model, "snapkv(window=4)+refit(queries=6,ridge=0.05)", 20)
    ours = [prefill(model, cache, torch.tensor([ids]))]
    for text in texts:
        ours += [decode_step(model, cache, torch.tensor([token])) for token in (7, 9)]
        ours += [prefill(model, cache, torch.tensor([text[1:]]))]
    for layer in range(3):
        assert cache.kept_positions(layer)[0].tolist() == slow.kept[layer]
    torch.testing.assert_close(torch.cat(ours), torch.stack(expected), atol=1e-3, rtol=1e-3)
    kvtool.detach(model)


def test_of_a_repeated_prompt_queries_of_the_repetition_are_shown():
    """At equal steps over both chunks; the short row has fewer tokens than there are queries."""
    rows = [random_ids(PROMPT), random_ids(BUDGET + 4, seed=3), random_ids(6, seed=5)]
    model, passes = attached(), []
    attend = repetition.RepeatedWeights.attend

    def note(weights, layer, call):
        passes.append((layer.index, call, list(zip(weights.starts, weights.ends, strict=True))))
        return attend(weights, layer, call)

    with patch.object(repetition.RepeatedWeights, "attend", note):
        cache, calls = fed(model, f"kvzip(chunk=21)+{REFIT}", *padded(*rows))
    wanted = [[4 + (2 * i + 1) * (PROMPT - 4) // 10 for i in range(5)]]
    wanted += [[4 + (2 * i + 1) * BUDGET // 10 for i in range(5)], []]

    def repeated(layer, call, row, heads, new):
        found = []
        for head in heads:
            for own, each, spans in passes:
                start, stop = spans[row]
                if own != layer:
                    continue
                count = each.q_len
                if each.positions is not None:
                    count = int((each.positions[row] >= 0).sum())
                for place in range(start, stop):
                    if place in wanted[row]:
                        query = each.query[row, head, count - stop + place].tolist()
                        found.append((10**6, query, None))
        assert len(found) == 5 * len(heads)
        return found

    for layer in range(2):
        own = lambda *given, layer=layer: repeated(layer, *given)  # noqa: E731
        assert check(cache, layer, calls[layer], own) == 4
        assert HeldQueries.of(cache.slot_layers[layer]).nbytes == 0


FAMILIES = ["gemma2", "gpt_oss", "mistral-window", "qwen3_next", "llama4"]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_with_soft_caps_learned_sinks_and_windows(name):
    model = kvtool.attach(family_model(name))
    rows = padded(random_ids(PROMPT) % 96, random_ids(PROMPT - 4, seed=3) % 96)
    cache, calls = fed(model, f"snapkv(window=4)+{REFIT}", *rows)
    layers, free = [layer.index for layer in cache.slot_layers], 0
    for place, call in zip(range(len(layers)), calls, strict=True):
        if cache.slot_layers[place].window is None:
            free += check(cache, place, call)
        assert (
            HeldQueries.of(cache.slot_layers[place]) is None
            or not cache.slot_layers[place].parts["held_queries"].nbytes
        )
    if name != "mistral-window":
        assert free
    kvtool.detach(model)


@pytest.mark.few(1)
@pytest.mark.parametrize(("codec", "steps"), [("k8v4", 7), ("fp8", 14)])
def test_values_are_refitted_before_they_are_rounded(codec, steps):
    model = kvtool.attach(peaky_model("llama", num_hidden_layers=2, head_dim=32))
    cache, _ = fed(model, f"snapkv(window=4)+{REFIT}+{codec}", random_ids(PROMPT))
    exact, _ = fed(model, f"snapkv(window=4)+{REFIT}", random_ids(PROMPT))
    plain, _ = fed(model, f"snapkv(window=4)+{codec}", random_ids(PROMPT))
    positions, values = stored(cache, 0)
    assert torch.equal(positions, stored(exact, 0)[0])
    fitted = stored(exact, 0)[1]
    step = fitted.abs().amax(-1, keepdim=True) / steps
    near = (values - fitted).abs() / step
    assert near.mean() < 1  # the keys that they are fitted for are rounded, too
    assert (stored(plain, 0)[1] - fitted).abs().mean() > 2 * (values - fitted).abs().mean()
    keys = [each.slot_layers[0].sorted_slots().stored["keys"] for each in (cache, plain)]
    assert torch.equal(*keys)


def test_what_a_head_has_stored_in_codes_is_not_rounded_again_where_it_loses_nothing():
    model = attached()
    rows = padded(random_ids(PROMPT), random_ids(6, seed=3))
    cache, _ = fed(model, f"snapkv(window=4)+{REFIT}+int8", *rows)
    before = cache.slot_layers[0].sorted_slots().stored["values"][1, :, :6].clone()
    turn = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long)
    turn[0][:, -2:], turn[1][:, -2:] = 7, 1
    turn[0][0], turn[1][0] = 7, 1
    prefill(model, cache, *turn)
    now = cache.slot_layers[0].sorted_slots()
    assert now.positions[1, 0, :9].tolist() == [*range(8), -1]
    assert torch.equal(now.stored["values"][1, :, :6], before)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_fitted_in_more(dtype):
    model = kvtool.attach(peaky_model("llama", num_hidden_layers=2).to(dtype))
    cache, calls = fed(model, f"snapkv(window=4)+{REFIT}", random_ids(PROMPT))
    assert stored(cache, 0)[1].dtype == dtype
    check(cache, 0, calls[0], tolerance=3e-2)


def test_blocks_latents_shared_keys_and_hidden_queries_are_refused():
    with pytest.raises(UsageError, match="cannot be read in blocks"):
        kvtool.build_cache(attached(), "snapkv+refit", 64, prefill="block:16")
    refused = {
        "deepseek_v3": "`refit` needs keys that are stored as they are attended",
        "gemma3n": "changes or sets aside what is evicted, which layers of",
        "falcon": "`refit` looks back from queries, and the eager attention of `falcon`",
    }
    for name, told in refused.items():
        model = kvtool.attach(family_model(name))
        with pytest.raises(KvtoolError, match=told):
            fed(model, "snapkv(window=4)+refit", random_ids(PROMPT) % 96)
        kvtool.detach(model)
