"""Random arguments of the kernels: sizes that are multiples of nothing, gaps, padding, sinks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from kvtool.maths.columns import COLUMNS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Sizes:
    """What a test draws. `cached` heads are stored, and `shown` to the attention (MLA: more)."""

    batch: int
    cached: int
    shown: int
    heads: int
    kept: int
    new: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    ragged: bool
    window: int | None
    softcap: float | None
    sinks: bool
    seed: int


@st.composite
def sizes(draw, most_new=70, most_kept=90):
    cached = draw(st.integers(1, 3))
    shown = cached * draw(st.sampled_from([1, 1, 2]))
    ragged = draw(st.booleans())
    return Sizes(
        batch=draw(st.integers(1, 2)),
        cached=cached,
        shown=shown,
        heads=shown * draw(st.integers(1, 8)),
        kept=draw(st.integers(0, most_kept)),
        new=draw(st.integers(1, most_new)),
        head_dim=draw(st.sampled_from([8, 16, 24, 40])),
        value_dim=draw(st.sampled_from([8, 16, 24, 40])),
        dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16])),
        ragged=ragged,
        window=draw(st.sampled_from([None, None, 5, 40])),
        softcap=draw(st.sampled_from([None, None, 3.0])),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


class Drawn:
    """Tensors of these sizes, on the device at hand; buffers are wider than what is in use."""

    def __init__(self, size: Sizes) -> None:
        self.size = size
        self._generator = torch.Generator().manual_seed(size.seed)
        total = size.kept + size.new
        self.query = self._normal(size.batch, size.new, size.heads, size.head_dim).transpose(1, 2)
        self.key = self._normal(size.batch, size.shown, total + 3, size.head_dim)[:, :, :total]
        self.value = self._normal(size.batch, size.shown, total + 3, size.value_dim)[:, :, :total]
        self.new, self.stored = self._positions()
        sinks = self._normal(size.batch, size.heads)
        self.sinks = sinks if size.sinks else None

    def _normal(self, *shape: int) -> torch.Tensor:
        # heavy tails: a few keys get most of the attention
        drawn = torch.randn(shape, generator=self._generator) * 1.5
        return drawn.to(DEVICE, self.size.dtype)

    def _positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the new tokens and of all slots; in ragged rows some are padding or empty."""
        size = self.size
        if not size.ragged:
            order = torch.arange(size.kept + size.new, device=DEVICE)
            return order[size.kept :].expand(size.batch, -1), order.expand(size.batch, 1, -1)
        padded = torch.rand(size.batch, size.new, generator=self._generator) < 0.2
        padded[:, -1] = False
        new = (2 * size.kept + (~padded).cumsum(1)).masked_fill(padded, -1)
        kept = torch.rand(size.batch, size.cached, 2 * size.kept, generator=self._generator)
        kept = kept.argsort(-1)[..., : size.kept]
        empty = torch.rand(kept.shape, generator=self._generator) < 0.2
        kept = kept.masked_fill(empty, -1)
        stored = torch.cat([kept, new[:, None].expand(-1, size.cached, -1)], 2).to(torch.int32)
        return new.to(DEVICE), stored.to(DEVICE)

    def sums(self, names, heads: int) -> dict[str, torch.Tensor]:
        """Numbers beside the slots, not zero, in wider buffers."""
        total = self.size.kept + self.size.new
        start = torch.rand(
            len(COLUMNS), self.size.batch, heads, total + 2, generator=self._generator
        )
        places = map(COLUMNS.index, names)
        return {
            name: start[i].to(DEVICE)[..., :total] for name, i in zip(names, places, strict=True)
        }


def copied(sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: total.clone() for name, total in sums.items()}
