"""Keys with a large constant part, as biases make them: the full cache's answer, or a refusal."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

import kvtool
from kvtool.cache.storage.form import make_form
from kvtool.maths.quantise import lost_share
from kvtool.maths.rope import Rotation
from kvtool.models import reference
from kvtool.policies.codec.fp8 import FP8
from kvtool.policies.codec.int4 import Int4
from kvtool.policies.codec.int8 import Int8

CHECKPOINT = Path(reference.__file__).parent / "checkpoint"
TEXT = (
    "The secret code for falcon: {}. The old lamp was near the school. Nobody sketched the "
    "magnet. The secret code for tiger: {}. The blue corridor was near the school. The secret "
    "code for {}:"
)
ASKED = ((7429103, 55812, "falcon"), (36592, 90417, "tiger"), (18273, 64509, "falcon"))
PAIRS = {"middle": [0.5], "slowest": [1], "several": [0.5, 0.8, 1]}  # the model needs the fast
CODECS = ["fp8", "int8", "int4"]
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
    """Whether all answers are transformers', or the keys are refused."""
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


@pytest.mark.each_once
@pytest.mark.few(3)
@pytest.mark.parametrize("size", [0.0, 20.0, 100.0, 300.0, 600.0])
@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("codec", CODECS)
def test_an_answer_is_right_or_refused(codec, pairs, size):
    if codec == "fp8" and pairs == "several" and size > 100:
        pytest.skip("fp8 rounds the large channels themselves too coarsely, as its page says")
    assert outcome(codec, pairs, size) in ("right", "refused")


@pytest.mark.parametrize("place", [[0], [7], [15], [0, 5, 9, 15]])
def test_a_bias_is_seen_in_whatever_pair_of_rope_it_is(place):
    drawn = torch.randn(2, 2, 40, 32, generator=torch.Generator().manual_seed(1))
    bias = torch.zeros(32)
    bias[place] = 600.0
    rotation = Rotation(10000.0 ** (-torch.arange(16) / 16), interleaved=False)
    places = torch.arange(40.0).expand(2, 1, 40)
    keys = rotation.turn(drawn + bias, places)
    for codec in (Int8(), Int4(), Int4(rotate=False)):
        make_form(codec, 0, drawn, drawn)
        for case in ((keys, drawn), (drawn, keys)):
            with pytest.raises(kvtool.KvtoolError, match=WHY) as caught:
                make_form(codec, 0, *case)
            assert "fp8" in caught.value.hint
    make_form(FP8(), 0, keys, keys)


def test_a_few_odd_tokens_are_no_reason_to_refuse():
    keys = torch.randn(1, 2, 40, 32, generator=torch.Generator().manual_seed(1))
    keys[:, :, :4, 3] = 600.0  # sinks
    make_form(Int8(), 0, keys, keys)
    make_form(Int8(), 0, torch.zeros_like(keys), torch.zeros_like(keys))


def test_the_lost_share_by_hand():
    numbers = torch.tensor([[[[1.0, 2.0, 4.0, 400.0]] * 3]])
    rounded = torch.tensor([[[[0.0, 1.0, 4.0, 400.0]] * 3]])
    assert lost_share(numbers, numbers) == 0
    assert lost_share(numbers, rounded) == 0.0  # the lower middle error
    assert lost_share(numbers, torch.zeros_like(numbers)) == 1.0
