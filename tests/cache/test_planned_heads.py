"""Plans with budgets of KV heads: what each head keeps, and what is stored for it."""

import itertools

import pytest
import torch

import kvtool
from kvtool.errors import UsageError
from kvtool.generation import decode_step, prefill
from tests.cache.test_oracle import MODES, spell
from tests.cache.test_padding import LENGTHS, batch, same_row
from tests.models_for_tests import anchored_model, family_model, peaky_model, prompt, random_ids
from tests.reference import oracle
from tests.reference.apart import Apart
from tests.reference.policies import build

pytestmark = pytest.mark.few(2)  # every policy goes through tests/contract

HEADS = [[11, 29], [20, 20], [33, 7]]
LENGTH, NEW = 61, 7
CASES = [
    ("recency", None, {}),
    ("streaming", None, {"sinks": 2}),
    ("keydiff", None, {"sinks": 2, "recent": 3}),
    ("lagkv", None, {"sinks": 1, "lag": 6}),
    ("lagkv", None, {"sinks": 1, "rank": False}),
    ("scissorhands", None, {}),
    ("h2o", None, {}),
    ("h2o", "caote", {"recent": 3}),
    ("tova", None, {"head_reduce": "kv_head"}),
    ("roco", "fastcaote", {"scope": 4, "protect_recent": 2, "sinks": 1}),
    ("roco", None, {}),
    ("snapkv", None, {"window": 5}),
    ("snapkv", "caote", {"window": 5, "kernel": 3}),
]


def planned(model, heads=HEADS, policy=None, **target):
    """A plan of a model, edited to have budgets of heads."""
    target = {"tokens": sum(heads[0]) // len(heads[0]), "context": LENGTH} | target
    data = kvtool.plan(model.config, policy=policy, dtype="float32", **target).to_data()
    data.pop("totals")
    free = iter(heads)
    fractions = data["layers"]["fractions"]
    data["layers"]["heads"] = [None if share is None else next(free) for share in fractions]
    means = iter(sum(own) // len(own) for own in heads)
    tokens = zip(data["layers"]["tokens"], fractions, strict=True)
    data["layers"]["tokens"] = [own if share is None else next(means) for own, share in tokens]
    data["layers"] |= {"fractions": None, "min_tokens": min(map(min, heads))}
    return data


def counts_of(cache, entry=0):
    layers = range(len(cache.slot_layers))
    return [(cache.kept_positions(i) >= 0).sum(-1)[entry].tolist() for i in layers]


@pytest.fixture
def model(family):
    yield kvtool.detach(anchored_model(family))
    kvtool.detach(anchored_model(family))


def follow(model, case, mode, heads=HEADS, cached_heads=None, length=LENGTH, new=NEW):
    """Compare with heads that have a policy of their own each, token by token."""
    base, modifier, options = case
    kvtool.attach(model)
    plan = planned(model, heads)
    kvtool.detach(model)
    own = itertools.cycle(heads)
    make = lambda: Apart(lambda tokens: build(base, tokens, modifier, **options), next(own))  # noqa: E731
    trace = oracle.run(model, make, prompt(length), MODES[mode], new, cached_heads)
    kvtool.attach(model)
    cache = kvtool.build_cache(model, spell(*case), plan=plan, prefill=mode)
    logits = prefill(model, cache, torch.tensor([prompt(length)]))[0]
    for step in range(new + 1):
        if step:
            logits = decode_step(model, cache, torch.tensor([trace.tokens[step - 1]]))[0]
        for layer, kept in trace.kept[step].items():
            ours = cache.kept_positions(layer)[0].tolist()
            assert [[p for p in head if p >= 0] for head in ours] == kept, (case, step, layer)
        torch.testing.assert_close(logits, trace.logits[step], atol=1e-4, rtol=1e-4)
    return cache


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("family", "mode", "case"),
    list(
        zip(
            itertools.cycle(["llama", "qwen3"]),
            itertools.cycle(["full", "block:20", "block:16"]),
            CASES,
            strict=False,
        )
    ),
)
def test_each_head_is_a_cache_of_its_own_budget(model, mode, case):
    cache = follow(model, case, mode)
    more = NEW if cache.policy.when == "prompt" else 0
    assert counts_of(cache) == [[count + more for count in own] for own in HEADS]


@pytest.mark.parametrize("length", [12, 21, 30])
@pytest.mark.parametrize("family", ["llama"])
def test_prompts_around_the_budget(model, length):
    """A head that would have more than the prompt leaves the rest to the others of its layer."""
    heads = [[11, 29], [20, 20], [33, 7]]
    if length == 21:
        heads = [[19, 21], [20, 20], [21, 19]]
    if length == 30:
        heads = [[11, 29], [20, 20], [30, 10]]
    follow(model, ("h2o", None, {}), "full", heads, length=length, new=12)
    if length in (21, 30):
        cache = kvtool.build_cache(kvtool.attach(model), "h2o", plan=planned(model))
        prefill(model, cache, torch.tensor([prompt(length)]))
        assert counts_of(cache) == heads


@pytest.mark.parametrize(
    ("family", "heads", "cached_heads"),
    [
        ("gemma3", [[11, 29], [24, 16]], None),  # every other layer slides over its window
        ("gpt_oss", [[11, 29], [24, 16]], None),  # a sink logit per head
        ("deepseek_v3", [[20]] * 4, 1),  # one latent for all heads
    ],
)
def test_layers_with_windows_sinks_and_latents(family, heads, cached_heads):
    model = family_model(family)
    kvtool.attach(model)
    free = kvtool.plan(model.config, tokens=20, context=LENGTH).layers.fractions
    kvtool.detach(model)
    heads = list(itertools.islice(itertools.cycle(heads), sum(each is not None for each in free)))
    follow(model, ("h2o", None, {}), "full", heads, cached_heads, new=4)


def test_bytes_are_freed_and_are_the_planned_ones():
    model = kvtool.attach(peaky_model("llama", num_hidden_layers=3))
    plan = planned(model, policy="h2o")
    cache = kvtool.build_cache(model, "h2o", plan=plan)
    prefill(model, cache, random_ids(LENGTH), new_tokens=4)
    for token in (5, 6, 7, 8):
        decode_step(model, cache, torch.tensor([token]))
    slots = sum(sum(own) for own in HEADS) + 3 * 2  # one more for the token that is decoded
    assert cache.report().allocated_bytes == slots * 2 * 16 * 4
    assert counts_of(cache) == HEADS


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("policy", "mode"),
    [("h2o+caote", "block:16"), ("snapkv(window=3,kernel=3)", "full"), ("h2o+int8", "full")],
)
def test_a_padded_entry_is_the_entry_alone(policy, mode):
    model = kvtool.attach(peaky_model("llama", head_dim=32))
    plan = planned(model, [[11, 29], [33, 7]])
    ids, mask, rows = batch()
    both = kvtool.build_cache(model, policy, plan=plan, prefill=mode)
    logits = prefill(model, both, ids, mask)
    alone = [kvtool.build_cache(model, policy, plan=plan, prefill=mode) for _ in rows]
    single = [prefill(model, cache, row) for cache, row in zip(alone, rows, strict=True)]
    for token in (None, 5, 6, 7):
        if token is not None:
            logits = decode_step(model, both, torch.tensor([token] * len(rows)))
            single = [decode_step(model, cache, torch.tensor([token])) for cache in alone]
        for i, cache in enumerate(alone):
            same_row(both, cache, i)
            torch.testing.assert_close(logits[i], single[i][0], atol=1e-4, rtol=1e-4)
    assert len(LENGTHS) == len(rows)
    assert counts_of(both, 0) != counts_of(both, 2)


def test_a_share_is_scaled_to_each_prompt_head_by_head():
    model = kvtool.attach(peaky_model("llama"))
    plan = planned(model, [[10, 30], [24, 16]], tokens=None, ratio="20%", context=100)
    plan["layers"]["min_tokens"] = 4
    for n, counts in (
        (100, [[10, 30], [24, 16]]),
        (50, [[5, 15], [12, 8]]),
        (30, [[4, 8], [7, 5]]),
    ):
        cache = kvtool.build_cache(model, "tova", plan=plan)
        prefill(model, cache, random_ids(n))
        assert counts_of(cache) == counts  # of 30 the first head would have 3


def test_later_turns_saved_files_and_reordered_entries(tmp_path):
    model = kvtool.attach(peaky_model("llama"))
    plan = planned(model, [[11, 29], [33, 7]])
    cache = kvtool.build_cache(model, "h2o", plan=plan)
    prefill(model, cache, random_ids(61, batch=2))
    cache.reorder_cache(torch.tensor([1, 1]))
    path = tmp_path / "a.kv.safetensors"
    kvtool.save_cache(cache, path)
    loaded = kvtool.load_cache(path, model)
    assert str(loaded.policy) == "h2o"
    for turn, length in enumerate((30, 1, 9)):
        ids = random_ids(length, seed=turn, batch=2)
        torch.testing.assert_close(prefill(model, loaded, ids), prefill(model, cache, ids))
        for each in (cache, loaded):
            assert counts_of(each, 1) == [[11, 29], [33, 7]]
    logits = [decode_step(model, each, torch.tensor([3, 4])) for each in (cache, loaded)]
    torch.testing.assert_close(*logits)


@pytest.mark.few(9)
@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("adakv(window=4)", "splits its budget over the KV heads by itself"),
        ("kvzip", "splits its budget over the KV heads by itself"),
        ("quest", "reads as many tokens in every KV head"),
        ("d2o", "`d2o-merge` cannot follow heads of unequal counts while they decode"),
        ("rkv", "keeps the newest queries of a whole layer"),
        ("sirllm", "keeps the same in all of them"),
        ("pyramidinfer", "by a schedule of its own"),
        ("snapkv(window=4)+chunk", "keeps the same tokens in all KV heads of a layer"),
    ],
)
def test_policies_of_equal_heads_refuse_it_in_one_line(policy, told):
    model = kvtool.attach(peaky_model("llama", num_hidden_layers=3))
    with pytest.raises(UsageError) as error:
        kvtool.build_cache(model, policy, plan=planned(model))
    assert told in error.value.report()
    assert f"policy `{kvtool.parse_policy(policy)}`" in error.value.report()
    assert error.value.hint == "--allocator optimal plans layers alone"


def test_a_policy_that_keeps_everything_has_no_use_for_it():
    model = kvtool.attach(peaky_model("llama", num_hidden_layers=3))
    cache = kvtool.build_cache(model, "full", plan=planned(model))
    prefill(model, cache, random_ids(LENGTH))
    assert counts_of(cache) == [[LENGTH] * 2] * 3


def test_layers_that_read_the_keys_of_others_refuse_it():
    model = kvtool.attach(family_model("gemma3n"))
    free = kvtool.plan(model.config, tokens=20, context=LENGTH).layers.fractions
    heads = [[11, 29]] * sum(share is not None for share in free)
    with pytest.raises(kvtool.KvtoolError, match="different counts in the heads of a layer"):
        kvtool.build_cache(model, "h2o", plan=planned(model, heads))


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("heads", "told"),
    [
        (
            [[11, 28], [20, 20], [33, 7]],
            r"39 tokens in 2 KV heads do not agree with `layers.tokens.0`",
        ),
        ([[11, 29], None, [33, 7]], r"`layers.heads.1`: a layer of kind `full_attention` needs"),
        ([[], [20, 20], [33, 7]], r"layers.heads.0: list should have at least 1"),
        ([[0, 40], [20, 20], [33, 7]], r"layers.heads.0.0: must be above 0"),
        ([[11, 29], [20, 20]], r"`layers.heads` has 2 entries, but the model 3 layers"),
        ([[11, 29], [20, 20], [36, 4]], r"a KV head has 4 tokens, below `layers.min_tokens` 7"),
        ([[11, 29], [20, 20], [20] * 4], r"`layers.heads.2` has 4 KV heads, and the model 2"),
    ],
)
def test_heads_that_contradict_their_layers_are_refused(heads, told):
    model = kvtool.attach(peaky_model("llama", num_hidden_layers=3))
    plan = planned(model)
    plan["layers"]["heads"] = heads
    with pytest.raises(UsageError, match=told):
        kvtool.build_cache(model, "h2o", plan=plan)


def test_a_head_below_what_its_policy_always_keeps_is_refused():
    model = kvtool.attach(peaky_model("llama", num_hidden_layers=3))
    cache = kvtool.build_cache(model, "streaming(sinks=8)", plan=planned(model))
    with pytest.raises(UsageError, match=r"budget 7 is not above sinks 8"):
        prefill(model, cache, random_ids(LENGTH))
