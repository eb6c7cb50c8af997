"""Reading policy strings: what the case of letters means."""

import time
from dataclasses import dataclass

import pytest
import torch

import kvtool
from kvtool.errors import UsageError
from kvtool.generation import prefill
from kvtool.policies.grammar import parse_policy
from kvtool.policies.scores.random import Random, seed_offset
from kvtool.policies.spelling import read_settings
from tests.models_for_tests import peaky_model, random_ids


@dataclass(frozen=True)
class Reader:
    basis: str
    rank: int | None = 3


def test_a_message_keeps_its_own_words_between_two_quotations():
    words = "policies " * 40
    assert str(UsageError(f"no `h3o`; {words}`h2o`?")) == f"no `h3o`; {words}`h2o`?"
    assert str(UsageError(f"no `{'x' * 300}`; {words}")) == f"no `{'x' * 200}...`; {words}"


def test_names_keys_and_choices_may_be_written_in_any_case():
    assert str(parse_policy("H2O( Recent = 8 )+CAOTE")) == "h2o(recent=8)+caote"
    assert str(parse_policy("SnapKV(Pool=AVG)")) == "snapkv(pool=avg)"
    assert str(parse_policy("RoCo(scope=None,SINKS=1)")) == "roco(sinks=1)"


def test_a_path_keeps_its_case():
    given = read_settings("reader", Reader, "Basis=/tmp/My Model.PT, RANK=None")
    assert given == {"basis": "/tmp/My Model.PT", "rank": None}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"random(seed={2**63})", "random: seed must be at most 9223372036854775807"),
        (f"cam(m={2**64})", "`cam`"),
        (f"h2o+cam(m={2**64})", "cam: m must be at most 2147483647"),
        (f"d2o(sinks={10**29})", "d2o: sinks must be at most 2147483647"),
        ("pyramidkv(beta=1e999)", "beta must be a finite number, got inf"),
        ("pyramidkv(beta=nan)", "beta must be a number, got `nan`"),
        ("h2o(recent=1_000)", "recent must be a whole number, got `1_000`"),
        ("h2o(recent=" + "9" * 5000 + ")", "recent must be a whole number, got `999"),
    ],
)
def test_numbers_that_no_cache_can_count_to_are_refused(text, told):
    with pytest.raises(UsageError) as refused:
        parse_policy(text)
    assert told in str(refused.value)
    assert len(str(refused.value)) < 600


def test_numbers_given_in_python_are_refused_as_well():
    with pytest.raises(UsageError, match="random: recent must be at most"):
        kvtool.policies.policy.Policy(Random(recent=2**40))


def test_large_seeds_draw_each_their_own():
    model, ids = kvtool.attach(peaky_model("llama")), random_ids(60)
    kept = []
    for seed in (0, 2**23 - 1, 2**24, 2**63 - 1):
        for policy in (f"random(seed={seed})", f"h2o+cam(seed={seed})"):
            cache = kvtool.build_cache(model, policy, 12)
            prefill(model, cache, ids)
            assert cache.report().kept_per_layer == [12, 12]
            if policy.startswith("random"):
                kept.append(tuple(cache.kept_positions(0).flatten().tolist()))
    assert len(set(kept)) == 4
    assert seed_offset(5) == 5 << 40, "what smaller seeds draw stays as it was"


def test_a_policy_with_many_sinks_finds_its_least_budget_at_once():
    assert parse_policy("streaming(sinks=2000000000)").min_budget == 2_000_000_001
    assert parse_policy("h2o").min_budget == 1


def test_a_kernel_wider_than_the_text_is_one_as_wide_as_it():
    model, ids = kvtool.attach(peaky_model("llama")), random_ids(60)
    kept = []
    for kernel in (119, 2**31 - 1):
        cache = kvtool.build_cache(model, f"snapkv(window=4,kernel={kernel})", 16)
        prefill(model, cache, ids)
        kept.append(cache.kept_positions(1))
    assert torch.equal(*kept)


@pytest.mark.parametrize(
    "text",
    [
        "x" * 10**6,
        "h2o" + "+caote" * 160_000,
        "h2o(" + "recent=8," * 110_000 + ")",
        "a.b" * 300_000 + ":X",
        "h2o(recent=" + "9" * 19_000 + ")",
        "h2o" + "(" * 19_000,
        "h2o" + "+caote" * 3000,
    ],
    ids=lambda text: f"{text[:9]} {len(text)}",
)
def test_a_policy_of_any_length_is_refused_at_once(text):
    start = time.process_time()
    with pytest.raises(UsageError) as caught:
        parse_policy(text)
    assert time.process_time() - start < 2
    assert len(str(caught.value)) < 2000
