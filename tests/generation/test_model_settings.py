"""A model's own generation settings: followed as transformers does, replaced, idle or refused."""

import copy

import pytest
import torch
from transformers import GenerationConfig, WatermarkingConfig

import kvtool
from kvtool import generation
from kvtool.errors import UsageError
from kvtool.generation import model_settings
from kvtool.generation.model_settings import end_tokens
from kvtool.generation.serving import Waiting, serve
from kvtool.models.load import load
from kvtool.models.reference.tasks import needle_prompt
from tests.tiers import first

NEW = 16
FOLLOWED = (  # of which transformers makes a processor or a stopping criterion
    *("min_length", "min_new_tokens", "max_time", "stop_strings", "top_k", "top_p", "min_p"),
    *("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty"),
    *("encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("bad_words_ids", "renormalize_logits", "forced_bos_token_id", "forced_eos_token_id"),
    *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
    *("begin_suppress_tokens", "sequence_bias", "watermarking_config", "eos_token_id"),
    "pad_token_id",
)


@pytest.fixture(scope="module")
def whole():
    loaded = load()
    kvtool.attach(loaded.model)
    return loaded


@pytest.fixture
def loaded(whole):
    """The model with settings of its own, which are put back."""
    before = whole.model.generation_config
    whole.model.generation_config = copy.deepcopy(before)
    yield whole
    whole.model.generation_config = before


@pytest.fixture(scope="module")
def ids(whole):
    prompt, _ = needle_prompt(tokens=120, seed=1)
    return whole.tokenizer(prompt, return_tensors="pt").input_ids


@pytest.fixture(scope="module")
def usual(whole, ids):
    """The answer without settings of the model's own."""
    found = answer(whole, ids)
    assert found == plain(whole, ids)
    return found


def answer(loaded, ids, **settings):
    cache = kvtool.build_cache(loaded.model, "full")
    settings = {"max_new_tokens": NEW} | settings
    return generation.generate(loaded.model, loaded.tokenizer, cache, ids, **settings).token_ids[0]


def served(loaded, ids, new=NEW):
    caches = lambda: kvtool.build_cache(loaded.model, "full")  # noqa: E731
    rows = serve(loaded.model, loaded.tokenizer, caches, [Waiting(0, ids, new)])
    return next(iter(rows)).token_ids


def plain(loaded, ids, **settings):
    """What transformers' own generate says, with a cache of its own."""
    settings = {"max_new_tokens": NEW, "do_sample": False} | settings
    out = type(loaded.model).generate(
        loaded.model,
        ids,
        attention_mask=torch.ones_like(ids),
        tokenizer=loaded.tokenizer,
        **settings,
    )
    return out[0, ids.shape[1] :].tolist()


def test_every_setting_of_transformers_has_its_use():
    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert names == {*FOLLOWED, *OURS, *IDLE, *REFUSED}


def followed(usual):
    """Values of greedy settings that alter the usual answer."""
    first, second = usual[0], usual[1]
    return {
        "min_length": 120 + NEW,
        "min_new_tokens": NEW,
        "stop_strings": ["."],
        "repetition_penalty": 5.0,
        "encoder_repetition_penalty": 0.2,
        "no_repeat_ngram_size": 1,
        "encoder_no_repeat_ngram_size": 2,
        "bad_words_ids": [[second]],
        "forced_eos_token_id": 5,
        "exponential_decay_length_penalty": (1, 500.0),
        "suppress_tokens": [second],
        "begin_suppress_tokens": [first],
        "sequence_bias": [[[second], -100.0]],
        "watermarking_config": WatermarkingConfig(greenlist_ratio=0.1, bias=50.0),
        "eos_token_id": [second, 10**9],
    }


ALTERING = list(followed([0, 0]))
SAME = {  # settings that alter nothing here, and must not be in the way
    "renormalize_logits": True,
    "remove_invalid_values": True,
    "forced_bos_token_id": 3,
    "max_time": 1000.0,
    "pad_token_id": -1,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.1,
    "top_h": 0.5,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
}


def test_each_setting_that_is_followed_is_tried():
    assert {*ALTERING, *SAME} == set(FOLLOWED)


@pytest.mark.parametrize("name", first(4, ALTERING))
def test_settings_are_followed_as_transformers_does(name, loaded, ids, usual):
    new = 4 if name == "forced_eos_token_id" else NEW  # which the usual answer would go beyond
    setattr(loaded.model.generation_config, name, followed(usual)[name])
    found = answer(loaded, ids, max_new_tokens=new)
    assert found == served(loaded, ids, new)
    assert found == plain(loaded, ids, max_new_tokens=new)
    assert found != usual[:new]


@pytest.mark.parametrize(("name", "least"), [("top_k", 1), ("top_p", 1e-9)])
def test_settings_of_sampling_are_followed_where_tokens_are_drawn(name, least, loaded, ids, usual):
    """Cut down to the likeliest token, whatever is drawn is that."""
    hot = [answer(loaded, ids, temperature=50.0, seed=seed) for seed in range(2)]
    assert usual not in hot
    setattr(loaded.model.generation_config, name, least)
    found = [answer(loaded, ids, temperature=50.0, seed=seed) for seed in range(2)]
    assert found == [usual, usual]


IDLE = {
    **dict.fromkeys(model_settings.IDLE, True),
    "assistant_early_exit": 1,
    "prompt_lookup_num_tokens": 3,
    "speculation_type": "dflash",
    "num_assistant_tokens_schedule": "constant",
    "compile_config": None,
    "continuous_batching_config": None,
    "prefill_chunk_size": 16,
    "early_stopping": "never",
    "transformers_version": "1.0",
}
OURS = {
    "max_length": 3,
    "max_new_tokens": 3,
    "do_sample": True,
    "temperature": 30.0,
    "use_cache": False,
    "cache_config": {"backend": "none"},
    "max_cache_len": 3,
}


@pytest.mark.parametrize("settings", [SAME, IDLE, OURS], ids=["same", "idle", "ours"])
def test_other_settings_change_nothing(settings, loaded, ids, usual):
    assert {*OURS} == {*model_settings.OURS}
    for name, value in settings.items():
        setattr(loaded.model.generation_config, name, value)
    assert answer(loaded, ids) == served(loaded, ids) == usual


REFUSED = {
    "num_beams": 3,
    "num_beam_groups": 2,
    "num_return_sequences": 2,
    "penalty_alpha": 0.6,
    "guidance_scale": 1.5,
    "token_healing": True,
    "dola_layers": "high",
    "constraints": ["x"],
    "force_words_ids": [[1]],
    "cache_implementation": "quantized",
}


def test_what_another_loop_would_say_is_refused_before_the_prompt_is_read(loaded, ids):
    assert {*REFUSED} == {*model_settings.REFUSED}
    for name, value in REFUSED.items():
        setattr(loaded.model.generation_config, name, value)
        cache = kvtool.build_cache(loaded.model, "full")
        with pytest.raises(UsageError, match=rf"generation_config.json\) have {name}: "):
            generation.generate(loaded.model, loaded.tokenizer, cache, ids, max_new_tokens=3)
        assert cache.get_seq_length() == 0
        with pytest.raises(UsageError, match=f"have {name}: "):
            served(loaded, ids)
        setattr(loaded.model.generation_config, name, None)


@pytest.mark.parametrize("kind", ["dynamic", "hybrid", "sliding_window"])
def test_caches_that_ask_for_no_more_than_the_layers_change_nothing(kind, loaded, ids, usual):
    loaded.model.generation_config.cache_implementation = kind
    assert answer(loaded, ids) == served(loaded, ids) == usual


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("eos_token_id", "</s>"), ("eos_token_id", [2, "x"]), ("eos_token_id", True)),
        *(("bad_words_ids", []), ("bad_words_ids", [[10**9]]), ("suppress_tokens", "words")),
        *(("stop_strings", 3), ("sequence_bias", {"a": 1}), ("repetition_penalty", -1.0)),
        *(("min_new_tokens", "three"), ("forced_eos_token_id", "x")),
        ("watermarking_config", {"unknown": 1}),
    ],
)
def test_odd_values_are_refused_in_a_line(name, value, loaded, ids):
    setattr(loaded.model.generation_config, name, value)
    for act in (answer, served):
        with pytest.raises(UsageError, match=r"generation settings \(generation_config.json\)"):
            act(loaded, ids)


@pytest.mark.parametrize("value", [None, [-1]])
def test_without_an_end_of_text_the_length_ends_it(value, loaded, ids):
    loaded.model.generation_config.eos_token_id = value
    assert len(answer(loaded, ids, max_new_tokens=40)) == 40
    assert end_tokens(loaded.model) == []


def test_the_least_length_of_the_model_is_no_more_than_the_longest(loaded, ids):
    loaded.model.generation_config.min_new_tokens = 1000
    assert len(answer(loaded, ids)) == NEW


def test_an_endless_answer_takes_no_memory_before_it_comes(loaded, ids):
    """A buffer of 2**31 tokens would take 16 GiB."""
    most = 2**31 - 1
    usual = answer(loaded, ids, max_new_tokens=60)
    assert answer(loaded, ids, max_new_tokens=most, stop=(".",))[:3] == usual[:3]
    caches = lambda: kvtool.build_cache(loaded.model, "full")  # noqa: E731
    rows = serve(loaded.model, loaded.tokenizer, caches, [Waiting(0, ids, most)])
    assert next(iter(rows)).token_ids[:3] == usual[:3]
