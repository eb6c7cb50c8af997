"""Streams: what a token costs, in time and memory, does not depend on how many came before."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import LlamaConfig, LlamaForCausalLM

import kvtool
from kvtool import generation
from kvtool.generation import decode_step, prefill
from kvtool.generation.decoding import Callback, StopsAt
from kvtool.models.load import load

POLICIES = ["streaming(positions=cache)", "tova+caote"]
BUDGET = 32


def tiny_model(layers=1):
    """A Llama of 32 dimensions, trained for 128 positions, if it were trained."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        eos_token_id=None,
    )
    return kvtool.attach(LlamaForCausalLM(config).eval())


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that an operation makes; a view makes none."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_flatten(args)[0] if hasattr(t, "dim")}
        for tensor in tree_flatten(result)[0]:
            if hasattr(tensor, "dim") and tensor.untyped_storage().data_ptr() not in given:
                self.numbers = max(self.numbers, tensor.numel())
        return result


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def stream(model, cache, tokens):
    """Feed random tokens one by one."""
    ids = torch.randint(64, (tokens,), generator=torch.Generator().manual_seed(1))
    for token in ids.split(1):
        logits = decode_step(model, cache, token)
    return logits


@pytest.mark.parametrize("policy", POLICIES)
def test_no_operation_of_a_decoded_token_grows_with_the_text(policy):
    model = tiny_model()
    cache = kvtool.build_cache(model, policy, BUDGET, prefill="block:64")
    sizes = []
    for length in (500, 2000, 500):
        prefill(model, cache, torch.randint(64, (1, length)))
        stream(model, cache, 3)
        with Largest() as largest:
            stream(model, cache, 2)
        sizes.append(largest.numbers)
    assert sizes[0] == sizes[1] == sizes[2] < 2000


@pytest.mark.exhaustive
def test_drawing_tokens_copies_nothing_of_the_text():
    model, loaded = tiny_model(), load()
    sizes = []
    for length in (10_000, 20_000):
        cache = kvtool.build_cache(model, POLICIES[0], BUDGET, prefill="block:64")
        ids = torch.randint(64, (1, length))
        made = Counter(length)
        with made:
            generation.generate(
                model, loaded.tokenizer, cache, ids, max_new_tokens=20, stop=["never said"]
            )
        sizes.append(made.count)
    assert sizes[0] == sizes[1]  # once for the text, and not once for every token
    assert sizes[0] < 20


class Counter(TorchDispatchMode):
    """How many tensors of a text's length or more are made."""

    def __init__(self, length):
        super().__init__()
        self.length, self.count = length, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        largest = Largest()
        result = largest.__torch_dispatch__(function, types, args, kwargs)
        self.count += largest.numbers >= self.length
        return result


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", POLICIES)
def test_a_stream_beyond_the_trained_positions_holds_its_budget(policy):
    model = tiny_model(layers=2)
    cache = kvtool.build_cache(model, policy, BUDGET, prefill="block:64")
    prefill(model, cache, torch.randint(64, (1, 300)))
    stream(model, cache, 40)
    before = cache.report()
    prefill(model, cache, torch.randint(64, (1, 10_000)))
    held = resident_bytes()
    prefill(model, cache, torch.randint(64, (1, 10_000)))
    logits = stream(model, cache, 300)
    assert resident_bytes() < 1.05 * held
    after = cache.report()
    assert logits.isfinite().all()
    assert after.tokens_seen == 300 + 40 + 20_000 + 300
    assert after.kept_per_layer == [BUDGET] * 2
    for name in ("kv_bytes", "allocated_bytes", "state_bytes"):
        assert getattr(after, name) == getattr(before, name)


@pytest.mark.slow
def test_positions_of_a_million_are_true_positions():
    model = tiny_model()
    cache = kvtool.build_cache(model, POLICIES[0], BUDGET, prefill="block:8192")
    prefill(model, cache, torch.randint(64, (1, 1_000_000)))
    stream(model, cache, 2)
    kept = cache.kept_positions(0)[0, 0].tolist()
    assert kept == [0, 1, 2, 3, *range(1_000_002 - BUDGET + 4, 1_000_002)]


def test_stop_texts_are_found_where_the_whole_text_would_show_them():
    tokenizer = load().tokenizer
    source = random.Random(0)
    letters = "ab12é☂ "
    for stop in ("ab", "é☂", "12", "☂☂"):
        text = "".join(source.choice(letters) for _ in range(400))
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        criterion = StopsAt(tokenizer, [stop], 5)
        held, expected = [], []
        for n in range(5, ids.shape[1] + 1):
            held.append(bool(criterion(ids[:, :n], None)[0]))
            whole = tokenizer.decode(ids[0, 5:n], skip_special_tokens=True)
            expected.append(stop in whole)
        first = expected.index(True) if True in expected else None
        assert first is not None
        assert held.index(True) == first


@pytest.mark.parametrize("text", ["word ☂ " * 300, "é☂x" * 300, "line\n" * 200 + "end"])
def test_streamed_text_is_the_text_and_little_is_held(text, monkeypatch):
    tokenizer = load().tokenizer
    pieces, sizes = [], []
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole, decode = tokenizer.decode(ids), tokenizer.decode
    monkeypatch.setattr(
        tokenizer, "decode", lambda ids, **how: sizes.append(len(ids)) or decode(ids, **how)
    )
    streamer = Callback(tokenizer, pieces.append)
    for token in ids:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert "".join(pieces) == whole
    assert max(sizes) < 100 < len(ids)
