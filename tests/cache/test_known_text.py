"""What a cache knows of the text that plain forwards have fed to it."""

import copy
import gc

import pytest
import torch
from transformers import DynamicCache

import kvtool
from kvtool.generation import compress, decode_step
from tests.models_for_tests import peaky_model, random_ids

SETTINGS = {"max_new_tokens": 4, "do_sample": False}
ANOTHER = "read another text: its token"
BEGUN = random_ids(20, seed=1)
LONGER = torch.cat([BEGUN, random_ids(9, seed=2)], 1)
OTHER = torch.cat([BEGUN[:, :15], random_ids(14, seed=3)], 1)  # from token 16 on


@pytest.fixture
def model():
    return kvtool.attach(peaky_model("llama"))


def refuses(model, cache, ids, told=ANOTHER):
    with pytest.raises(kvtool.UsageError, match=told):
        model.generate(ids, past_key_values=cache, **SETTINGS)


@pytest.mark.parametrize("policy", ["full", "sirllm", "snapkv(window=4)"])
def test_the_idiom_of_a_prompt_cache(model, policy):
    """Read once, then copied for every text that begins with it."""
    cache = kvtool.build_cache(model, policy, None if policy == "full" else 16)
    cache = model(BEGUN, past_key_values=cache).past_key_values
    assert torch.equal(cache.input_ids, BEGUN)
    refuses(model, copy.deepcopy(cache), OTHER, "token 1[56] differs")
    refuses(model, cache.copy(), BEGUN, "has read 20 tokens, and the text has 20")
    out = model.generate(LONGER, past_key_values=copy.deepcopy(cache), **SETTINGS)
    assert out.shape[1] == 33
    if policy == "full":
        plain = peaky_model("llama")
        stock = DynamicCache(config=plain.config)
        plain(BEGUN, past_key_values=stock)
        assert torch.equal(out, plain.generate(LONGER, past_key_values=stock, **SETTINGS))


@torch.no_grad()
def test_forwards_of_any_size_and_in_place_changes_of_what_was_fed(model):
    cache, buffer = kvtool.build_cache(model, "h2o", 12), torch.zeros(1, 1, dtype=torch.long)
    model(BEGUN[:, :7], past_key_values=cache)
    model.model(input_ids=BEGUN[:, 7:9], past_key_values=cache)  # the decoder alone
    for token in BEGUN[0, 9:]:
        buffer.fill_(int(token))
        model(buffer, past_key_values=cache)
    buffer.fill_(0)
    assert torch.equal(cache.input_ids, BEGUN)
    refuses(model, cache, OTHER)
    model.generate(LONGER, past_key_values=cache, **SETTINGS)


@torch.no_grad()
def test_many_tokens_are_held_together(model, monkeypatch):
    monkeypatch.setattr("kvtool.cache.whole.cache._PARTS", 16)
    cache, ids = kvtool.build_cache(model, "recency", 8), random_ids(40, seed=4)
    for token in ids.unbind(1):
        model(token[:, None], past_key_values=cache)
    gc.collect()
    assert len(cache.running.fed.parts) <= 16
    assert torch.equal(cache.input_ids, ids)


def test_a_text_goes_on_behind_generate_and_compress(model):
    cache = kvtool.build_cache(model, "full")
    out = model.generate(BEGUN, past_key_values=cache, **SETTINGS)
    with torch.no_grad():
        model(torch.cat([out[:, -1:], random_ids(3, seed=5)], 1), past_key_values=cache)
    known = torch.cat([out, random_ids(3, seed=5)], 1)
    assert torch.equal(cache.input_ids, known)
    refuses(model, cache, torch.cat([out, random_ids(9, seed=6)], 1))
    cache = kvtool.build_cache(model, "h2o", 12)
    compress(model, cache, BEGUN)
    assert cache.next_logits is not None
    decode_step(model, cache, torch.tensor([9]))
    assert cache.next_logits is None, "they are those before the token that was fed since"
    assert torch.equal(cache.input_ids, torch.cat([BEGUN, torch.tensor([[9]])], 1))


def test_a_call_that_broke_off_leaves_its_prompt_known(model):
    cache = kvtool.build_cache(model, "h2o", 12)

    def stop(_, scores):
        if cache.get_seq_length() > 22:
            raise ZeroDivisionError
        return scores

    with pytest.raises(ZeroDivisionError):
        model.generate(BEGUN, past_key_values=cache, max_new_tokens=9, logits_processor=[stop])
    refuses(model, cache, OTHER)
    model.generate(LONGER, past_key_values=cache, **SETTINGS)  # what came behind is not known


def test_embeddings_are_not_known(model):
    cache = kvtool.build_cache(model, "h2o", 12)
    model(inputs_embeds=model.get_input_embeddings()(BEGUN), past_key_values=cache)
    model(random_ids(3), past_key_values=cache)
    assert cache.input_ids is None
    model.generate(LONGER, past_key_values=cache, **SETTINGS)
    cache = kvtool.build_cache(model, "h2o", 12)
    model(BEGUN[:, :15], past_key_values=cache)
    model(inputs_embeds=model.get_input_embeddings()(BEGUN[:, 15:]), past_key_values=cache)
    assert torch.equal(cache.input_ids, BEGUN[:, :15])
    refuses(model, cache, torch.cat([random_ids(2, seed=8), LONGER], 1))


def test_batch_entries_take_their_text_along(model):
    ids = torch.cat([BEGUN, OTHER[:, :20], random_ids(20, seed=7)])
    cache = kvtool.build_cache(model, "full")
    model(ids, past_key_values=cache)
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert torch.equal(cache.input_ids, ids[[2, 0]])
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.input_ids, ids[[2, 2, 0, 0]])
    cache.reorder_cache(torch.tensor([3, 2, 1, 0]))
    assert torch.equal(cache.input_ids, ids[[0, 0, 2, 2]])
    more = random_ids(2, seed=9, batch=4)
    model(more, past_key_values=cache)
    known = torch.cat([ids[[0, 0, 2, 2]], more], 1)
    assert torch.equal(cache.input_ids, known)
    refuses(model, cache, torch.cat([known.flip(0), more], 1))
    model.generate(torch.cat([known, more], 1), past_key_values=cache, **SETTINGS)


def test_reset_and_rollback(model):
    cache = kvtool.build_cache(model, "h2o", 12)
    model(BEGUN, past_key_values=cache)
    with cache.rollback():
        model(random_ids(4), past_key_values=cache)
        assert cache.input_ids.shape == (1, 24)
    assert torch.equal(cache.input_ids, BEGUN)
    refuses(model, cache, OTHER)
    cache.reset()
    assert cache.input_ids is None
    model(OTHER, past_key_values=cache)
    assert torch.equal(cache.input_ids, OTHER)


def test_a_file_holds_the_text_of_plain_forwards(model, tmp_path):
    cache = kvtool.build_cache(model, "h2o", 12)
    model(BEGUN, past_key_values=cache)
    kvtool.save_cache(cache, tmp_path / "a.safetensors", model=model)
    loaded = kvtool.load_cache(tmp_path / "a.safetensors", model)
    assert torch.equal(loaded.input_ids, BEGUN)
    refuses(model, loaded, OTHER)
    model(LONGER[:, 20:], past_key_values=loaded)
    assert torch.equal(loaded.input_ids, LONGER)


def test_padding_is_part_of_the_text(model):
    ids, mask = torch.cat([BEGUN, BEGUN]), torch.ones(2, 29, dtype=torch.long)
    ids[1, :6], mask[1, :6] = 0, 0
    cache = kvtool.build_cache(model, "h2o", 12)
    model(ids, attention_mask=mask[:, :20], past_key_values=cache)
    more = torch.cat([ids, random_ids(9, seed=2, batch=2)], 1)
    other = more.clone()
    other[1, 10] += 1
    with pytest.raises(kvtool.UsageError, match="its token 10 differs"):
        model.generate(other, attention_mask=mask, past_key_values=cache, **SETTINGS)
    model.generate(more, attention_mask=mask, past_key_values=cache, **SETTINGS)


def test_only_the_caller_of_plain_forwards_knows_how_they_were_padded(model):
    """So `show` asks for the text, before and after the cache was asked for it."""
    cache = kvtool.build_cache(model, "full")
    model(BEGUN, past_key_values=cache)
    for _ in range(2):
        with pytest.raises(kvtool.UsageError, match="does not know its text"):
            cache.show(object())
        assert torch.equal(cache.input_ids, BEGUN)
    cache.crop(12)
    assert cache.text.plain
    model.generate(LONGER, past_key_values=cache, **SETTINGS)
    assert not cache.text.plain
