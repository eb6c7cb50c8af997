"""A decoded token as one operator: written, attended, counted, and the next slot chosen."""

from dataclasses import replace

import pytest
import torch

from kvtool.kernels import reference
from kvtool.maths.columns import COLUMNS
from kvtool.maths.selection import lowest
from tests.kernels.drawn import DEVICE, TOLERANCE, Drawn, Sizes

pytest.importorskip("triton")

from kvtool.kernels.decode_token import decode_token

PLAIN = {"score": "", "by_values": False, "limits": []}


def plain_token(
    query,
    buffers,
    columns,
    new,
    sinks,
    seen,
    *,
    names,
    used,
    masked,
    appends,
    score,
    by_values,
    limits,
    **how,
):
    """What the operator does, in plain torch."""
    *slots, slot = buffers
    at, place = slot[..., None], new[2]
    for buffer, own in zip(slots, new[:2], strict=False):
        buffer.scatter_(2, at[..., None].expand_as(own), own)
    slots[2].scatter_(2, at, place.to(torch.int32)[:, None, None].expand_as(at))
    for total in columns:
        total.scatter_(2, at, 0.0)
    key, value, positions = (tensor[:, :, :used] for tensor in slots)
    sums = {n: each[:, :, :used] for n, each in zip(names.split(), columns, strict=True)}
    held, valid = positions if masked or appends else None, place if masked else None
    found = reference.attend_slots(query, key, value, held, sums, sinks=sinks, place=valid, **how)
    if appends:
        slot += 1
    elif score and seen is not None:
        (recent, first, budget), numbers = limits, sums.get(score, positions).float()
        numbers = output_change(numbers, value, positions) if by_values else numbers
        protected = (positions >= seen[:, None, None] - recent) | (positions < first)
        over, empty = (positions >= 0).sum(-1, keepdim=True) > budget, positions < 0
        if masked:
            numbers = numbers.masked_fill(empty & ~over, float("-inf"))
            protected = (protected | empty) & over
        slot.copy_(lowest(numbers, positions, protected))
    return found


def output_change(scores, value, positions):
    """How far the output moves without each slot, by shares of the scores."""
    stored = positions >= 0
    scores = scores.masked_fill(~stored, 0)
    total = scores.sum(-1, keepdim=True)
    share = torch.where(total > 0, scores / total, stored / stored.sum(-1, keepdim=True))
    mean = share.unsqueeze(2) @ value.float()
    change = share / (1 - share) * (value.float() - mean).norm(dim=-1)
    return change.masked_fill(1 - share < 1e-6, float("inf"))


class Token:
    """Arguments of the operator: buffers wider than what is in use, and one new token."""

    def __init__(self, size: Sizes, names=COLUMNS, *, appends=False, padded=False, ties=False):
        drawn = Drawn(replace(size, new=1, ragged=False))
        batch, heads, total = size.batch, size.cached, size.kept + 1
        generator = torch.Generator().manual_seed(size.seed)
        self.size, self.used, self.appends, self.padded = size, total, appends, padded
        self.buffers = []
        for dim in (size.head_dim, size.value_dim):
            drawn_buffer = torch.randn(batch, heads, total + 3, dim, generator=generator)
            self.buffers.append(drawn_buffer.to(DEVICE, size.dtype))
        order = torch.rand(batch, heads, total, generator=generator).argsort(-1)
        positions = torch.cat([order, torch.full((batch, heads, 3), -1)], -1)
        slot = torch.randint(total, (batch, heads), generator=generator)
        if appends:
            slot.fill_(total // 2)
            positions[..., total // 2 :] = -1
        self.place = torch.full((batch if padded else 1,), total)
        if padded:
            positions[-1, :, ::5] = -1
            self.place[-1] = -1
        sums = torch.rand(4, batch, heads, total + 3, generator=generator)
        if ties:
            sums = (sums * 2).round()
            self.buffers[0].zero_()  # every slot gets as much
        self.positions = positions.to(DEVICE, torch.int32)
        self.slot, self.place = slot.to(DEVICE), self.place.to(DEVICE)
        self.sums = [
            each.to(DEVICE) if name in names else None
            for name, each in zip(COLUMNS, sums, strict=True)
        ]
        new = [
            torch.randn(batch, 1, heads, each.shape[-1], generator=generator).transpose(1, 2)
            for each in self.buffers
        ]
        self.new = [each.to(DEVICE, size.dtype) for each in new]
        if ties:
            self.new[0].zero_()
        self.query, self.sinks = drawn.query, drawn.sinks
        self.how = {"scale": size.head_dim**-0.5, "softcap": size.softcap}

    def run(self, function, in_full=False, weights=False, seen=None, **choice):
        """What comes of it, by name; the operator or its reference works on copies."""
        mutated = [*self.buffers, self.positions, self.slot, *self.sums]
        mutated = [None if each is None else each.clone() for each in mutated]
        fixed = [self.query, *self.new]
        if in_full:
            mutated[:2] = [each.double() for each in mutated[:2]]
            fixed = [each.double() for each in fixed]
        query, *new = fixed
        kept = dict(zip(COLUMNS, mutated[4:], strict=True))
        kept = {name: each for name, each in kept.items() if each is not None}
        out, found = function(
            query,
            mutated[:4],
            [*kept.values()],
            [*new, self.place],
            self.sinks,
            seen,
            names=" ".join(kept),
            used=self.used,
            masked=self.padded,
            weights=weights,
            appends=self.appends,
            **self.how,
            **(PLAIN | choice),
        )
        names = ("key", "value", "positions", "slot", *COLUMNS)
        results = dict(zip(names, mutated, strict=True)) | {"out": out, "weights": found}
        return {name: each for name, each in results.items() if each is not None}


def compare(token: Token, weights=True, **choice):
    tolerance = TOLERANCE[token.size.dtype]
    found = token.run(decode_token, weights=weights, **choice)
    expected = token.run(plain_token, in_full=True, weights=weights, **choice)
    for name, each in expected.items():
        torch.testing.assert_close(
            found[name].double(), each.double(), atol=tolerance, rtol=tolerance, msg=name
        )
    return found


def sizes(**changes):
    size = Sizes(2, 2, 2, 8, 149, 1, 24, 16, torch.float32, False, None, None, False, seed=3)
    return replace(size, **changes)


WHAT = [{}, {"softcap": 3.0, "sinks": True}]


@pytest.mark.few(2)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 7, 8])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("what", WHAT, ids=["plain", "cap-sinks"])
def test_every_size(dim, group, dtype, what):
    size = sizes(cached=1, shown=1, heads=group, head_dim=dim, value_dim=dim, dtype=dtype, **what)
    compare(Token(size))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("appends", [False, True])
def test_a_token_is_written_where_it_belongs(appends, padded):
    token = Token(sizes(), appends=appends, padded=padded)
    found = compare(token)
    at = token.slot[..., None]
    for name, new in zip(("key", "value"), token.new, strict=True):
        index = at[..., None].expand(*at.shape, new.shape[-1])
        assert torch.equal(found[name].gather(2, index), new)
    assert torch.equal(found["slot"], token.slot + appends)


def test_nothing_is_counted_for_a_policy_that_counts_nothing():
    found = compare(Token(sizes(), names=(), appends=True), weights=False)
    assert not found.keys() & set(COLUMNS)
    assert found["weights"].numel() == 0


CHOICES = [("attention_sum", False), ("above_average", False), ("position", False)]
CHOICES += [("attention_sum", True)]


@pytest.mark.few(5)
@pytest.mark.parametrize("kept", [149, 1300])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("score", "by_values"), CHOICES)
def test_the_next_slot_is_the_one_of_least_score(score, by_values, dtype, padded, ties, kept):
    """Ties go to the highest position, and rows below their budget take an empty slot."""
    names = () if score == "position" else COLUMNS
    token = Token(sizes(kept=kept, dtype=dtype), names, padded=padded, ties=ties)
    seen = token.place + 1
    if padded:
        seen[-1] = token.used
    limits = [token.used // 2, 4, token.used - 1]
    options = {"weights": False, "seen": seen, "score": score, "by_values": by_values}
    found = compare(token, **options, limits=limits)
    if padded:
        taken = found["positions"].gather(2, found["slot"][..., None])
        assert (taken[-1] == -1).all()


def test_a_slot_that_holds_all_the_weight_stays():
    """Where it is the only one with a score, what leaves is the newest of the others."""
    token = Token(sizes())
    token.sums[0].zero_()
    token.buffers[0].zero_()
    token.new[0].copy_(token.query[:, ::4] * 100)
    choice = {"score": "attention_sum", "by_values": True, "limits": [0, 0, token.used - 1]}
    found = compare(token, weights=False, seen=token.place + 1, **choice)
    assert not torch.equal(found["slot"], token.slot)
