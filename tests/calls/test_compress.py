"""A prompt compressed from Python in one call, and questions asked of its cache."""

import pytest
import torch
from safetensors.torch import load_file

import kvtool
from kvtool.models.load import load
from tests.calls.conftest import timeless

TEXT = "The old lamp was near the school. The quiet falcon was behind the tower. " * 4
QUESTIONS = ["Where was the falcon? It was", "Where was the lamp? It was"]
SHORT = {"max_new_tokens": 6}


def test_a_call_is_the_command_with_the_same_settings(command):
    settings = ["--prompt", TEXT, "-p", "snapkv", "-b", "48", "--save", "command.safetensors"]
    told = command("compress", *settings)
    cache = kvtool.compress(None, TEXT, "snapkv", 48, save="call.safetensors")
    assert cache.report().kv_bytes == told["cache"]["kv_bytes"]
    assert cache.input_ids.shape[1] == told["prompt_tokens"]
    call, command_ = load_file("call.safetensors"), load_file("command.safetensors")
    assert call.keys() == command_.keys() != set()
    assert all(torch.equal(call[name], command_[name]) for name in call)


def test_many_questions_are_asked_of_one_context(command, loaded):
    cache = kvtool.compress(loaded, TEXT, "h2o+caote", 48, save="book.safetensors")
    seen = cache.get_seq_length()
    for question in [*QUESTIONS, QUESTIONS[0]]:
        with cache.rollback():
            answer = kvtool.generate(loaded, question, cache=cache, **SHORT)
        assert cache.get_seq_length() == seen
        flags = ["--cache", "book.safetensors", "--prompt", question, "-n", "6"]
        assert timeless(answer) == timeless(command("generate", *flags))
        by_file = kvtool.generate(loaded, question, cache="book.safetensors", **SHORT)
        assert timeless(by_file) == timeless(answer)


def test_a_cache_goes_on_from_question_to_question(loaded):
    cache = kvtool.compress(loaded, TEXT, "h2o", 48)
    first = kvtool.generate(loaded, QUESTIONS[0], cache=cache, **SHORT)
    second = kvtool.generate(loaded, QUESTIONS[1], cache=cache, **SHORT)
    assert second.cache.tokens_seen == first.cache.tokens_seen + second.prompt_tokens + 6
    goes_on = kvtool.generate(loaded, cache=cache, max_new_tokens=2)
    assert (goes_on.prompt_tokens, goes_on.new_tokens) == (0, 2)


def test_its_answers_are_those_of_transformers_to_the_whole_history(loaded):
    cache = kvtool.compress(loaded, TEXT, "full")
    history = loaded.tokenizer(TEXT, return_tensors="pt").input_ids
    asked = [(QUESTIONS[0], 6), (QUESTIONS[1], 6), (None, 2)]
    ours = [kvtool.generate(loaded, q, cache=cache, max_new_tokens=n).token_ids for q, n in asked]
    kvtool.detach(loaded.model)
    for (question, new), answer in zip(asked, ours, strict=True):
        if question is not None:
            turn = loaded.tokenizer(question, add_special_tokens=False, return_tensors="pt")
            history = torch.cat([history, turn.input_ids], 1)
        before = history.shape[1]
        history = loaded.model.generate(
            history, attention_mask=torch.ones_like(history), max_new_tokens=new, do_sample=False
        )
        assert answer == history[0, before:].tolist()


def test_the_model_stays_attached_for_its_cache(loaded):
    model, tokenizer = loaded.model, loaded.tokenizer
    before = model.config._attn_implementation
    with pytest.raises(kvtool.UsageError, match="not above"):
        kvtool.compress(model, "The lamp", "snapkv", 0.5, tokenizer=tokenizer)
    assert model.config._attn_implementation == before
    cache = kvtool.compress(model, TEXT, "h2o", 48, tokenizer=tokenizer)
    assert model.config._attn_implementation != before
    ids = torch.cat([cache.input_ids, torch.tensor([[5, 6]])], 1)
    model.generate(ids, past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert cache.get_seq_length() == ids.shape[1] + 1
    kvtool.detach(model)
    assert model.config._attn_implementation == before


def test_a_cache_serves_what_it_was_made_for(loaded):
    from tests.models_for_tests import family_model

    cache = kvtool.compress(loaded, TEXT, "h2o", 48)
    other = family_model("llama")
    for settings, told in (
        ({"policy": "tova"}, "the cache was made with policy `h2o`, not `tova`"),
        ({"budget": 32}, "the cache was made with budget 48, not 32"),
        ({"plan": kvtool.plan(None, tokens=48), "policy": "h2o"}, "exclude each other"),
    ):
        with pytest.raises(kvtool.UsageError, match=told):
            kvtool.generate(loaded, QUESTIONS[0], cache=cache, **settings)
    with pytest.raises(kvtool.UsageError, match="is that of another model"):
        kvtool.generate(other, "The lamp", cache=cache, tokenizer=loaded.tokenizer)
    same = kvtool.generate(loaded, QUESTIONS[0], "h2o", 48, cache=cache, **SHORT)
    assert same.policy == "h2o"
    two = kvtool.build_cache(loaded.model, "h2o", 48)
    loaded.model.generate(torch.ones(2, 5).long(), past_key_values=two, max_new_tokens=2)
    with pytest.raises(kvtool.UsageError, match="holds 2 texts"):
        kvtool.generate(loaded, "The lamp", cache=two)


def test_weights_that_differ_are_another_model(loaded):
    cache = kvtool.compress(loaded, TEXT, "h2o", 48)
    tuned = load()
    next(tuned.model.parameters()).mul_(2)
    with pytest.raises(kvtool.UsageError, match="is that of another model"):
        kvtool.generate(tuned, QUESTIONS[0], cache=cache)


def test_a_cache_says_what_it_holds(command):
    cache = kvtool.compress(None, TEXT, "h2o", 48)
    told = kvtool.generate(None, TEXT, "h2o", 48, max_new_tokens=1).cache.in_words()
    assert str(cache) == told
    assert told.startswith("kept 48 of ")
    assert repr(cache) == f"<KVCache h2o, budget 48: {told}>"
    assert told in cache._repr_html_()
    loaded = load()
    assert str(kvtool.build_cache(loaded.model, "full")).startswith("kept 0 of 0 tokens")
