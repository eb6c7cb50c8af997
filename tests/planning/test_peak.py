"""The most memory at a time, against sums written out by hand for a small Llama."""

import pytest
from transformers import AutoConfig

from kvtool import parse_policy
from kvtool.model_shape import LayerShape
from kvtool.planning.bytes import Text
from kvtool.planning.peak import computing_bytes, reading_bytes

CONFIG = AutoConfig.for_model(
    "llama",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
LAYER = LayerShape(kv_heads=2, heads=4, key_dim=16, value_dim=16, itemsize=4)
WIDE = LayerShape(kv_heads=1, heads=4, key_dim=32, value_dim=32, itemsize=4)
# 3 x 64 hidden, attention 3 x 4 x 16 + 4 x 2 x 16 = 320 (the MLP's 3 x 96 is less), 2 x 16 angles;
# in 4 bytes each, and 24 of the id and place: 2200 bytes a token
TOKEN = (192 + 320 + 32) * 4 + 24
KEYS = 40 * 4 * 128  # 40 keys and values repeated for 4 heads
LOGITS = 2 * 96 * 4


def computed(policy, layers=(LAYER, LAYER), block=16, **text):
    text = Text(prompt=40, **text)
    return computing_bytes(
        CONFIG, layers, parse_policy(policy), text, block=block, keys=40, first=20
    )


@pytest.mark.parametrize(
    ("policy", "more"),
    [
        ("streaming", 0),
        ("h2o", 2 * 16 * 40 * 4 * 4),  # weights and their softmax: 16 queries, 40 keys, 4 heads
        ("snapkv(window=8)", 2 * 8 * 40 * 4 * 4),
        ("snapkv(window=32)", 2 * 16 * 40 * 4 * 4),  # as many as there are in a block
        ("sirllm", 15 * LOGITS),  # the logits of the whole block
    ],
)
def test_a_block_of_a_prompt_by_hand(policy, more):
    for rows in (1, 3):
        assert computed(policy, sequences=rows) == rows * (16 * TOKEN + KEYS + LOGITS + more)


def test_choosing_takes_what_attention_did_where_that_is_more():
    """R-KV: unit keys of 16 numbers, two tiles of 128 cosines and 8 numbers of places, 2 heads."""
    choosing = 40 * 2 * 4 * (16 + 2 * 128 + 8)
    assert choosing > KEYS
    assert computed("rkv") == 16 * TOKEN + choosing + LOGITS
    wide = 40 * 1 * 4 * (3 * 256 + 8)  # keys, what they are times 0 or 1, and their squares
    one = LayerShape(kv_heads=1, heads=4, key_dim=256, value_dim=256, itemsize=4)
    attended = computed("streaming", (one,), block=1)
    assert computed("rkv", (one,), block=1) == attended + wide


def test_a_decoded_token_repeats_no_keys():
    assert computed("streaming", block=1) == TOKEN + LOGITS
    assert computed("snapkv(window=8)", block=1) == TOKEN + LOGITS
    assert computed("streaming", block=1, vocabulary=200) == TOKEN + 2 * 200 * 4


def test_layers_of_other_shapes():
    wide = (192 + 3 * 4 * 32 + 4 * 32 + 32) * 4 + 24
    assert computed("streaming", (LAYER, WIDE)) == 16 * wide + KEYS + LOGITS


@pytest.mark.parametrize(
    ("policy", "slot"),
    [("streaming", 128 + 4), ("h2o", 128 + 4 + 4)],  # key, value, place; a statistic
)
def test_a_prompt_in_blocks_by_hand(policy, slot):
    """What both layers keep, and the larger of them once more with a block of 8 behind."""
    layers, kept = [LAYER, LAYER], [10, 20]
    found = reading_bytes(parse_policy(policy), layers, kept, 40, 8, waits=False)
    assert found == 2 * slot * (10 + 20) + 2 * slot * (20 + 8)
    whole = reading_bytes(parse_policy(policy), layers, [40, 40], 40, 40, waits=False)
    assert whole == 2 * slot * 80 + 2 * slot * 80


def test_moments_of_queries_are_whole_while_a_prompt_is_read_by_hand():
    """Four heads: count, mean and 16 x 16 numbers; then variances, and correlations in a byte."""
    layers, policy, slots = [LAYER, LAYER], parse_policy("expected"), 2 * 132 * (30 + 28)
    whole, rounded = 4 * (1 + 16 + 256) * 4, 4 * ((1 + 16 + 16) * 4 + 120)
    found = reading_bytes(policy, layers, [10, 20], 40, 8, waits=False)
    assert found == slots + 2 * whole
    found = reading_bytes(policy, layers, [10, 20], 40, 40, waits=False)
    assert found == 2 * 132 * (30 + 60) + rounded + whole


def test_layers_that_wait_hold_the_prompt():
    layers, policy = [LAYER, LAYER, None], parse_policy("streaming")
    found = reading_bytes(policy, layers, [10, 20, 0], 40, 8, waits=True)
    assert found == 264 * (40 + 40) + 264 * (20 + 40)
