"""Models that set their cache aside: refused, whatever the model and wherever it does so."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import kvtool
from kvtool.errors import KvtoolError
from kvtool.generation import prefill
from kvtool.transformers_versions import cache_argument
from tests.models_for_tests import SIZES, peaky_model, random_ids

NAME = cache_argument()
FROM = 20  # tokens of a text, from which on these models set their cache aside


def beyond(cache, tokens):
    """Whether a text has come to the length from which on a cache is set aside."""
    seen = 0 if cache is None else cache.get_seq_length()
    return seen + tokens.shape[1] > FROM


class DropsBeforeForwards(LlamaForCausalLM):
    """Prepares its forwards without the cache, and so reads the text again."""

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        if input_ids.shape[1] > FROM and kwargs[NAME].get_seq_length() <= FROM:
            kwargs[NAME], kwargs["next_sequence_length"] = None, None
        return super().prepare_inputs_for_generation(input_ids, **kwargs)


class ReplacesInForward(LlamaForCausalLM):
    """Goes on with a cache of its own."""

    def forward(self, input_ids, **kwargs):
        if beyond(kwargs.get(NAME), input_ids):
            kwargs[NAME] = DynamicCache(config=self.config)
        return super().forward(input_ids, **kwargs)


class DropsInForward(LlamaForCausalLM):
    """Runs without any cache, and says nothing of it."""

    def forward(self, input_ids, use_cache=None, **kwargs):
        cache = kwargs.pop(NAME, None)
        kwargs[NAME] = None if beyond(cache, input_ids) else cache
        out = super().forward(input_ids, use_cache=kwargs[NAME] is not None, **kwargs)
        return CausalLMOutputWithPast(logits=out.logits, **{NAME: out.get(NAME)})


class ReturnsAnother(LlamaForCausalLM):
    """Fills the cache that it is given, and hands on a copy."""

    def forward(self, *args, **kwargs):
        out, cache = super().forward(*args, **kwargs), kwargs.get(NAME)
        if cache is not None and cache.get_seq_length() > FROM:
            setattr(out, NAME, copy.deepcopy(cache))
        return out


class WithDecoder(LlamaForCausalLM):
    """Its decoder sets the cache aside."""

    def __init__(self, config):
        super().__init__(config)
        own = self.model.forward

        def forward(input_ids=None, **kwargs):
            if beyond(kwargs.get(NAME), input_ids):
                kwargs[NAME] = DynamicCache(config=config)
            return own(input_ids=input_ids, **kwargs)

        self.model.forward = forward


IN_FORWARD = [ReplacesInForward, DropsInForward, ReturnsAnother, WithDecoder]


def made(kind):
    torch.manual_seed(0)
    config = LlamaConfig(
        **(SIZES | {"eos_token_id": None}),
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = kind(config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize(
    ("kind", "prompt", "given"),
    [
        (DropsBeforeForwards, 12, False),
        (DropsBeforeForwards, 30, True),
        (ReplacesInForward, 12, True),
        (DropsInForward, 30, False),
        (ReturnsAnother, 12, False),
        (WithDecoder, 30, True),
    ],
)
def test_generate_goes_on_with_its_cache_or_not_at_all(kind, prompt, given):
    model, ids = made(kind), random_ids(prompt)
    plain = model.generate(ids, max_new_tokens=16, do_sample=False)
    assert plain.shape[1] == prompt + 16, "which runs without kvtool"
    block = nullcontext() if given else kvtool.compressed(model, "h2o", 8)
    cache = kvtool.build_cache(model, "h2o", 8) if given else None
    asked = {NAME: cache, "max_new_tokens": 16, "do_sample": False}
    with block, pytest.raises(KvtoolError, match="set aside the kvtool cache"):
        model.generate(ids, **asked)


@pytest.mark.parametrize("kind", IN_FORWARD)
def test_forwards_without_generate_as_well(kind):
    model, ids = made(kind), random_ids(30)
    cache = kvtool.build_cache(model, "h2o", 8)
    with pytest.raises(KvtoolError, match="set aside the kvtool cache"):
        model(input_ids=ids, **{NAME: cache})
    cache = kvtool.build_cache(model, "full")
    for part in ids[:, :FROM].split(10, 1):
        model(input_ids=part, **{NAME: cache})
    with pytest.raises(KvtoolError, match="set aside the kvtool cache"):
        model(input_ids=ids[:, FROM:], **{NAME: cache})
    with pytest.raises(KvtoolError, match="set aside the kvtool cache"):
        prefill(model, kvtool.build_cache(model, "full", prefill="block:8"), ids)


def test_a_tuple_that_holds_another_cache_is_found():
    model = made(ReplacesInForward)
    cache = kvtool.build_cache(model, "full")
    with pytest.raises(KvtoolError, match="set aside the kvtool cache"):
        model(input_ids=random_ids(30), past_key_values=cache, return_dict=False)
    model = made(LlamaForCausalLM)
    cache = kvtool.build_cache(model, "full")
    logits, returned = model(random_ids(30), past_key_values=cache, return_dict=False)
    assert returned is cache
    assert logits.shape[1] == 30


# ---- what is no such thing


def test_forwards_of_others_inside_a_call_may_have_caches_of_their_own():
    """Guidance runs the model a second time for each token, over a cache of its own."""
    ids, asked = random_ids(30), {"max_new_tokens": 8, "do_sample": False, "guidance_scale": 1.5}
    plain = made(LlamaForCausalLM).generate(ids, **asked)
    model = made(LlamaForCausalLM)
    cache = kvtool.build_cache(model, "full")
    assert torch.equal(model.generate(ids, past_key_values=cache, **asked), plain)


def test_a_call_without_a_kvtool_cache_may_do_as_it_likes():
    model, ids = made(DropsBeforeForwards), random_ids(12)
    plain = model.generate(ids, max_new_tokens=16, do_sample=False)
    kvtool.attach(model)
    assert torch.equal(model.generate(ids, max_new_tokens=16, do_sample=False), plain)


def test_what_stands_in_is_taken_back_and_follows_copies():
    model = peaky_model("llama")
    model.prepare_inputs_for_generation = own = model.prepare_inputs_for_generation
    kvtool.attach(model)
    assert model.prepare_inputs_for_generation is not own
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        cache = kvtool.build_cache(other, "h2o", 8)
        other.generate(random_ids(20), past_key_values=cache, max_new_tokens=4)
        assert cache.get_seq_length() == 23
        assert other.prepare_inputs_for_generation._model() is other
    kvtool.detach(model)
    assert model.prepare_inputs_for_generation is own
    del model.prepare_inputs_for_generation
    kvtool.detach(kvtool.attach(model))
    assert "prepare_inputs_for_generation" not in vars(model)
