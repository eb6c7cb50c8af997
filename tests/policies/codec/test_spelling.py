"""Codecs in policy strings: one to a policy, on what stores keys and values and leaves them be."""

import pytest

from kvtool import UsageError
from kvtool.policies.codec.fp8 import FP8
from kvtool.policies.codec.int4 import Int4
from kvtool.policies.codec.int8 import Int8
from kvtool.policies.codec.mixed import K8V4, Int
from kvtool.policies.grammar import parse_policy


@pytest.mark.parametrize(
    ("text", "codec", "spelled"),
    [
        ("FULL+INT8", Int8(), "full+int8"),
        ("h2o+fp8+caote", FP8(), "h2o+caote+fp8"),
        ("snapkv+int4( rotate = FALSE )+ada", Int4(rotate=False), "snapkv+ada+int4(rotate=false)"),
        ("adakv+int4(rotate=true)+calidrop", Int4(), "adakv+calidrop+int4"),
        ("full+k8v4", K8V4(), "full+k8v4"),
        ("h2o+int", K8V4(), "h2o+k8v4"),
        ("h2o+int(keys=8,values=4)", K8V4(), "h2o+k8v4"),
        ("h2o+int(rotate=false)", K8V4(rotate=False), "h2o+k8v4(rotate=false)"),
        ("h2o+INT(Keys=4, Values=8)", Int(4, 8), "h2o+int(keys=4,values=8)"),
        ("h2o+int(keys=8,values=8)", Int8(), "h2o+int8"),
        ("h2o+int(keys=4,values=4)", Int4(), "h2o+int4"),
        ("h2o+int(keys=4,rotate=false)", Int4(rotate=False), "h2o+int4(rotate=false)"),
    ],
)
def test_strings(text, codec, spelled):
    policy = parse_policy(text)
    assert policy.codec == codec
    assert str(policy) == spelled
    assert parse_policy(spelled) == policy


@pytest.mark.parametrize("codec", ["int8", "fp8", "int4", "k8v4"])
@pytest.mark.parametrize(
    ("base", "reason", "hint"),
    [
        ("quest", "`quest` chooses tokens by tables of keys as they are", "full+CODEC"),
        ("rocketkv", "`rocketkv` chooses tokens by tables of keys", "snapkv+CODEC"),
        ("d2o", "`d2o` changes kept slots again and again", "d2o(merge=none)+CODEC"),
        ("h2o+d2o-merge", "`d2o-merge` changes kept slots", "h2o+CODEC"),
        ("tova+cam", "`cam` changes kept slots", "tova+CODEC"),
        ("h2o+CODEC", "modifier `CODEC` is given twice", ""),
    ],
)
def test_what_is_refused(base, reason, hint, codec):
    with pytest.raises(UsageError) as told:
        parse_policy(f"{base}+CODEC".replace("CODEC", codec))
    assert reason.replace("CODEC", codec) in str(told.value)
    assert hint.replace("CODEC", codec) in (told.value.hint or "")


@pytest.mark.parametrize("bits", [3, 0, 16])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_bits_that_there_are_none_of(side, bits):
    with pytest.raises(UsageError, match=f"int: {side} must be 4 or 8, got {bits}"):
        parse_policy(f"h2o+int({side}={bits})")


def test_two_codecs_exclude_each_other():
    with pytest.raises(UsageError, match="modifiers `int8` and `fp8` exclude each other"):
        parse_policy("h2o+int8+fp8")


@pytest.mark.parametrize("dim", [16, 80, 100])
def test_heads_that_4_bits_cannot_share_scales_among(dim):
    with pytest.raises(UsageError, match=f"32 channels, and a head of this model has {dim}"):
        Int4().check_dim(dim)
    Int8().check_dim(dim)
    assert Int8().vector_bytes(dim) == dim + 2


@pytest.mark.parametrize(("codec", "nbytes"), [(Int8(), 130), (FP8(), 130), (Int4(), 72)])
def test_bytes_of_a_key(codec, nbytes):
    assert codec.vector_bytes(128) == nbytes
