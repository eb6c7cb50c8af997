"""Codes of an entry of a padded batch are those of the entry alone, but for ties."""

from __future__ import annotations

import pytest
import torch

import kvtool
from kvtool.generation import decode_step, prefill
from kvtool.maths.quantise import from_int8, int8_codes
from tests.coded import TIE_LOGITS, codes_of, moved
from tests.models_for_tests import peaky_model, random_ids

LENGTHS, STEPS = (60, 37, 11), 12
BOUNDS = {torch.float32: (1, 1, 1e-4), torch.bfloat16: (2, 8, 0.02)}
"""By how many steps a code and a scale may differ, and which share of all."""


@pytest.mark.parametrize(
    ("dtype", "steps", "share"), [(torch.float32, 1, 1e-4), (torch.bfloat16, 2, 0.3)]
)
def test_numbers_that_differ_in_their_last_bits_get_neighbouring_codes(dtype, steps, share):
    """What is decoded differs by one scale more than the numbers do; bfloat16 has many ties."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(20_000, 32, generator=generator).to(dtype)
    aims = torch.randn(20_000, 32, generator=generator).sign() * 100
    others = torch.nextafter(numbers, aims.to(dtype))
    (codes, scales), (other_codes, other_scales) = int8_codes(numbers), int8_codes(others)
    apart = (codes.int() - other_codes.int()).abs()
    assert int(apart.max()) == steps
    assert 0 < float((apart > 0).float().mean()) < share
    decoded = (from_int8(codes, scales) - from_int8(other_codes, other_scales)).abs()
    given = (numbers.float() - others.float()).abs()
    assert bool((decoded <= given + 1.001 * torch.maximum(scales, other_scales).float()).all())


def padded() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    rows = [random_ids(length, seed=length) for length in LENGTHS]
    ids = torch.zeros(len(rows), max(LENGTHS), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, -row.shape[1] :], mask[i, -row.shape[1] :] = row[0], 1
    return ids, mask, rows


def run(model, policy, mode, ids, mask, fed):
    """Feed a prompt and these tokens behind it; return the cache and all logits."""
    cache = kvtool.build_cache(model, policy, 20 if policy != "full+int8" else None, prefill=mode)
    logits = [prefill(model, cache, ids, attention_mask=mask, new_tokens=STEPS)]
    logits += [decode_step(model, cache, column) for column in fed.T]
    return cache, torch.stack(logits, 1).float()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("dtype", "policy", "mode"),
    [
        (torch.bfloat16, "h2o+int8", "block:16"),
        (torch.float32, "full+int8", "full"),
        (torch.float32, "h2o+int8", "block:16"),
    ],
)
def test_codes_of_a_padded_entry_are_those_of_the_entry_alone_but_for_ties(dtype, policy, mode):
    model = kvtool.attach(peaky_model("llama").to(dtype))
    ids, mask, rows = padded()
    fed = random_ids(STEPS, seed=5, batch=len(rows))
    both, logits = run(model, policy, mode, ids, mask, fed)
    steps, scale_steps, share = BOUNDS[dtype]
    of_all = of_them = 0
    for i, row in enumerate(rows):
        alone, expected = run(model, policy, mode, row, None, fed[i : i + 1])
        compared, differ, *farthest = moved(codes_of(both, i), codes_of(alone, 0))
        assert compared > 1000
        of_all, of_them = of_all + compared, of_them + differ
        assert farthest[0] <= steps
        assert farthest[1] <= scale_steps
        exact = (differ == 0) and dtype is torch.float32
        bound = 1e-4 if exact else TIE_LOGITS if dtype is torch.float32 else 0.15
        assert float((logits[i] - expected[0]).abs().max()) < bound
    assert of_them <= share * of_all
