"""Taking tokens back: `crop`, assisted generation; and pickling."""

import copy
import io
import pickle

import pytest
import torch
from transformers import DynamicCache

import kvtool
from tests.models_for_tests import family_model, peaky_model, random_ids
from tests.tiers import first

SETTINGS = {"max_new_tokens": 12, "do_sample": False}


def repeating(seed=1):
    """A text in which prompt lookup finds something."""
    return torch.cat([random_ids(12, seed=seed)] * 3, 1)


@torch.no_grad()
@pytest.mark.parametrize("family", first(3, ["llama", "falcon", "deepseek_v3", "llama4"]))
def test_a_cropped_cache_goes_on_as_transformers_own(family):
    found = []
    for ours in (False, True):
        model = peaky_model("llama") if family == "llama" else family_model(family)
        cache = kvtool.build_cache(model, "full") if ours else DynamicCache(config=model.config)
        model(random_ids(12), past_key_values=cache)
        cache.crop(0)
        model(random_ids(5, seed=2), past_key_values=cache)
        cache.crop(-7)
        logits = [model(random_ids(1, seed=3), past_key_values=cache).logits]
        cache.crop(-1)
        logits.append(model(random_ids(4, seed=4), past_key_values=cache).logits)
        found.append(torch.cat(logits, 1))
        assert cache.get_seq_length() == 14
    assert torch.allclose(*found, atol=2e-5)
    assert torch.equal(
        cache.input_ids, torch.cat([random_ids(12)[:, :10], random_ids(4, seed=4)], 1)
    )
    assert cache.tokens_seen() == [14]
    assert cache.kept_positions(0)[0, 0].tolist() == list(range(14))


@torch.no_grad()
@pytest.mark.parametrize("policy", ["full", "full+int8"])
def test_a_cropped_cache_is_the_one_before(policy):
    """Padded entries and codes as well, and inside a rollback, whose keys stay what they are."""
    model = kvtool.attach(peaky_model("llama", head_dim=32))
    ids, mask = random_ids(20, batch=2), torch.ones(2, 20, dtype=torch.long)
    mask[1, :6] = 0
    cache, never = kvtool.build_cache(model, policy), kvtool.build_cache(model, policy)
    for each in (cache, never):
        model(ids, attention_mask=mask, past_key_values=each)
    more, step = random_ids(3, seed=2, batch=2), random_ids(1, seed=5, batch=2)
    ends = torch.ones(2, 3, dtype=torch.long)
    ends[0, 0] = 0
    model(more, attention_mask=torch.cat([mask, ends], 1), past_key_values=cache)
    assert cache.tokens_seen() == [22, 17]
    cache.crop(-3)
    assert cache.tokens_seen() == [20, 14]
    with cache.rollback():
        model(step, past_key_values=cache)
        cache.crop(-5)
        model(more.flip(0), past_key_values=cache)
    assert cache.report().kv_bytes == never.report().kv_bytes
    assert torch.equal(
        model(step, past_key_values=cache).logits, model(step, past_key_values=never).logits
    )


def test_a_number_that_is_positive_is_what_stays():
    model = peaky_model("llama")
    cache = kvtool.build_cache(model, "full")
    model(random_ids(12), past_key_values=cache)
    cache.crop(20)
    assert cache.get_seq_length() == 12
    cache.crop(5)
    assert cache.get_seq_length() == 5
    cache.crop(-9)
    assert cache.get_seq_length() == 0
    assert torch.equal(
        model(random_ids(6), past_key_values=cache).logits,
        model(random_ids(6), past_key_values=kvtool.build_cache(model, "full")).logits,
    )


@pytest.mark.parametrize(
    ("policy", "family", "why"),
    [
        ("h2o", "llama", "what was evicted is gone"),
        ("quest", "llama", "`quest` has tables of what it read"),
        ("full", "gemma2", "its sliding windows have let tokens go"),
        ("full", "falcon_h1", "its recurrence does not go back"),
        ("full", "qwen3_next", "its recurrent layers do not go back"),
    ],
)
def test_what_cannot_be_cropped_says_why_and_stays_whole(policy, family, why):
    model = peaky_model("llama") if family == "llama" else family_model(family)
    cache = kvtool.build_cache(model, policy, None if policy == "full" else 16)
    model(random_ids(40), past_key_values=cache)
    with pytest.raises(kvtool.KvtoolError, match=why):
        cache.crop(-3)
    model(random_ids(3), past_key_values=cache)
    assert cache.get_seq_length() == 43


@pytest.mark.parametrize(("way", "inside"), [("lookup", True), ("assistant", False)])
def test_assisted_generation_gives_what_transformers_gives(way, inside):
    ids, forwards = repeating(), []
    plain = peaky_model("llama")
    settings = dict(SETTINGS)
    if way == "lookup":
        settings["prompt_lookup_num_tokens"] = 4
    else:
        settings["assistant_model"] = peaky_model("llama")  # which guesses right
        settings["assistant_model"].model.layers[1].self_attn.o_proj.weight.data.mul_(0.9)
    stock = DynamicCache(config=plain.config)
    expected = plain.generate(ids, past_key_values=stock, **settings)
    assert torch.equal(expected, plain.generate(ids, **SETTINGS))
    model = peaky_model("llama")
    model.register_forward_hook(lambda *_: forwards.append(1))
    if inside:
        with kvtool.compressed(model, "full"):
            out = model.generate(ids, return_dict_in_generate=True, **settings)
        cache, out = out.past_key_values, out.sequences
    else:
        cache = kvtool.build_cache(model, "full")
        out = model.generate(ids, past_key_values=cache, **settings)
    assert torch.equal(out, expected)
    assert cache.policy.name == "full"
    assert cache.get_seq_length() == stock.get_seq_length()
    assert torch.equal(cache.input_ids, out)
    if way == "assistant":
        assert len(forwards) < 12
    with torch.no_grad():
        after = model(out[:, -1:], past_key_values=cache).logits
        right = plain(out[:, -1:], past_key_values=stock).logits
    assert torch.allclose(after, right, atol=2e-5)


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("h2o", "evicted for them is gone"),
        ("quest", "the tables of `quest` do not go back"),
        ("full+int8", "reads tokens that come together otherwise"),
    ],
)
def test_assisted_generation_is_refused_before_it_begins(policy, why):
    model = peaky_model("llama", head_dim=32)
    cache = kvtool.build_cache(model, policy, None if "full" in policy else 16)
    with pytest.raises(kvtool.UsageError, match=why):
        model.generate(repeating(), past_key_values=cache, prompt_lookup_num_tokens=3, **SETTINGS)
    assert cache.get_seq_length() == 0


def test_a_cache_is_not_pickled_but_copied():
    model = peaky_model("llama")
    cache = kvtool.build_cache(model, "h2o", 12)
    model(random_ids(20), past_key_values=cache)
    for write in (
        pickle.dumps,
        lambda each: torch.save(each, io.BytesIO()),
        lambda each: pickle.dumps([each]),
    ):
        with pytest.raises(kvtool.KvtoolError, match=r"kvtool.save_cache\(cache, path\)"):
            write(cache)
    twin, token = copy.deepcopy(cache), random_ids(1, seed=2)
    shallow = copy.copy(cache)
    assert shallow.layers is cache.layers
    with torch.no_grad():
        for _ in range(2):
            ours, theirs = (model(token, past_key_values=each).logits for each in (cache, twin))
            assert torch.equal(ours, theirs)
