"""CaliDrop: evicted tokens go to host memory, and their share of the output is put back.

Su et al., 2025, https://arxiv.org/abs/2507.19906, section 4. Attention over all tokens is a
weighted mean of attention over the kept and over the evicted ones, the weights following from both
log-sum-exps. The evicted part changes little from one query to the next: it is computed for a
query that is held, and reused while later queries point the same way. The cosine between the two
decides. Below theta1 the evicted part is computed anew for the step's query, which is held from
then on, and the output is calibrated. Above theta2 it is calibrated with what is held; in between
it is left alone.

Differences from the paper: the log-sum-exp is kept instead of the sum of exponentials, which
overflows float32 once a logit exceeds 88. Queries are compared as attention uses them, after RoPE.
The paper leaves the granularity open: here each query head of each sequence decides for itself, or
(`granularity=layer`) all heads of a sequence together. A token that is evicted while decoding is
folded into what is held, exactly. A block of several queries (a prompt in blocks, a further turn)
is calibrated exactly, every query by its own evicted part. `calibration_size` sets aside the best
of each cut of a prompt, and everything that is evicted while decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvtool.errors import UsageError
from kvtool.lazy_torch import Tensor, torch
from kvtool.policies.numbers import ALL_HERE, HeadSizes, KVHeads, State
from kvtool.policies.parts import Evicted
from kvtool.policies.spelling import computed

GATHERED = 16
"""Tokens evicted while decoding that gather on the device before they go to the host."""

POSITION = 4
"""Bytes of the position of an evicted token."""


def query_cosine(
    query: Tensor, held: Tensor, granularity: str, heads: KVHeads = ALL_HERE
) -> Tensor:
    """Compute the cosine between a step's queries and those held.

    Args:
        query, held: (batch, heads, head_dim), after RoPE.
        granularity: `head`, or `layer` for one number per sequence, of the heads put end to end.
        heads: all heads of the layer; these may be a part of them.

    Returns:
        (batch, heads) float32.
    """
    query, held = query.float(), held.float()
    if granularity == "layer":
        products = [(a * b).sum((1, 2)) for a, b in ((query, held), (query, query), (held, held))]
        both, own, other = heads.total(torch.stack(products))
        whole = both / (own * other).sqrt().clamp(min=1e-8)
        return whole[:, None].expand(query.shape[:2])
    return torch.nn.functional.cosine_similarity(query, held, dim=-1, eps=1e-8)


def decide(cosine: Tensor, theta1: float, theta2: float) -> tuple[Tensor, Tensor]:
    """Decide which heads recompute the evicted part, and which are calibrated (these included).

    >>> recompute, calibrate = decide(torch.tensor([0.5, 0.7, 0.85, 0.9]), 0.7, 0.85)
    >>> recompute.tolist(), calibrate.tolist()
    ([True, False, False, False], [True, False, False, True])
    """
    recompute = cosine < theta1
    return recompute, recompute | (cosine > theta2)


def calibrate(
    out: Tensor, lse: Tensor, held_out: Tensor, held_lse: Tensor, which: Tensor | None
) -> Tensor:
    """Put the evicted part's share back into the output of some heads.

    Args:
        out: (batch, heads, value_dim) of the kept tokens.
        lse: (batch, heads) float32, their log-sum-exp.
        held_out, held_lse: float32, the same of the evicted ones.
        which: bool (batch, heads); None: all.

    Returns:
        In the dtype of `out`.
    """
    own = torch.sigmoid(lse - held_lse)  # as in `join_attention`
    if which is not None:
        own = own.masked_fill_(~which, 1)
    return torch.lerp(held_out, out.float(), own[..., None]).to(out.dtype)


@dataclass(frozen=True)
class CaliDrop(Evicted):
    """Keep evicted tokens in host memory and calibrate the output by their share (CaliDrop).

    Args:
        theta1: below this cosine with the held query, the evicted part is computed anew.
        theta2: above it, the output is calibrated by what is held.
        calibration_size: tokens set aside of each cut of a prompt, by score; None: all.
        store: how they lie in host memory: `exact`, `bf16`, `int8` (with a scale per token and
            head), or `file`, exact in a temporary file that is mapped.
        granularity: whether each query `head` decides, or all heads of a `layer` together.
    """

    theta1: float = 0.7
    theta2: float = 0.85
    calibration_size: int | None = computed("all", "1 or more")
    store: Literal["exact", "bf16", "int8", "file"] = "exact"
    granularity: Literal["head", "layer"] = "head"

    name: ClassVar = "calidrop"
    paper: ClassVar = "https://arxiv.org/abs/2507.19906"
    works_on_keys: ClassVar = True

    def __post_init__(self) -> None:
        if self.theta1 >= self.theta2:
            raise UsageError(
                f"{self.name}: theta1 {self.theta1} must be below theta2 {self.theta2}"
            )

    def start(
        self, batch: int, heads: int, head_dim: int, value_dim: int, device: torch.device
    ) -> State:
        """Make what is held of each query head before its first query."""
        return {
            "query": torch.zeros(batch, heads, head_dim, dtype=torch.float32, device=device),
            "out": torch.zeros(batch, heads, value_dim, dtype=torch.float32, device=device),
            "lse": torch.full((batch, heads), float("-inf"), dtype=torch.float32, device=device),
            "steps": torch.zeros(batch, heads, dtype=torch.float32, device=device),
            "recomputed": torch.zeros(batch, heads, dtype=torch.float32, device=device),
            "calibrated": torch.zeros(batch, heads, dtype=torch.float32, device=device),
        }

    def held_bytes(self, layer: HeadSizes, evicts: bool) -> int:
        sizes = layer.heads, layer.key_dim, layer.value_dim
        memory = self.start(1, *sizes, torch.device("meta"))
        held = sum(tensor.numel() * tensor.element_size() for tensor in memory.values())
        gathering = GATHERED * layer.kv_heads * (layer.token_bytes + POSITION)
        return held + (gathering if evicts else 0)

    def host_bytes(self, layer: HeadSizes, tokens: int) -> int:
        stays = 0 if self.store == "file" else tokens * layer.kv_heads
        return stays * (layer.token_bytes + POSITION)
