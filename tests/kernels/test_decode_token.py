"""A decoded token as one operator: written, attended, counted, and the next slot chosen."""

from dataclasses import replace

import pytest
import torch

from kvtool.kernels import reference
from kvtool.maths.columns import COLUMNS
from tests.kernels.drawn import DEVICE, TOLERANCE, Drawn, Sizes

pytest.importorskip("triton")

from kvtool.kernels.decode_token import decode_token

PLAIN = {"score": "", "rescore": "", "recent": 0, "first": 0, "budget": 0}


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

    def run(self, function, in_full=False, weights=False, seen=None, budgets=None, **choice):
        """What comes of it, by name; the operator or its reference works on copies."""
        mutated = [*self.buffers, self.positions, self.slot, *self.sums]
        mutated = [None if each is None else each.clone() for each in mutated]
        fixed = [self.query, *self.new]
        if in_full:
            mutated[:2] = [each.double() for each in mutated[:2]]
            fixed = [each.double() for each in fixed]
        query, *new = fixed
        out, found = function(
            query,
            *mutated,
            *new,
            self.place,
            self.sinks,
            seen,
            budgets,
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
    expected = token.run(reference.decode_token, in_full=True, weights=weights, **choice)
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
