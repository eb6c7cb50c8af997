"""Keys with a large constant part, as biases make them, in fewer bits: the full cache's answers."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

import kvtool
from kvtool.cache.slots.slot_form import make_form
from kvtool.generation import decode_step, prefill
from kvtool.maths.quantise import channel_ranges, lost_share
from kvtool.maths.rotation import Rotation
from kvtool.models import reference
from kvtool.policies.codec.fp8 import FP8
from kvtool.policies.codec.int4 import Int4
from kvtool.policies.codec.int8 import Int8
from tests.tiers import first, first_rows

CHECKPOINT = Path(reference.__file__).parent / "checkpoint"
TEXT = (
    "The secret code for falcon: {}. The old lamp was near the school. Nobody sketched the "
    "magnet. The secret code for tiger: {}. The blue corridor was near the school. The secret "
    "code for {}:"
)
ASKED = ((7429103, 55812, "falcon"), (36592, 90417, "tiger"))
PAIRS = {"middle": [0.5], "slowest": [1], "several": [0.5, 0.8, 1]}  # the model needs the fast
WHY = "a few channels are so much larger than the others"


@functools.cache
def biased(pairs: str, size: float) -> LlamaForCausalLM:
    """The bundled model with a bias of its keys in pairs of RoPE."""
    config = AutoConfig.from_pretrained(CHECKPOINT)
    config.attention_bias = True
    model = LlamaForCausalLM.from_pretrained(CHECKPOINT, config=config).eval()
    half = config.head_dim // 2
    places = [round(place * (half - 1)) for place in PAIRS[pairs]]
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                getattr(attention, name).bias.zero_()
            attention.k_proj.bias.view(-1, 2 * half)[:, places] = size
    return model


@functools.cache
def expected(pairs: str, size: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Prompts, and what transformers alone answers."""
    tokenizer, model = AutoTokenizer.from_pretrained(CHECKPOINT), biased(pairs, size)
    prompts = [tokenizer(TEXT.format(*each), return_tensors="pt").input_ids for each in ASKED]
    return [(ids, model.generate(ids, max_new_tokens=6, do_sample=False)) for ids in prompts]


def outcome(codec: str, pairs: str, size: float) -> str:
    """Whether all answers are those of transformers, or the keys are refused."""
    model, answers = biased(pairs, size), []
    for ids, plain in expected(pairs, size):
        try:
            with kvtool.compressed(model, f"full+{codec}"):
                found = model.generate(ids, max_new_tokens=6, do_sample=False)
        except kvtool.KvtoolError as error:
            answers.append("refused" if WHY in str(error) else str(error))
        else:
            answers.append("right" if torch.equal(found, plain) else "wrong")
    return answers[0] if len(set(answers)) == 1 else "mixed"


@pytest.mark.parametrize(
    ("codec", "pairs", "size"),
    first_rows(
        2,
        [
            ("int4", "slowest", 100.0),
            ("fp8", "middle", 600.0),
            ("k8v4", "middle", 600.0),
            ("int4", "several", 100.0),
            ("int4", "several", 0.0),
            ("int8", "slowest", 300.0),
        ],
    ),
)
def test_answers_are_those_of_transformers(codec, pairs, size):
    assert outcome(codec, pairs, size) == "right"


def biased_keys(places: list[int], size: float = 600.0) -> torch.Tensor:
    drawn = torch.randn(2, 2, 40, 32, generator=torch.Generator().manual_seed(1))
    bias = torch.zeros(32)
    bias[places] = size
    rotation = Rotation(10000.0 ** (-torch.arange(16) / 16), interleaved=False)
    return rotation.shift(drawn + bias, torch.arange(40.0).expand(2, 1, 40))


def ranges_by_hand(keys: torch.Tensor, count: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The centre and the power of two of each channel, in loops; the last `count` tokens count."""
    batch, heads, _, dim = keys.shape
    centre, exponent = torch.zeros(batch, heads, 1, dim), torch.zeros(batch, heads, 1, dim)
    for entry, head in itertools.product(range(batch), range(heads)):
        own = keys[entry, head, keys.shape[2] - count[entry] :]
        if len(own) < 8:
            continue
        usual = sorted(own[:, c].abs().max().item() for c in range(dim))[(dim - 1) // 2]
        for c in range(dim):
            if usual == 0 or own[:, c].abs().max() < 8 * usual:
                continue
            centre[entry, head, 0, c] = own[:, c].mean().half()
            left = (own[:, c] - centre[entry, head, 0, c]).abs().max().item()
            while left / 2 ** exponent[entry, head, 0, c] >= 2 * usual:
                exponent[entry, head, 0, c] += 1
    return centre, exponent


@pytest.mark.parametrize(
    ("places", "count"),
    [([], [40, 40]), ([0], [7, 40]), ([15], [0, 40]), ([0, 5, 9, 15], [40, 9])],
)
def test_ranges_equal_a_loop_and_leave_padding_out(places, count):
    keys = biased_keys(places)
    valid = torch.arange(40) >= 40 - torch.tensor(count)[:, None]
    found = channel_ranges(keys, valid)
    centre, exponent = ranges_by_hand(keys, count)
    torch.testing.assert_close(found.centre.float(), centre, rtol=1e-3, atol=1e-3)
    assert torch.equal(found.exponent.float(), exponent)
    assert bool(places and max(count) >= 8) == bool(centre.any())
    back = found.widen(found.narrow(keys))
    torch.testing.assert_close(back, keys, rtol=1e-5, atol=1e-4)
    query = torch.randn(2, 2, 3, 1, 32, generator=torch.Generator().manual_seed(2))
    instead, constant = found.of_query(query)
    products = instead @ found.narrow(keys)[:, :, None].mT + constant
    torch.testing.assert_close(products, query @ keys[:, :, None].mT, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("codec", [Int8(), FP8(), Int4(), Int4(rotate=False)], ids=str)
@pytest.mark.parametrize("places", [[15], [0, 5, 9, 15]])
def test_most_channels_are_as_exact_as_without_a_bias(codec, places):
    """Each key alone, decoded: where no bias is, errors are those of keys without one."""
    keys = biased_keys(places)
    form = make_form(codec, 0, keys, keys)
    new, empty = torch.arange(40)[None], torch.tensor([True])
    form = form.fitted(0, keys, torch.zeros_like(keys), new, empty)
    plain = biased_keys([])
    usual = make_form(codec, 0, plain, plain)
    channels = [c for c in range(32) if c % 16 not in places]
    errors = []
    for each, numbers in ((form, keys), (usual, plain)):
        decoded, _ = each.dequantise(each.quantise(numbers, torch.zeros_like(numbers)))
        errors.append((decoded - numbers)[..., channels].abs().mean())
    assert errors[0] < 4 * errors[1]  # without ranges 50 times and more


def test_values_that_rounding_would_lose_are_refused():
    keys, values = biased_keys([]), biased_keys([15])
    form = make_form(Int8(), 0, keys, values)
    with pytest.raises(kvtool.KvtoolError, match=WHY) as caught:
        form.fitted(0, keys, values, torch.arange(40)[None], torch.tensor([True]))
    assert "fp8" in caught.value.hint


@pytest.mark.parametrize(
    "policy", first(2, ["full+int4", "h2o+calidrop+int8", "snapkv(window=4)+ada+fp8", "h2o+k8v4"])
)
def test_a_padded_entry_a_file_and_a_beam_are_what_one_alone_is(policy, tmp_path):
    model = biased("slowest", 100.0)
    (ids, _), (other, _) = expected("slowest", 100.0)[:2]
    budget = None if policy.startswith("full") else 24
    alone = kvtool.build_cache(model, policy, budget)
    logits = prefill(model, alone, ids)
    padded = torch.zeros(2, ids.shape[1] + 5, dtype=torch.long)
    mask = torch.zeros_like(padded)
    padded[0, 5:], mask[0, 5:] = ids[0], 1
    padded[1, -other.shape[1] :], mask[1, -other.shape[1] :] = other[0], 1
    both = kvtool.build_cache(model, policy, budget)
    together = prefill(model, both, padded, mask)
    torch.testing.assert_close(together[:1], logits, rtol=1e-3, atol=2e-2)
    both.reorder_cache(torch.tensor([1, 0]))
    both.batch_select_indices(torch.tensor([1]))
    path = tmp_path / "biased.safetensors"
    kvtool.save_cache(alone, path, input_ids=ids)
    loaded = kvtool.load_cache(path, model)
    report = alone.report()
    assert loaded.report().kv_bytes == report.kv_bytes
    token = torch.tensor([7])
    after = decode_step(model, alone, token)
    torch.testing.assert_close(decode_step(model, loaded, token), after, rtol=0, atol=1e-5)
    # a bias of 100 costs the model itself digits: its prompts differ by up to 8e-3 when padded
    torch.testing.assert_close(decode_step(model, both, token), after, rtol=1e-3, atol=0.2)
    for one, other in zip(alone.slot_layers, both.slot_layers, strict=True):
        assert one.form.shifted
        torch.testing.assert_close(other.form.ranges.centre, one.form.ranges.centre)
        assert torch.equal(other.form.ranges.exponent, one.form.ranges.exponent)


def test_a_few_odd_tokens_are_no_reason_to_refuse():
    keys = torch.randn(1, 2, 40, 32, generator=torch.Generator().manual_seed(1))
    keys[:, :, :4, 3] = 600.0  # sinks
    first = torch.arange(40)[None], torch.tensor([True])
    for each in (keys, torch.zeros_like(keys)):
        make_form(Int8(), 0, each, each).fitted(0, each, each, *first)


def test_the_lost_share_by_hand():
    numbers = torch.tensor([[[[1.0, 2.0, 4.0, 400.0]] * 3]])
    rounded = torch.tensor([[[[0.0, 1.0, 4.0, 400.0]] * 3]])
    assert lost_share(numbers, numbers) == 0
    assert lost_share(numbers, rounded) == 0.0  # the lower middle error
    assert lost_share(numbers, torch.zeros_like(numbers)) == 1.0
