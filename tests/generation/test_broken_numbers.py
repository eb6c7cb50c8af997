"""Broken numbers of models: reported in one line with the first module, at no cost before."""

import copy
import functools

import pytest
import torch
from transformers import LogitsProcessorList

import kvtool
from kvtool.generation import compress, generate, prefill, token_logprobs
from kvtool.generation.broken_numbers import BrokenNumbers, broken_entries
from kvtool.generation.decoding import Drawing, decode_loop
from kvtool.generation.graphs import StaticDecoding
from kvtool.generation.model_settings import Prepared
from kvtool.models.load import load
from tests.models_for_tests import peaky_model, random_ids

NAN, INF = float("nan"), float("inf")


def make(place=None, value=NAN, row=3):
    """The bundled model, with one number of one weight set."""
    loaded = bundled()
    model = kvtool.attach(copy.deepcopy(loaded.model))
    if place is not None:
        with torch.no_grad():
            model.get_parameter(f"{place}.weight")[row] = value
    return model, loaded.tokenizer


@functools.cache
def bundled():
    return load()


def ids_of(tokenizer, text="The old lamp was near the school."):
    return tokenizer(text, return_tensors="pt").input_ids


def test_a_row_is_broken_if_it_has_no_likeliest_token():
    logits = torch.tensor(
        [[1.0, 2, 3], [1, NAN, 2], [INF, 0, 1], [-INF, 0, 1], [-INF, -INF, -INF], [NAN] * 3]
    )
    assert broken_entries(logits).tolist() == [False, True, True, False, True, True]


@pytest.mark.parametrize(
    ("place", "value", "temperature"),
    [
        ("model.layers.2.mlp.down_proj", NAN, 0.0),
        ("model.layers.2.mlp.down_proj", INF, 1.0),
        ("model.layers.0.self_attn.q_proj", INF, 0.0),
    ],
)
def test_the_first_broken_module_is_named(place, value, temperature):
    model, tokenizer = make(place, value)
    cache = kvtool.build_cache(model, "h2o+caote", 16)
    with pytest.raises(BrokenNumbers) as caught:
        generate(
            model,
            tokenizer,
            cache,
            ids_of(tokenizer),
            max_new_tokens=4,
            temperature=temperature,
        )
    assert f"the weights of `{place}` hold NaN or infinite numbers" in str(caught.value)


def test_of_two_broken_modules_the_first_in_the_forward_is_named():
    model, tokenizer = make("model.layers.3.mlp.up_proj")
    with torch.no_grad():
        model.get_parameter("model.layers.1.self_attn.o_proj.weight")[0, 0] = NAN
    with pytest.raises(BrokenNumbers, match=r"`model.layers.1.self_attn.o_proj`"):
        compress(model, kvtool.build_cache(model, "full"), ids_of(tokenizer))


def test_numbers_that_overflow_are_told_from_weights_that_are_broken():
    model, tokenizer = make("model.layers.1.mlp.down_proj", 3e38)
    with pytest.raises(
        BrokenNumbers, match=r"overflow: .* `model.layers.1.mlp.down_proj`"
    ) as caught:
        prefill(model, kvtool.build_cache(model, "full"), ids_of(tokenizer))
    assert "--dtype" in caught.value.hint


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_that_breaks_while_decoding_is_told_before_it_is_shown(temperature):
    model, tokenizer = make()
    model.generation_config.eos_token_id = None
    ids = ids_of(tokenizer)
    whole = generate(model, tokenizer, kvtool.build_cache(model, "full"), ids, max_new_tokens=24)
    said = whole.token_ids[0]
    at = next(i for i, t in enumerate(said) if i > 0 and t not in ids and t not in said[:i])
    embeddings = model.get_input_embeddings()
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())  # not tied, for this test
    with torch.no_grad():
        embeddings.weight[said[at]] = NAN
    shown = []
    if temperature:  # which draws that token for certain
        steps = iter(said)
        head.register_forward_hook(lambda *call: pick(call[2], next(steps, 0)))
    with pytest.raises(BrokenNumbers, match=r"the weights of `model.embed_tokens`"):
        generate(
            model,
            tokenizer,
            kvtool.build_cache(model, "full"),
            ids,
            max_new_tokens=24,
            temperature=temperature,
            on_text=shown.append,
        )
    assert tokenizer.decode(said[: at + 1]).startswith("".join(shown))


def pick(logits, token):
    """Make one token all but certain, leaving NaN as it is."""
    bonus = torch.zeros_like(logits)
    bonus[..., token] = 1e6
    return logits + bonus


def test_of_a_batch_the_broken_row_alone_ends_it_and_a_row_that_has_ended_does_not():
    class Said:
        """What transformers' generate would hand to the loop."""

        max_length, do_sample = 8, False
        _pad_token_tensor = torch.tensor(0)

    ended = torch.tensor([True, False])
    model = kvtool.attach(peaky_model("llama"))
    good = torch.nn.functional.one_hot(torch.tensor([5, 6]), 96).float()
    broken = good.clone()
    broken[0] = NAN
    ids = random_ids(4, batch=2)

    def stops(text, _):
        return ended if text.shape[1] < 7 else torch.tensor([True, True])

    def loop(first, later):
        steps = StaticDecoding(model, 8)
        steps.feed = lambda *_: later
        drawing = Drawing(ids, Prepared(LogitsProcessorList(), [stops], Said))
        return decode_loop(model, None, drawing, first, steps)[0]

    assert loop(good, broken)[:, 4:].tolist() == [[5, 0, 0], [6, 6, 6]]
    with pytest.raises(BrokenNumbers, match="not finite under this policy"):
        loop(broken, good)


class OnHost(torch.Tensor):
    """What has been read from the device, so that reading it again costs nothing."""


def test_a_token_costs_one_wait_for_the_device_also_where_it_is_shown(monkeypatch):
    """A CPU waits for nothing; here what would make a GPU wait is counted."""
    model, tokenizer = make()
    model.generation_config.eos_token_id = None
    waits = []
    for name in ("cpu", "item", "tolist", "__bool__", "__int__"):
        count(monkeypatch, name, waits)

    def cost(tokens, **options):
        waits.clear()
        cache = kvtool.build_cache(model, "h2o", 8)
        generate(model, tokenizer, cache, ids_of(tokenizer), max_new_tokens=tokens, **options)
        return len(waits)

    shown = []
    for options in ({}, {"temperature": 1.0}, {"on_text": shown.append}):
        assert cost(12, **options) - cost(4, **options) == 8


def count(monkeypatch, name, waits):
    plain = getattr(torch.Tensor, name)

    def read(tensor, *args):
        if not isinstance(tensor, OnHost):
            waits.append(name)
        found = plain(tensor, *args)
        return found.as_subclass(OnHost) if name == "cpu" else found

    monkeypatch.setattr(torch.Tensor, name, read)


@pytest.mark.parametrize("chunk", [1, 4])
def test_scores_of_a_known_text(chunk):
    model, tokenizer = make("model.layers.2.mlp.down_proj")
    with pytest.raises(BrokenNumbers, match=r"`model.layers.2.mlp.down_proj`"):
        token_logprobs(model, kvtool.build_cache(model, "h2o", 16), ids_of(tokenizer), chunk=chunk)


def test_a_good_model_is_passed_once(monkeypatch):
    model, tokenizer = make()
    monkeypatch.setattr("kvtool.generation.broken_numbers.find", None)
    generate(
        model, tokenizer, kvtool.build_cache(model, "h2o", 16), ids_of(tokenizer), max_new_tokens=4
    )
