"""`positions=cache`: a token is at its rank among the kept ones, in every family and batch."""

from __future__ import annotations

import pytest
import torch

import kvtool
from kvtool.cache.features.rope_shift import RopeShift
from kvtool.generation import decode_step, prefill
from kvtool.policies.numbers import SHIFT
from tests import models_for_tests
from tests.cache.test_oracle import BUDGET, follow, spell
from tests.contract.cases import Case
from tests.contract.checks import every_tensor_of_a_cache_is_in_its_report
from tests.models_for_tests import (
    FAMILIES,
    HYBRID,
    anchored_model,
    family_model,
    peaky_model,
    prompt,
    random_ids,
)
from tests.reference.policies import build
from tests.reference.ranks import AlternatelyStill, Interleaved, LastStill, Ranked
from tests.tiers import first, first_rows

CASES = [  # both families, prompts whole and in blocks, each modifier
    ("llama", "block:20", "h2o", "caote", {}),
    ("qwen3", "full", "streaming", None, {"sinks": 2}),
    ("qwen3", "block:20", "roco", "fastcaote", {}),
    ("llama", "full", "tova", None, {}),
]
KINDS = {
    "gemma2": Ranked,  # soft-capped logits, every other layer slides over 24 tokens
    "gemma3": Ranked,  # two frequencies, by kind of layer
    "gpt_oss": Ranked,  # a sink logit per head
    "gpt_neox": Ranked,  # a quarter of each head turns
    "glm4": Interleaved,  # half of each head turns
    "cohere2": AlternatelyStill,
    "smollm3": LastStill,
}
MORE = {
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "cohere": ("cohere", {}),
    "glm4": ("glm4", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "cohere2": ("cohere2", {"sliding_window": 24, "layer_types": HYBRID}),
    "smollm3": ("smollm3", {}),
}


def placed(base, modifier=None, options=None):
    return spell(base, modifier, (options or {}) | {"positions": "cache"})


def feed(model, cache, tokens):
    return torch.cat([decode_step(model, cache, token[None]) for token in tokens])


def run(model, policy, budget, mode="full", length=60, new=10):
    cache = kvtool.build_cache(model, policy, budget, prefill=mode)
    first = prefill(model, cache, random_ids(length))
    return cache, torch.cat([first, feed(model, cache, random_ids(new, seed=3)[0])])


@pytest.fixture
def model(family):
    yield kvtool.detach(anchored_model(family))
    kvtool.detach(anchored_model(family))


@pytest.mark.parametrize(("family", "mode", "base", "modifier", "options"), first_rows(1, CASES))
def test_logits_equal_the_oracle_that_turns_keys_anew(model, mode, base, modifier, options):
    follow(
        model,
        lambda: build(base, BUDGET, modifier, **options),
        placed(base, modifier, options),
        BUDGET,
        mode,
        prompt(41),
        new=12,
        kind=Ranked,
    )


@pytest.mark.parametrize("family", first(1, ["glm4", *(name for name in KINDS if name != "glm4")]))
def test_families_turn_their_keys_in_ways_of_their_own(family, monkeypatch):
    monkeypatch.setattr(models_for_tests, "FAMILIES", FAMILIES | MORE)
    follow(
        kvtool.detach(family_model(family)),
        lambda: build("h2o", BUDGET),
        placed("h2o"),
        BUDGET,
        "block:16",
        prompt(33),
        new=4,
        kind=KINDS[family],
    )


@pytest.mark.parametrize("family", first(1, ["lfm2", "qwen3_next"]))
def test_attention_layers_beside_recurrent_ones(family):
    model = kvtool.attach(family_model(family))
    _, text = run(model, "h2o", 512)
    _, ours = run(model, placed("h2o"), 512)
    torch.testing.assert_close(ours, text, atol=1e-4, rtol=1e-4)
    cache, ours = run(model, placed("h2o"), 20)
    assert ours.isfinite().all()
    assert cache.first_layer.slots.kept == 20


@pytest.mark.parametrize(
    ("base", "mode", "dtype"),
    [("h2o", "full", torch.bfloat16), ("streaming", "block:16", torch.float32)],
)
def test_nothing_differs_from_text_positions_while_nothing_is_evicted(base, mode, dtype):
    model = kvtool.attach(peaky_model("llama").to(dtype))
    _, text = run(model, base, 80, mode)
    _, ours = run(model, placed(base), 80, mode)
    assert torch.equal(ours, text)


def test_a_window_without_sinks_looks_the_same_from_everywhere():
    """Only distances count, and in the newest tokens they are those of the text."""
    model = kvtool.attach(peaky_model("llama"))
    _, text = run(model, "recency", 20, "block:16")
    _, ours = run(model, placed("recency"), 20, "block:16")
    torch.testing.assert_close(ours, text, atol=1e-4, rtol=1e-4)
    _, text = run(model, "streaming", 20, "block:16")
    _, ours = run(model, placed("streaming"), 20, "block:16")
    assert (ours - text).abs().max() > 0.1  # the sinks are elsewhere


def test_what_a_cache_says_depends_on_what_it_holds_and_not_on_where_the_text_is():
    """One layer, whose keys and values are the tokens': same sinks and window, same logits."""
    model = kvtool.attach(peaky_model("llama", num_hidden_layers=1))
    ids = random_ids(212)  # its last block is as long as that of 100 tokens
    short = torch.cat([ids[:, :4], ids[:, -96:]], 1)
    logits = []
    for text in (ids, short):
        cache = kvtool.build_cache(model, placed("streaming"), 64, prefill="block:16")
        logits.append(prefill(model, cache, text))
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)


def test_stored_keys_are_never_changed_and_ids_stay_small():
    model = kvtool.attach(peaky_model("llama").to(torch.bfloat16))
    fed = []
    model.model.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["position_ids"].clone()), with_kwargs=True
    )
    cache, _ = run(model, placed("streaming"), 20, "block:16", new=2)
    fed.clear()

    def sinks():
        slots = cache.first_layer.sorted_slots()
        assert slots.positions[0, :, :4].tolist() == [[0, 1, 2, 3]] * 2
        return slots.stored["keys"][:, :, :4]

    before = sinks()
    for seed in range(2):
        feed(model, cache, random_ids(25, seed=seed)[0])
        prefill(model, cache, random_ids(40, seed=seed))
    assert torch.equal(sinks(), before)
    assert max(ids.max() for ids in fed) == 20 + 16 - 1  # a block behind a full cache
    assert cache.kept_positions(0).max() == cache.tokens_seen()[0] - 1  # true positions


def test_a_plain_generate_and_a_prompt_in_one_forward_give_the_same():
    model = kvtool.attach(peaky_model("llama"))
    ids, settings = random_ids(60), {"max_new_tokens": 9, "do_sample": False}
    for policy, mode in ((placed("h2o"), "block:16"), (placed("streaming") + "+cam", "full")):
        cache = kvtool.build_cache(model, policy, 20, prefill=mode)
        plain = model.generate(ids, past_key_values=cache, **settings)
        driven = kvtool.build_cache(model, policy, 20, prefill=mode)
        token, tokens = prefill(model, driven, ids).argmax(-1), []
        for _ in range(9):
            tokens.append(token.item())
            token = decode_step(model, driven, token).argmax(-1)
        assert plain[0, 60:].tolist() == tokens
        cache.reset()
        again = model.generate(ids, past_key_values=cache, **settings)
        assert torch.equal(again, plain)


def test_the_kernel_and_the_layers_budgets_make_no_difference_to_places():
    """Layers of unequal budgets are fed the same ids, and place the tokens by their own ranks."""
    ids = random_ids(60)
    rows = []
    for kernel in ("sdpa", "eager"):
        model = kvtool.attach(peaky_model("llama", kernel))
        cache = kvtool.build_cache(model, placed("recency") + "+pyramid(window=4,beta=4)", 20)
        steps = torch.cat([prefill(model, cache, ids), feed(model, cache, ids[0, :12])])
        assert cache.report().kept_per_layer[0] > cache.report().kept_per_layer[1]
        rows.append(steps)
    torch.testing.assert_close(rows[0], rows[1], atol=1e-4, rtol=1e-4)
    model = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(model, "recency+pyramid(window=4,beta=4)", 20)
    text = torch.cat([prefill(model, cache, ids), feed(model, cache, ids[0, :12])])
    torch.testing.assert_close(rows[0], text, atol=1e-4, rtol=1e-4)  # windows look alike anywhere


@pytest.mark.parametrize("policy", ["recency", "h2o"])
def test_a_padded_entry_that_still_fits_stands_where_it_does_alone(policy):
    """While its neighbour evicts at every step, the slot that it would reuse is empty."""
    model = kvtool.attach(peaky_model("llama"))
    long, short, new = random_ids(40), random_ids(6, seed=2), random_ids(12, seed=3, batch=2)
    ids = torch.cat([long, torch.cat([torch.zeros(1, 34, dtype=torch.long), short], 1)])
    both = kvtool.build_cache(model, placed(policy), 20)
    found = [prefill(model, both, ids, (ids > 0).long())]
    found += [decode_step(model, both, token) for token in new.T]
    for row, text in enumerate((long, short)):
        alone = kvtool.build_cache(model, placed(policy), 20)
        expected = [prefill(model, alone, text)]
        expected += [decode_step(model, alone, token) for token in new[row : row + 1].T]
        ours = torch.stack(found)[:, row : row + 1]
        torch.testing.assert_close(ours, torch.stack(expected), atol=3e-4, rtol=3e-4)


def test_only_tokens_behind_one_that_leaves_move_up():
    positions = torch.tensor([[[5, 0, 3, -1], [2, 7, -1, -1]], [[4, 1, -1, -1], [-1, 0, 6, 2]]])
    state = {SHIFT: torch.arange(16.0).view(2, 2, 4)}
    before = state[SHIFT].clone()
    evicted = torch.tensor([[2, 2], [1, 1]])  # positions 3, none, 1 and 0
    RopeShift(None).slot_left(state, positions, evicted)
    moved = [[[1, 0, 0, 0], [0, 0, 0, 0]], [[1, 0, 0, 0], [0, 0, 1, 1]]]
    assert torch.equal(before - state[SHIFT], torch.tensor(moved).float())


def test_the_turns_are_counted_beside_the_slots():
    model = kvtool.attach(peaky_model("llama"))
    text, _ = run(model, "streaming", 20)
    ours, _ = run(model, placed("streaming"), 20)
    slots = sum(layer.slots.positions.numel() for layer in ours.slot_layers)
    assert ours.report().state_bytes == text.report().state_bytes + 4 * slots
    assert ours.report().kv_bytes == text.report().kv_bytes


def test_only_the_whole_model_can_number_its_tokens():
    model = peaky_model("llama")
    cache = kvtool.build_cache(model, placed("h2o"), 20)
    kvtool.detach(model)
    with pytest.raises(kvtool.KvtoolError, match="numbers tokens by their place in the cache"):
        model(random_ids(30), past_key_values=cache)
    model = kvtool.attach(model)
    cache = kvtool.build_cache(model, placed("h2o"), 20)
    mask = torch.zeros(1, 1, 30, 30)
    with pytest.raises(kvtool.KvtoolError, match="mask of two dimensions"):
        model(random_ids(30), attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("falcon", "runs its own eager attention"),
        ("deepseek_v3", "stores latents in place of keys"),
        ("opt", "places its keys in a way that is not known here"),
        ("dynamic", "turns its keys by the length of the text"),
    ],
)
def test_what_cannot_be_turned_is_refused(family, reason, monkeypatch):
    rope = {"rope_type": family, "rope_theta": 10000.0, "factor": 2.0}
    more = {
        "opt": ("opt", {"word_embed_proj_dim": 64, "ffn_dim": 96}),
        "dynamic": ("llama", {"rope_parameters": rope}),
    }
    monkeypatch.setattr(models_for_tests, "FAMILIES", FAMILIES | more)
    model = family_model(family)
    with pytest.raises(kvtool.KvtoolError, match=reason) as caught:
        kvtool.build_cache(model, placed("h2o"), 20)
    assert "\n" not in str(caught.value)
    assert "positions=cache is not available" in str(caught.value)


def test_a_model_that_turns_otherwise_than_its_frequencies_say_is_refused():
    model = peaky_model("llama")
    model.model.rotary_emb.inv_freq.mul_(1.5)
    kvtool.build_cache(model, placed("h2o"), 20)  # the frequencies say so themselves
    kvtool.detach(model)
    model.model.rotary_emb.forward = lambda x, position_ids: (
        torch.ones(*position_ids.shape, 16),
        position_ids[..., None].expand(-1, -1, 16) * 1e-3,
    )
    with pytest.raises(kvtool.KvtoolError, match="in a way that is not known here"):
        kvtool.build_cache(model, placed("h2o"), 20)


def test_policies_for_which_it_makes_no_sense():
    for policy, reason in (
        ("snapkv(positions=cache)", "`snapkv` has no parameter `positions`"),
        ("h2o(positions=slots)", "positions must be one of text, cache, got `slots`"),
        ("h2o(positions=cache)+d2o-merge", "`d2o-merge` works on keys that stand still"),
        ("tova(positions=cache)+calidrop", "`calidrop` works on keys that stand still"),
    ):
        with pytest.raises(kvtool.UsageError, match=reason):
            kvtool.parse_policy(policy)


def test_no_tensor_is_kept_to_turn_keys_by():
    every_tensor_of_a_cache_is_in_its_report(Case(placed("h2o"), "base"))
