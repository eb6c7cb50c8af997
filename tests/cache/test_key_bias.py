"""Keys with a large constant part, as biases make them, in fewer bits: the full cache's answers."""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

import kvtool
from kvtool.cache.slots.slot_form import make_form
from kvtool.generation import decode_step, prefill
from kvtool.maths.quantise import ChannelRanges, channel_ranges, lost_share
from kvtool.maths.rotation import Rotation
from kvtool.models import reference
from kvtool.policies.codec.fp8 import FP8
from kvtool.policies.codec.int4 import Int4
from kvtool.policies.codec.int8 import Int8
from kvtool.policies.codec.mixed import K8V4
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
        own = keys[entry, head, keys.shape[2] - count[entry] :].double()
        if len(own) < 8:
            continue
        spreads = []
        for c in range(dim):
            mean = float(torch.tensor(sum(own[:, c].tolist()) / len(own)).half())
            spreads.append((sum((k - mean) ** 2 for k in own[:, c].tolist()) / len(own)) ** 0.5)
            centre[entry, head, 0, c] = mean
        middle = sorted(spreads)[(dim - 1) // 2]
        for c, spread in enumerate(spreads):
            if spread and middle:
                steps = round(math.log2(spread / middle) / 2)  # half to even
                while spread / 2**steps > 8 * middle:
                    steps += 1
                exponent[entry, head, 0, c] = min(15, max(-1, steps))
    return centre, exponent


def narrowed_by_hand(
    keys: torch.Tensor, centre: torch.Tensor, exponent: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is rounded of each key, and whether it is centred; the others are negated."""
    found, centred = torch.zeros_like(keys), torch.zeros(*keys.shape[:3], 1, dtype=torch.bool)
    for entry, head, token in itertools.product(*map(range, keys.shape[:3])):
        size, own = 2 ** exponent[entry, head, 0], keys[entry, head, token]
        plain, moved = own / size, (own - centre[entry, head, 0]) / size
        centred[entry, head, token] = moved.norm() <= plain.norm()
        found[entry, head, token] = moved if centred[entry, head, token] else -plain
    return found, centred


@pytest.mark.parametrize(
    ("places", "count"),
    [([], [40, 40]), ([0], [7, 40]), ([15], [0, 40]), ([0, 5, 9, 15], [40, 9])],
)
def test_ranges_equal_a_loop_and_leave_padding_out(places, count):
    keys = biased_keys(places) * torch.logspace(-3, 3, 32, 2)
    keys[:, :, ::9] = torch.randn(2, 2, 5, 32, generator=torch.Generator().manual_seed(3))
    valid = torch.arange(40) >= 40 - torch.tensor(count)[:, None]
    found = channel_ranges(keys, valid)
    centre, exponent = ranges_by_hand(keys, count)
    torch.testing.assert_close(found.centre.float(), centre, rtol=1e-3, atol=1e-3)
    assert torch.equal(found.exponent.float(), exponent)
    assert bool(max(count) >= 8) == bool(found.centre.any())
    numbers, centred = found.narrow(keys)
    expected = narrowed_by_hand(keys, *(each.float() for each in found))
    torch.testing.assert_close(numbers, expected[0], rtol=1e-5, atol=1e-4)
    assert torch.equal(centred, expected[1])
    decoded = torch.where(centred, numbers, -numbers)  # as a negative scale makes them
    torch.testing.assert_close(found.widen(decoded, ~centred), keys, rtol=1e-5, atol=1e-4)
    query = torch.randn(2, 2, 3, 1, 32, generator=torch.Generator().manual_seed(2))
    instead, constant = found.of_query(query)
    products = instead @ decoded[:, :, None].mT + constant * centred[:, :, None].mT
    torch.testing.assert_close(products, query @ keys[:, :, None].mT, rtol=1e-4, atol=1e-2)


def test_the_ranges_of_eight_keys_by_hand():
    """The first key lies far from the mean, as that of a sink does, and is not centred."""
    rows = [[0, 0.5, 0, 0], [40, 1, 0, 0.5], [44, -1, 1, 0], [36, 0, -1, 0.5]]
    rows += [[42, 1, 1, -0.5], [38, -1, 0, 0], [44, 0, -1, -0.5], [36, 0.5, 0, 0]]
    keys = torch.tensor([[rows]], dtype=torch.float32)
    found = channel_ranges(keys, torch.ones(1, 8, dtype=torch.bool))
    assert found.centre.flatten().tolist() == [35, 0.125, 0, 0]
    assert found.exponent.flatten().tolist() == [2, 0, 0, 0]
    lengths = torch.tensor([8.758032, 1.605654, 2.707051, 1.152443, 2.25347, 1.352082])
    lengths = torch.cat([lengths, torch.tensor([2.515576, 0.450694])])
    all_centred, nothing = found.narrow(keys, choose=False)
    assert nothing is None
    torch.testing.assert_close(all_centred[0, 0].norm(dim=-1), lengths, rtol=1e-5, atol=1e-5)
    numbers, centred = found.narrow(keys)
    assert centred.flatten().tolist() == [False] + [True] * 7
    assert numbers[0, 0, 0].tolist() == [0, -0.5, 0, 0]
    shown = [0.5, 10.06, 11.09]  # without centring
    plain = (keys / found.factor)[0, 0].norm(dim=-1)
    torch.testing.assert_close(plain[:3], torch.tensor(shown), rtol=1e-3, atol=0)


@pytest.mark.parametrize("codec", [Int8(), FP8(), Int4(), Int4(rotate=False), K8V4()], ids=str)
def test_codes_are_those_of_narrowed_keys_and_the_sign_says_which_are_centred(codec):
    keys = biased_keys([15])
    keys[:, :, :3] = torch.randn(2, 2, 3, 32, generator=torch.Generator().manual_seed(3))
    keys[:, :, 2] = 0  # whose scale of 0 has a sign, too
    form = make_form(codec, 3, keys, keys)
    form = form.fitted(
        3, keys, torch.zeros_like(keys), torch.arange(40)[None], torch.tensor([True])
    )
    ranges = [each.float() for each in channel_ranges(keys, torch.ones(1, 40, dtype=torch.bool))]
    numbers, centred = narrowed_by_hand(keys, *ranges)
    assert not centred[:, :, :3].any()
    assert centred[:, :, 3:].all()
    own, rotation = codec.sides()[0], codec.sides()[0].rotation(3, 32, keys.device)
    plain = torch.where(centred, numbers, -numbers)
    codes, scales = own.encode(plain if rotation is None else rotation.rotate(plain))
    stored = form.quantise(keys, torch.zeros_like(keys))
    assert torch.equal(stored["key_scales"].abs(), scales)
    assert torch.equal(stored["key_scales"].signbit(), ~centred.expand_as(scales))
    back = own.decode(codes, scales)
    back = back if rotation is None else rotation.rotate_back(back)
    expected = back * 2 ** ranges[1] + centred * ranges[0]
    torch.testing.assert_close(form.dequantise_keys(stored), expected, rtol=1e-5, atol=1e-4)


def test_a_file_of_before_has_all_its_keys_centred():
    """Its scales have no sign, and its exponents none below 0: keys are read as they were."""
    keys = biased_keys([15])
    form = make_form(Int8(), 0, keys, keys)
    ranges = ChannelRanges(
        torch.zeros(2, 2, 1, 32).half(), torch.zeros(2, 2, 1, 32, dtype=torch.int8)
    )
    ranges.centre[..., 15], ranges.exponent[..., 15] = 540, 7
    codes, scales = Int8().encode((keys - ranges.centre) / 2.0**ranges.exponent)
    stored = {"keys": codes, "key_scales": scales}
    found = form.with_ranges(ranges, shifted=True).dequantise_keys(stored)
    expected = Int8().decode(codes, scales) * 2.0**ranges.exponent + ranges.centre
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-4)


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


@pytest.mark.parametrize("repeated", [8, 64])
@pytest.mark.parametrize("codec", [Int4(), Int8(), FP8()])
def test_one_token_again_and_again_says_nothing_of_the_channels(codec, repeated):
    """RoPE alone moves its keys; by their spread, the fast channels of all others would be lost."""
    generator = torch.Generator().manual_seed(4)
    rotation = Rotation(10000.0 ** (-torch.arange(16) / 16), interleaved=False)
    places = torch.arange(512.0 + repeated).expand(2, 1, -1)
    same, others = (torch.randn(2, 2, n, 32, generator=generator) for n in (1, 512))
    keys = rotation.shift(torch.cat([same.expand(-1, -1, repeated, -1), others], 2), places)
    form, empty = make_form(codec, 0, keys, keys), torch.tensor([True])
    block, new = keys[:, :, :repeated], torch.arange(repeated)[None]
    values = same.expand_as(block)
    fitted = form.fitted(0, block, values, new, empty)
    assert not any(each.any() for each in fitted.ranges)
    rest = keys[:, :, repeated:]
    wrong, plain = (
        (each.dequantise_keys(each.quantise(rest, rest)) - rest).norm() for each in (fitted, form)
    )
    assert wrong <= 1.001 * plain
    assert form.fitted(0, block, torch.randn(block.shape), new, empty).ranges.centre.any()


def test_a_channel_that_stands_still_may_move_later():
    keys = biased_keys([])
    keys[..., 5] = 3.0
    keys[..., 7] = torch.inf
    found = channel_ranges(keys, torch.ones(1, 40, dtype=torch.bool))
    assert found.exponent[..., [5, 7]].flatten().tolist() == [0, 0] * 4
    assert found.exponent.min() >= -1
    assert found.centre[..., 7].abs().max() == 0
    assert found.centre[..., 5].unique().tolist() == [3.0]


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
        centres = other.form.ranges.centre, one.form.ranges.centre
        torch.testing.assert_close(*centres, rtol=2e-3, atol=2e-3)  # the model's own digits
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
