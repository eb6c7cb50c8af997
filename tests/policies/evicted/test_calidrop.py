"""CaliDrop's arithmetic: worked examples and refusals."""

import math

import pytest
import torch

from kvtool import parse_policy
from kvtool.errors import UsageError
from kvtool.maths.attention import attention_weights_lse, join_attention, weighted_values
from kvtool.policies.evicted.calidrop import calibrate, decide, query_cosine

KEYS = torch.tensor([[1.0, 0], [0, 1], [1, 1], [-1, 0]])
VALUES = torch.tensor([[1.0, 0], [0, 1], [2, 2], [4, 0]])
KEPT, EVICTED = [0, 2], [1, 3]


def attend(query, tokens):
    """Output (2,) and log-sum-exp of one query over some tokens."""
    query = torch.tensor(query)[None, None, None, None]
    keys, values = KEYS[tokens][None, None], VALUES[tokens][None, None]
    weights, lse = attention_weights_lse(query, keys, scale=2**-0.5)
    return weighted_values(weights, values)[0, 0, 0], lse[0, 0, 0, 0]


def test_worked_evicted_part():
    out, lse = attend([1.0, 1.0], EVICTED)
    torch.testing.assert_close(out, torch.tensor([0.782281, 0.804430]), atol=1e-6, rtol=0)
    assert lse.item() == pytest.approx(0.924729, abs=1e-6)
    assert math.exp(lse) == pytest.approx(2.521184, abs=1e-5)


@pytest.mark.parametrize(
    ("query", "kept_only", "share", "calibrated", "full"),
    [
        ([1.0, 1.0], [1.669762, 1.339523], 0.708956, [1.411466, 1.183787], [1.411466, 1.183787]),
        ([1.0, 0.8], [1.637767, 1.275534], 0.689514, [1.372150, 1.129262], [1.418886, 1.133665]),
    ],
)
def test_worked_calibration(query, kept_only, share, calibrated, full):
    held = attend([1.0, 1.0], EVICTED)
    out, lse = attend(query, KEPT)
    torch.testing.assert_close(out, torch.tensor(kept_only), atol=1e-6, rtol=0)
    assert torch.sigmoid(lse - held[1]).item() == pytest.approx(share, abs=1e-6)
    both = calibrate(out[None, None], lse[None, None], held[0], held[1], torch.tensor([[True]]))
    torch.testing.assert_close(both[0, 0], torch.tensor(calibrated), atol=1e-6, rtol=0)
    whole, _ = attend(query, [0, 1, 2, 3])
    torch.testing.assert_close(whole, torch.tensor(full), atol=1e-6, rtol=0)
    left = calibrate(out[None, None], lse[None, None], held[0], held[1], torch.tensor([[False]]))
    assert torch.equal(left[0, 0], out)


def test_worked_recomputation():
    query = torch.tensor([[[1.0, -0.1]]])
    cosine = query_cosine(query, torch.tensor([[[1.0, 1.0]]]), "head")
    assert cosine.item() == pytest.approx(0.633238, abs=1e-6)
    assert decide(cosine, 0.7, 0.85)[0].item()
    whole, _ = join_attention(*attend([1.0, -0.1], KEPT), *attend([1.0, -0.1], EVICTED))
    torch.testing.assert_close(whole, torch.tensor([1.456172, 0.881794]), atol=1e-6, rtol=0)
    torch.testing.assert_close(whole, attend([1.0, -0.1], [0, 1, 2, 3])[0])


def test_thresholds_are_strict():
    cosine = torch.tensor([0.7, 0.85], dtype=torch.float64)
    recompute, calibrated = decide(cosine, 0.7, 0.85)
    assert not recompute.any()
    assert not calibrated.any()


def test_a_layer_decides_by_its_heads_together():
    query, held = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    together = query_cosine(query, held, "layer")
    for row in range(2):
        expected = torch.cosine_similarity(query[row].flatten(), held[row].flatten(), dim=0)
        torch.testing.assert_close(together[row], expected.expand(3))


def test_nothing_overflows_and_empty_sets_have_no_part():
    one, other = torch.tensor([1.0]), torch.tensor([3.0])
    whole, lse = join_attention(one, torch.tensor(500.0), other, torch.tensor(500.0))
    assert whole.item() == 2
    assert lse.item() == pytest.approx(500 + math.log(2))
    nothing = torch.tensor(-math.inf)
    assert join_attention(one, torch.tensor(2.0), other, nothing)[0].item() == 1
    assert join_attention(one, nothing, other, torch.tensor(2.0))[0].item() == 3
    whole, lse = join_attention(one, nothing, other, nothing)
    assert (whole.item(), lse.item()) == (1, -math.inf)


def test_a_row_that_sees_nothing_has_weights_of_zero():
    query, keys = torch.randn(1, 1, 1, 2, 4), torch.randn(1, 1, 3, 4)
    visible = torch.tensor([[True, False, True], [False] * 3])
    weights, lse = attention_weights_lse(query, keys, scale=1.0, visible=visible)
    assert weights[0, 0, 0, 1].tolist() == [0, 0, 0]
    assert lse[0, 0, 0, 1].item() == -math.inf
    assert weights[0, 0, 0, 0].sum().item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("snapkv+calidrop(theta1=0.9)", "theta1 0.9 must be below theta2 0.85"),
        ("snapkv+calidrop(theta2=inf)", "theta2 must be a number, got `inf`"),
        ("snapkv+calidrop(calibration_size=0)", "calibration_size must be 1 or more, got 0"),
        ("snapkv+calidrop(store=int4)", "store must be one of exact, bf16, int8, file"),
        ("full+calidrop", "`calidrop` makes something of evicted tokens, and `full` evicts none"),
        ("h2o+cam+calidrop", "modifiers `cam` and `calidrop` exclude each other"),
        ("d2o+calidrop", "which excludes `calidrop`"),
        ("h2o+ada+calidrop", "`calidrop` cannot follow heads of unequal counts"),
    ],
)
def test_what_makes_no_sense_is_refused(text, told):
    with pytest.raises(UsageError, match=told):
        parse_policy(text)
