"""Calls of a model's `generate` that get compressed caches of their own."""

import copy
import pickle
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    GenerationConfig,
    TextIteratorStreamer,
    pipeline,
)

import kvtool
from kvtool.cache.whole.cache import KVCache
from kvtool.generation import decode_step, prefill
from kvtool.models.load import load
from tests.models_for_tests import peaky_model, random_ids

NEW = 6


@pytest.fixture
def model():
    return peaky_model("llama")


def generated(model, ids, **settings):
    return model.generate(ids, max_new_tokens=NEW, do_sample=False, **settings)


def alone(ids, policy, budget, **settings):
    """What a cache made by hand gives, on a model of its own."""
    model = peaky_model("llama")
    return generated(
        model, ids, past_key_values=kvtool.build_cache(model, policy, budget, **settings)
    )


def report_of(out):
    return out.past_key_values.report()


def test_every_call_inside_has_a_compressed_cache_of_its_own(model):
    texts = [random_ids(60, seed=seed) for seed in (1, 2, 1)]
    plain = generated(model, texts[0])
    with kvtool.compressed(model, "h2o+caote", budget=12) as same:
        assert same is model
        outs = [generated(model, ids, return_dict_in_generate=True) for ids in texts]
    caches = {id(out.past_key_values) for out in outs}
    assert len(caches) == 3
    for ids, out in zip(texts, outs, strict=True):
        assert torch.equal(out.sequences, alone(ids, "h2o+caote", 12))
        assert max(report_of(out).kept_per_layer) == 12
    assert torch.equal(generated(model, texts[0]), plain)
    assert not torch.equal(outs[0].sequences, plain), "a budget of 12 changes nothing here"


def test_nothing_is_left_on_the_model(model):
    before, implementation = set(vars(model)), model.config._attn_implementation
    with kvtool.compressed(model, "h2o", 12):
        assert set(vars(model)) - before
    assert set(vars(model)) == before
    with pytest.raises(ZeroDivisionError), kvtool.compressed(model, "h2o", 12):
        raise ZeroDivisionError
    assert set(vars(model)) == before
    assert model.config._attn_implementation == implementation
    assert not any(module._forward_pre_hooks for module in model.modules())
    kvtool.attach(model, "h2o", 12)
    with kvtool.compressed(model, "tova", 9):
        pass
    kvtool.detach(model)
    assert set(vars(model)) == before


def test_blocks_inside_blocks_restore_the_outer_one(model):
    ids = random_ids(50)

    def kept():
        out = generated(model, ids, return_dict_in_generate=True)
        held = out.past_key_values
        return max(held.report().kept_per_layer) if isinstance(held, KVCache) else None

    with kvtool.compressed(model, "h2o", 20):
        assert kept() == 20
        with kvtool.compressed(model, "tova", 10):
            assert kept() == 10
        with pytest.raises(ZeroDivisionError), kvtool.compressed(model, "tova", 10):
            raise ZeroDivisionError
        assert kept() == 20
    assert kept() is None
    kvtool.attach(model, policy="h2o", budget=15)
    assert kept() == 15
    with kvtool.compressed(model, "tova", 10):
        assert kept() == 10
    assert kept() == 15
    kvtool.attach(model, policy="h2o", budget=9)
    assert kept() == 9
    kvtool.detach(model)
    assert kept() is None


def test_a_call_that_brings_a_cache_keeps_it(model):
    own = kvtool.build_cache(model, "tova", 8)
    with kvtool.compressed(model, "h2o", 20):
        generated(model, random_ids(50), past_key_values=own)
    assert max(own.report().kept_per_layer) == 8


def test_calls_of_other_threads_are_compressed_too_and_a_late_one_ends_in_peace(model):
    ids, expected = random_ids(50), alone(random_ids(50), "h2o", 12)
    found, begun, go_on = {}, threading.Event(), threading.Event()

    def hold(_, scores):
        begun.set()
        go_on.wait(10)
        return scores

    def call(name, **settings):
        found[name] = generated(model, ids, **settings)

    with kvtool.compressed(model, "h2o", 12):
        threads = [threading.Thread(target=call, args=(i,)) for i in range(3)]
        threads.append(
            threading.Thread(target=call, args=("late",), kwargs={"logits_processor": [hold]})
        )
        for thread in threads:
            thread.start()
        assert begun.wait(10)
    assert "generate" in vars(model), "a call still runs"
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(out, expected) for out in found.values())
    assert "generate" not in vars(model)


def test_two_threads_may_not_want_different_policies(model):
    refused, done = [], []

    def other(policy, budget):
        try:
            with kvtool.compressed(model, policy, budget):
                done.append(policy)
        except kvtool.UsageError as error:
            refused.append(str(error))

    with kvtool.compressed(model, "h2o", 12):
        for asked in (("tova", 12), ("h2o", 13), ("h2o", 12)):
            thread = threading.Thread(target=other, args=asked)
            thread.start()
            thread.join()
    assert done == ["h2o"]
    assert len(refused) == 2
    assert "another thread compresses this model's calls by h2o at 12" in refused[0]
    assert "generate" not in vars(model)


def test_a_copy_answers_for_itself_and_takes_what_holds_for_good_and_no_block(model):
    with kvtool.compressed(model, "h2o", 12):
        twin = copy.deepcopy(model)
    twin.get_input_embeddings().weight.data.mul_(-1)
    assert not torch.equal(generated(twin, random_ids(50)), generated(model, random_ids(50)))
    kvtool.attach(model, "h2o", 15)
    with kvtool.compressed(model, "h2o", 9):
        twin = copy.deepcopy(model)
    out = generated(twin, random_ids(50), return_dict_in_generate=True)
    assert max(report_of(out).kept_per_layer) == 15


def test_a_model_that_is_deleted_is_gone():
    model = kvtool.attach(peaky_model("llama"), "h2o", 12)
    generated(model, random_ids(50))
    watched = weakref.ref(model)
    del model
    assert watched() is None


def test_an_attached_model_can_be_pickled():
    model = kvtool.attach(peaky_model("llama"), "h2o", 12)
    twin = pickle.loads(pickle.dumps(model))
    out = generated(twin, random_ids(50), return_dict_in_generate=True)
    assert max(report_of(out).kept_per_layer) == 12


def test_calls_that_cannot_be_compressed_are_refused(model):
    lookup, told = {"prompt_lookup_num_tokens": 3}, "assisted generation"
    for settings, reason in (
        ({"assistant_model": peaky_model("llama")}, f"{told} (assistant_model)"),
        (lookup, f"{told} (prompt_lookup_num_tokens)"),
        ({"generation_config": GenerationConfig(**lookup)}, f"{told} (prompt_lookup_num_tokens)"),
        ({"cache_implementation": "static"}, "asks for another cache"),
        ({"use_cache": False}, "use_cache=False"),
    ):
        with kvtool.compressed(model, "h2o", 12), pytest.raises(kvtool.UsageError) as refused:
            model.generate(random_ids(50), max_new_tokens=3, **settings)
        assert reason in str(refused.value)


WAYS = {
    "call": lambda model, kind: {"cache_implementation": kind},
    "settings of the call": lambda model, kind: {
        "generation_config": GenerationConfig(cache_implementation=kind)
    },
    "settings of the model": lambda model, kind: (
        setattr(model.generation_config, "cache_implementation", kind) or {}
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("given", [False, True])
def test_dynamic_is_the_only_other_cache_that_may_be_asked_for(model, way, given):
    ids, expected = random_ids(50), alone(random_ids(50), "h2o", 12)
    for kind in ("dynamic", "static", "offloaded", "offloaded_static", "quantized", "paged"):
        settings = WAYS[way](model, kind)
        if given:
            settings["past_key_values"] = kvtool.build_cache(model, "h2o", 12)
        with kvtool.compressed(model, "h2o", 12):
            if kind == "dynamic":
                assert torch.equal(generated(model, ids, **settings), expected)
                continue
            with pytest.raises(kvtool.UsageError, match="asks for another cache than kvtool's"):
                generated(model, ids, **settings)


def test_other_caches_may_be_asked_for_where_kvtool_gives_none(model):
    kvtool.attach(model)
    ids = random_ids(50)
    static = generated(model, ids, cache_implementation="static", disable_compile=True)
    assert torch.equal(static, generated(model, ids))


def test_what_cannot_be_is_refused_before_anything_changes(model):
    before = set(vars(model))
    for arguments, told in (
        (("h2o",), "policy `h2o` needs a budget"),
        (("h2", 12), "no policy named `h2`"),
        (("h2o", 1.5), "1.5"),
    ):
        for ask in (kvtool.attach, lambda *given: kvtool.compressed(*given).__enter__()):
            with pytest.raises(kvtool.UsageError) as refused:
                ask(model, *arguments)
            assert told in str(refused.value)
            assert set(vars(model)) == before


def test_a_budget_without_a_policy_is_refused(model):
    with pytest.raises(kvtool.UsageError, match="budget 12 needs a policy"):
        kvtool.attach(model, budget=12)


def test_rocketkv_is_told_how_many_tokens_come(model):
    policy, ids = "rocketkv(window=4,kernel=3)", random_ids(90)
    by_hand = kvtool.attach(peaky_model("llama"))
    cache, tokens = kvtool.build_cache(by_hand, policy, 24), []
    logits = prefill(by_hand, cache, ids, new_tokens=NEW)
    for _ in range(NEW):
        tokens.append(logits.argmax(-1))
        logits = decode_step(by_hand, cache, tokens[-1])
    with kvtool.compressed(model, policy, 24):
        found = generated(model, ids, return_dict_in_generate=True)
    assert torch.equal(found.sequences[:, 90:], torch.stack(tokens, 1))
    held, expected = found.past_key_values, cache
    assert torch.equal(held.kept_positions(0), expected.kept_positions(0)[..., :-1])


# ---- a used cache and another text


def test_a_used_cache_goes_on_with_its_own_text_and_refuses_another(model):
    first, second = random_ids(40, seed=1), random_ids(50, seed=2)
    cache = kvtool.build_cache(model, "h2o", 12)
    out = generated(model, first, past_key_values=cache)
    with pytest.raises(kvtool.UsageError, match="read another text: its token 1 differs"):
        generated(model, second, past_key_values=cache)
    with pytest.raises(kvtool.UsageError, match=r"has read 45 tokens, and the text has 40"):
        generated(model, first, past_key_values=cache)
    longer = torch.cat([out, random_ids(9, seed=3)], 1)
    twin = peaky_model("llama")
    other = kvtool.build_cache(twin, "h2o", 12)
    generated(twin, first, past_key_values=other)
    expected = generated(twin, longer, past_key_values=other)
    assert torch.equal(generated(model, longer, past_key_values=cache), expected)
    cache.reset()
    generated(model, second, past_key_values=cache)


def test_a_row_more_is_another_text(model):
    cache = kvtool.build_cache(model, "h2o", 12)
    generated(model, random_ids(40), past_key_values=cache)
    with pytest.raises(kvtool.UsageError, match="holds 1 texts, and 2 are given"):
        generated(model, random_ids(50, batch=2), past_key_values=cache)


# ---- pipelines


def test_two_texts_through_a_pipeline_give_what_each_gives_alone():
    loaded = load(None)
    texts = ["The code of the red door is 4711. What is it?", "Twelve blue lamps stand in a row."]
    pipe = pipeline("text-generation", model=loaded.model, tokenizer=loaded.tokenizer)
    settings = {"max_new_tokens": 5, "do_sample": False}
    with kvtool.compressed(loaded.model, "h2o+caote", budget=8):
        together = [found[0]["generated_text"] for found in pipe(texts, **settings)]
    for text, found in zip(texts, together, strict=True):
        with kvtool.compressed(loaded.model, "h2o+caote", budget=8):
            assert pipe(text, **settings)[0]["generated_text"] == found
    cache = kvtool.build_cache(loaded.model, "h2o+caote", 8)
    with pytest.raises(kvtool.UsageError, match="a cache serves one text"):
        pipe(texts, past_key_values=cache, **settings)
    streamer = TextIteratorStreamer(loaded.tokenizer, skip_special_tokens=True)
    ids = loaded.tokenizer(texts[0], return_tensors="pt").input_ids
    with kvtool.compressed(loaded.model, "h2o+caote", budget=8):
        call = threading.Thread(
            target=loaded.model.generate, args=(ids,), kwargs={"streamer": streamer, **settings}
        )
        call.start()
        streamed = "".join(streamer)
    call.join()
    assert streamed.strip() == together[0].strip()


def test_prefix_tuning_is_refused():
    """PEFT says of such an adapter that it learns a prompt."""
    model = peaky_model("llama")
    model.active_peft_config = SimpleNamespace(is_prompt_learning=True)
    with pytest.raises(kvtool.KvtoolError, match="prefix or prompt tuning"):
        kvtool.build_cache(model, "h2o", 20)
    model.active_peft_config = SimpleNamespace(is_prompt_learning=False)
    kvtool.build_cache(model, "h2o", 20)


def test_a_compiled_model_is_taken_wherever_a_model_is(tmp_path):
    """Attach, build a cache, save and load it, detach: as with the model inside."""
    model = peaky_model("llama")
    settings = {"max_new_tokens": 4, "do_sample": False}
    full = model.generate(random_ids(50), **settings)
    with kvtool.compressed(model, "h2o", budget=20):
        expected = model.generate(random_ids(50), **settings)
    assert not torch.equal(expected, full)
    compiled = torch.compile(model)
    with kvtool.compressed(compiled, "h2o", budget=20) as given:
        assert given is compiled
        assert torch.equal(compiled.generate(random_ids(50), **settings), expected)
    assert kvtool.attach(compiled, "h2o", 20) is compiled
    assert torch.equal(compiled.generate(random_ids(50), **settings), expected)
    assert torch.equal(model.generate(random_ids(50), **settings), expected)
    assert kvtool.detach(compiled) is compiled
    assert torch.equal(compiled.generate(random_ids(50), **settings), full)
    assert kvtool.attach(compiled) is compiled
    cache = kvtool.build_cache(compiled, "h2o", 20)
    answer = compiled.generate(random_ids(50), past_key_values=cache, **settings)
    assert torch.equal(answer, expected)
    kvtool.save_cache(cache, tmp_path / "a", model=compiled)
    kvtool.save_cache(cache, tmp_path / "b", model=model)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    again = kvtool.load_cache(tmp_path / "a", compiled)
    assert again.get_seq_length() == cache.get_seq_length()
