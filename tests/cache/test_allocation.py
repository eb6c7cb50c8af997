"""Layers with budgets of their own: what is held, what is chosen, in batches, turns and files."""

from __future__ import annotations

import math

import pytest
import torch

import kvtool
from kvtool.errors import UsageError
from kvtool.generation import decode_step, prefill
from kvtool.policies.allocate.d2o import D2O
from kvtool.policies.allocate.problem import AllocationProblem
from kvtool.policies.allocate.pyramid import pyramid_line
from kvtool.policies.allocate.split import AllocatedSplit, Spread
from tests.models_for_tests import family_model, peaky_model, random_ids
from tests.tiers import first

LAYERS = 4
ALLOCATORS = ["pyramid", "d2o-alloc(norm=minmax)"]
SLOT = 2 * 16 * 2 * 4  # bytes of one slot of a layer: KV heads, dim, keys and values, float32


@pytest.fixture(scope="module")
def model():
    return kvtool.attach(peaky_model("llama", num_hidden_layers=LAYERS))


def filled(model, policy, budget, ids, mask=None, prefill_mode="full"):
    cache = kvtool.build_cache(model, policy, budget, prefill=prefill_mode)
    logits = prefill(model, cache, ids, mask)
    return cache, logits


def column_variances(model, ids) -> list[float]:
    """F of each layer from the attention matrices that eager attention returns."""
    kvtool.detach(model)
    model.set_attn_implementation("eager")
    try:
        layers = model(ids, output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")
        kvtool.attach(model)
    found = []
    for weights in layers:
        heads = []
        for head in weights[0]:
            sums = [sum(column.tolist()) for column in head.T]
            mean = sum(sums) / len(sums)
            heads.append(sum((value - mean) ** 2 for value in sums) / len(sums))
        found.append(sum(heads) / len(heads))
    return found


@pytest.mark.parametrize("norm", ["length", "minmax"])
def test_d2o_splits_by_the_variance_of_the_prompts_attention(model, norm):
    ids = random_ids(70)
    policy = kvtool.parse_policy("streaming")
    problem = AllocationProblem(
        total=LAYERS * 20,
        min_budgets=[policy.min_budget] * LAYERS,
        max_budgets=[70] * LAYERS,
        variance=column_variances(model, ids),
        largest=[69] * LAYERS,
    )
    expected = D2O(norm=norm).split(problem).tokens
    cache, _ = filled(model, f"streaming+d2o-alloc(norm={norm})", 20, ids)
    assert cache.report().kept_per_layer == expected
    assert sum(expected) == LAYERS * 20
    assert norm == "length" or len(set(expected)) > 1


@pytest.mark.parametrize(
    "policy",
    first(
        2,
        [
            "h2o+caote+pyramid",
            "snapkv(window=6)+d2o-alloc(norm=minmax)",
            "streaming+d2o-alloc(norm=minmax)",
            "h2o+d2o-merge+pyramid",
        ],
    ),
)
def test_a_layer_keeps_what_it_keeps_alone_and_holds_its_budget_while_decoding(model, policy):
    """A whole prompt is attended before anything is cut, so layers do not disturb each other."""
    ids, base = random_ids(60), policy.rpartition("+")[0]
    cache, logits = filled(model, policy, 16, ids)
    report = cache.report()
    kept = report.kept_per_layer
    assert sum(kept) == 16 * LAYERS
    assert len(set(kept)) > 1
    assert report.kv_bytes == 16 * LAYERS * SLOT
    for layer, tokens in enumerate(kept):
        alone, same = filled(model, base, tokens, ids)
        assert torch.equal(cache.kept_positions(layer), alone.kept_positions(layer))
        assert torch.allclose(logits, same, atol=1e-4)
    for token in range(2, 12):
        decode_step(model, cache, torch.tensor([token]))
    appended = 10 if base.startswith("snapkv") else 0
    report = cache.report()
    assert report.kept_per_layer == [tokens + appended for tokens in kept]
    if not appended:
        assert report.allocated_bytes == sum(tokens + 1 for tokens in kept) * SLOT


def test_pyramid_follows_its_line(model):
    cache, _ = filled(model, "snapkv(window=8)+pyramid", 48, random_ids(300))
    line = pyramid_line(LAYERS, 48, 300, window=8, beta=20)
    assert cache.report().kept_per_layer == [round(past) + 8 for past in line]
    cache, _ = filled(model, "h2o+pyramid", 48, random_ids(300), prefill_mode="block:64")
    assert sum(cache.report().kept_per_layer) == 48 * LAYERS


WINDOWS = {  # that `+pyramid` adds to its line: the votes that stay, else 8
    "expected": 8,
    "h2o": 8,
    "snapkv(window=12)": 12,
    "pyramidkv(window=5)": 5,
    "rkv(window=12)": 12,
    "h2o+pyramid(window=0)": 0,
}


def test_pyramid_adds_the_window_of_votes_or_else_8():
    for policy, window in WINDOWS.items():
        parsed = kvtool.parse_policy(policy if "pyramid" in policy else f"{policy}+pyramid")
        line = [past + window for past in pyramid_line(3, 40, 150, window=window, beta=20)]
        least = [max(round(tokens), parsed.min_budget) for tokens in line]
        split = [120 - sum(least[1:]), *least[1:]]
        assert AllocatedSplit(parsed, 3).for_prompt(40, 150) == split, policy


@pytest.mark.parametrize(
    ("policy", "budget"),
    [("h2o+pyramid", "30%"), ("roco(sinks=2)+d2o-alloc(norm=minmax)", "20KiB")],
)
def test_ratios_and_bytes_are_split_too(model, policy, budget):
    cache, _ = filled(model, policy, budget, random_ids(60))
    numbers = len(cache.policy.statistics)  # beside each slot of 2 heads; a slot more takes a token
    by_bytes = 20 * 1024 // (LAYERS * (256 + 2 * 4 * (1 + numbers))) - 1
    tokens = {"30%": 18, "20KiB": by_bytes}[budget]
    report = cache.report()
    assert sum(report.kept_per_layer) == tokens * LAYERS
    assert budget != "20KiB" or report.allocated_bytes + report.state_bytes <= 20 * 1024


@pytest.mark.parametrize("policy", ["h2o+pyramid", "snapkv(window=6)+d2o-alloc(norm=minmax)"])
def test_a_row_of_a_padded_batch_has_its_own_share(model, policy):
    rows = [random_ids(60, seed=1)[0], random_ids(37, seed=2)[0]]
    ids = torch.zeros(2, 60, dtype=torch.long)
    mask = torch.zeros(2, 60, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, 60 - len(row) :], mask[i, 60 - len(row) :] = row, 1
    both, logits = filled(model, policy, "40%", ids, mask)
    alone = [filled(model, policy, "40%", row[None]) for row in rows]
    for token in (5, 9):
        for i, (cache, single) in enumerate(alone):
            assert torch.allclose(logits[i], single[0], atol=1e-4)
            for layer in range(LAYERS):
                kept = cache.kept_positions(layer)[0]
                ours = both.kept_positions(layer)[i]
                assert torch.equal(ours[:, : kept.shape[1]], kept)
                assert (ours[:, kept.shape[1] :] == -1).all()
        logits = decode_step(model, both, torch.tensor([token, token]))
        alone = [(c, decode_step(model, c, torch.tensor([token]))) for c, _ in alone]


def test_what_just_fits_is_never_touched(model):
    ids = random_ids(60)
    _, expected = filled(model, "full", None, ids)
    for allocator in ALLOCATORS:
        cache, logits = filled(model, f"h2o+{allocator}", 60, ids)
        assert torch.allclose(logits, expected, atol=1e-5)
        assert cache.report().kept_per_layer == [60] * LAYERS


def test_waiting_for_all_layers_holds_the_full_cache_once(model):
    cache, _ = filled(model, "h2o+d2o-alloc(norm=minmax)", 16, random_ids(60))
    report = cache.report()
    assert report.peak_bytes == report.full_bytes
    assert report.allocated_bytes < report.full_bytes / 3


def slow_variance(call, positions, group):
    """F of one row of a layer, from its queries and keys alone: loops over lists.

    Args:
        positions: of the keys, -1 = empty; the newest tokens are the queries'.
    """
    stored = [i for i, position in enumerate(positions) if position >= 0]
    first = max(positions) + 1 - call.query.shape[2]
    found = []
    for head in range(call.query.shape[1]):
        sums = dict.fromkeys(stored, 0.0)
        for row, query in enumerate(call.query[0, head].double()):
            seen = [i for i in stored if positions[i] <= first + row]
            keys = call.key[0, head // group, seen].double()
            logits = [product * call.scale for product in (keys @ query).tolist()]
            powers = [math.exp(logit - max(logits)) for logit in logits]
            whole = math.fsum(powers)
            if call.sinks is not None:  # a sink takes its share and is no key
                whole += math.exp(call.sinks.flatten().tolist()[head] - max(logits))
            for i, power in zip(seen, powers, strict=True):
                sums[i] += power / whole
        mean = math.fsum(sums.values()) / len(sums)
        found.append(math.fsum((value - mean) ** 2 for value in sums.values()) / len(sums))
    return sum(found) / len(found)


def slow_reciprocal(variances, held, total, least):
    """Shares in proportion to 1 / F, none above what a layer holds, largest remainders first."""
    shares, bound = [0.0] * len(held), {}
    while True:
        free = [i for i in range(len(held)) if i not in bound]
        left = total - sum(bound.values())
        for i in free:
            shares[i] = left / variances[i] / sum(1 / variances[j] for j in free)
        over = {i: held[i] for i in free if shares[i] > held[i]}
        under = {i: least for i in free if shares[i] < least}
        if not over and not under:
            break
        # the side that moves more tokens is bound for good
        excess = sum(shares[i] - limit for i, limit in over.items())
        lack = sum(limit - shares[i] for i, limit in under.items())
        bound |= over if excess >= lack else under
        shares = [float(bound.get(i, shares[i])) for i in range(len(held))]
    tokens = [int(share + 1e-9) for share in shares]
    order = sorted(range(len(held)), key=lambda i: (tokens[i] - shares[i], i))
    for i in order[: total - sum(tokens)]:
        tokens[i] += 1
    return tokens


@pytest.mark.parametrize(("family", "base"), [("llama", "snapkv(window=3)"), ("gpt_oss", "h2o")])
def test_every_turn_is_split_by_the_variance_of_its_own_attention(family, base):
    """Queries attend to what earlier turns have left, or in part to a sink logit: no mean of 1."""
    settings = {"num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS}
    if family == "llama":
        model = kvtool.attach(peaky_model("llama", num_hidden_layers=LAYERS))
    else:
        model = kvtool.attach(peaky_model("gpt_oss", "eager", num_local_experts=4, **settings))
        for layer in model.model.layers:
            torch.nn.init.constant_(layer.self_attn.sinks, 2.0)
    policy = kvtool.parse_policy(base)
    cache = kvtool.build_cache(model, f"{base}+d2o-reciprocal", 16)
    calls = {}
    cache.watch_steps(lambda step, call, out: calls.setdefault(step.layer.index, call))
    seen = 0
    for turn, length in enumerate([40, 25, 1, 30]):
        calls.clear()
        places = [
            [] if not seen else [p for p in cache.kept_positions(layer)[0, 0].tolist() if p >= 0]
            for layer in range(LAYERS)
        ]
        prefill(model, cache, random_ids(length, seed=turn))
        new = list(range(seen, seen + length))
        seen += length
        found, held = [], []
        for layer in range(LAYERS):
            positions = places[layer] + new
            stored = calls[layer].key.shape[2]  # rows of a batch are padded to the longest
            positions = places[layer] + [-1] * (stored - len(positions)) + new
            found.append(slow_variance(calls[layer], positions, 4))
            held.append(len(places[layer]) + length)
        assert cache.budgets.spreads[0].variance == pytest.approx(found, rel=1e-4)
        expected = slow_reciprocal(found, held, 16 * LAYERS, min(policy.min_budget, 16))
        assert cache.report().kept_per_layer == expected
        assert sum(expected) == 16 * LAYERS
        assert len(set(expected)) > 1


def test_the_length_norm_knows_the_largest_variance_of_a_turn(model):
    """Of q queries over S tokens, all on one of them: q^2 (S - 1) / S^2, n - 1 if both are n."""
    for queries, held in ((60, 60), (7, 30), (1, 12)):
        sums = [float(queries)] + [0.0] * (held - 1)
        mean = queries / held
        variance = sum((value - mean) ** 2 for value in sums) / held
        spread = Spread([variance], queries, [held])
        assert spread.largest == [pytest.approx(variance)]
    assert Spread([59.0], 60, [60]).largest == [pytest.approx(59)]


@pytest.mark.parametrize("policy", ["h2o+d2o-reciprocal", "snapkv(window=3)+d2o-alloc"])
def test_a_prompt_in_several_forwards_is_split_as_one(model, policy):
    ids = random_ids(70)
    whole, _ = filled(model, policy, 16, ids)
    parts = kvtool.build_cache(model, policy, 16)
    with parts.prompt([70]):
        for part in ids.split(23, 1):
            model(part, past_key_values=parts)
    assert parts.budgets.spreads[0].variance == pytest.approx(whole.budgets.spreads[0].variance)
    assert parts.report().kept_per_layer == whole.report().kept_per_layer


@pytest.mark.parametrize("policy", first(1, ["h2o+ada+d2o-alloc(norm=minmax)", "d2o"]))
def test_turns_of_padded_rows_are_split_as_alone(model, policy):
    """A row that is silent in a turn is left as it is."""
    turns = [(60, 37, 12), (9, 1, 30), (20, 0, 3)]
    both = kvtool.build_cache(model, policy, 16)
    alone = [kvtool.build_cache(model, policy, 16) for _ in range(3)]
    for turn, lengths in enumerate(turns):
        rows = [random_ids(max(n, 1), seed=10 * turn + i)[0][:n] for i, n in enumerate(lengths)]
        ids = torch.zeros(3, max(lengths), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            if len(row):
                ids[i, -len(row) :], mask[i, -len(row) :] = row, 1
        logits = prefill(model, both, ids, mask)
        for i, row in enumerate(rows):
            if len(row):
                single = prefill(model, alone[i], row[None])[0]
                assert torch.allclose(logits[i], single, atol=1e-3)
            for layer in range(LAYERS):
                kept = alone[i].kept_positions(layer)[0]
                ours = both.kept_positions(layer)[i]
                assert torch.equal(ours[:, : kept.shape[1]], kept)
                assert (ours[:, kept.shape[1] :] == -1).all()


@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"prefill_chunk_size": 16}])
def test_transformers_own_generate_cuts_at_the_prompts_end(model, settings):
    for allocator in ALLOCATORS:
        cache = kvtool.build_cache(model, f"h2o+{allocator}", 16)
        out = model.generate(
            random_ids(60), past_key_values=cache, max_new_tokens=5, do_sample=False, **settings
        )
        assert out.shape[1] == 65
        assert sum(cache.report().kept_per_layer) == 16 * LAYERS


@pytest.mark.parametrize("name", first(1, ["gemma2", "mistral-window", "lfm2"]))
def test_sliding_and_recurrent_layers_are_left_out(name):
    model = kvtool.attach(family_model(name))
    uniform, _ = filled(model, "h2o", 16, random_ids(60))
    for allocator in ALLOCATORS:
        cache, _ = filled(model, f"h2o+{allocator}", 16, random_ids(60))
        assert sum(cache.report().kept_per_layer) == sum(uniform.report().kept_per_layer)


def test_what_cannot_be_split_is_refused(model):
    with pytest.raises(UsageError, match="keeps everything"):
        kvtool.parse_policy("full+pyramid")
    with pytest.raises(UsageError, match="exclude each other"):
        kvtool.parse_policy("h2o+pyramid+uniform")
    with pytest.raises(UsageError, match="needs measurements"):
        kvtool.build_cache(model, "h2o+optimal", 16)
    with pytest.raises(UsageError, match="budget 3 is not above sinks"):
        kvtool.build_cache(model, "streaming+pyramid", 3)
