"""DuoAttention: a few heads keep everything, the others only sinks and recent tokens.

Xiao et al., 2024, https://arxiv.org/abs/2410.10819. Which heads retrieve is learned; the trained
scores are an input here (`scores=FILE`). Without them heads are ranked by a measurement of the
model itself, which needs no training and promises less (`scores=proxy`). The authors' code breaks
ties by unseeded noise; here the lower layer and head stays a retrieval head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.documents.files import expand, read_bytes
from kvtool.errors import UsageError
from kvtool.lazy_torch import Tensor, torch
from kvtool.policies.allocate.head_split import HeadSplit
from kvtool.policies.allocate.problem import UNLIMITED, Heads
from kvtool.policies.numbers import AnyCount

PROXY = "proxy"
_SINK, _RECENT = 128, 512  # of streaming heads, where the budget is large enough
_SINK_DIVISOR = 5  # sinks are this part of a budget of 256 tokens and less


def retrieval_ratio(budget: Tensor, context: Tensor) -> Tensor:
    """Return the share of all heads that can keep a whole context, for a mean budget per head.

    As RocketKV's authors do it (https://arxiv.org/abs/2502.14051): up to 640 tokens every head
    streams.

    >>> retrieval_ratio(torch.tensor(4096), torch.tensor(32768)).item()
    0.10756972111553785

    Returns:
        float64, of the shape of the arguments.
    """
    streaming = _SINK + _RECENT
    spare = (budget - streaming).clamp(min=0).double()
    return torch.where(budget >= context, 1.0, spare / (context - streaming).clamp(min=1))


def sink_tokens(budget: AnyCount) -> AnyCount:
    """Return the sinks of a streaming head, 128 or a fifth of a small budget.

    >>> sink_tokens(512), sink_tokens(256)
    (128, 51)
    """
    if isinstance(budget, int):
        return _SINK if budget > 256 else budget // _SINK_DIVISOR
    return torch.where(budget > 256, _SINK, budget // _SINK_DIVISOR)


def rank_heads(scores: Tensor) -> Tensor:
    """Return the place of each head among all, 0 for the one that retrieves most.

    Args:
        scores: (layers, kv_heads), higher = retrieves more; ties go to the lower layer and head.

    Returns:
        (layers, kv_heads) int64.
    """
    order = scores.flatten().argsort(descending=True, stable=True)
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel())).view_as(scores)


def read_scores(path: str, shape: tuple[int, int]) -> Tensor:
    """Read head scores: a line of numbers per layer, separated by tabs or spaces.

    Args:
        shape: layers and KV heads of the model.

    Raises:
        UsageError: no such file, something that is no number, or another shape.
    """
    try:
        data = read_bytes(expand(path), f"`{path}`", kind="table of head scores")
        lines = [line.split() for line in data.decode("utf-8").splitlines()]
        rows = [[float(number) for number in line] for line in lines if line]
    except UsageError:
        raise
    except OSError:
        raise UsageError(f"cannot read head scores from `{path}`") from None
    except ValueError as error:
        raise UsageError(f"`{path}` holds no table of head scores: {error}") from None
    found = (len(rows), len(rows[0]) if rows else 0)
    if found != shape or any(len(row) != shape[1] for row in rows):
        raise UsageError(
            f"`{path}` has head scores for {found[0]} layers of {found[1]} KV heads; "
            f"this model has {shape[0]} of {shape[1]}"
        )
    scores = torch.tensor(rows, dtype=torch.float64)
    if not scores.isfinite().all():
        raise UsageError(f"`{path}` holds head scores that are not finite")
    return scores


def reach_of_heads(query: Tensor, key: Tensor, scale: float, distances: int) -> Tensor:
    """Measure how far back heads look by themselves, whatever the text says.

    The mean logit at each distance gives a softmax over distances. Its cumulative sum from the
    farthest distance on, averaged, is 1 for a head that looks at the farthest token and near 0 for
    one that looks at the newest.

    Args:
        query: (batch, heads, n, head_dim) after RoPE, of any text.
        key: (batch, kv_heads, n, head_dim) after RoPE.
        distances: how many distances, below n.

    Returns:
        (kv_heads,) float32, the mean over the query heads of a group.
    """
    kv_heads, n = key.shape[1], key.shape[2]
    grouped = query.unflatten(1, (kv_heads, -1))[:, :, :, distances - 1 :].float()
    logits = []
    for distance in reversed(range(distances)):
        keys = key[:, :, None, distances - 1 - distance : n - distance].float()
        logits.append((grouped * keys).sum(-1).mean((0, 3)))
    weights = torch.nn.functional.softmax(torch.stack(logits, -1) * scale, -1)
    return weights.cumsum(-1).mean(-1).mean(-1)


@dataclass(frozen=True)
class Duo(HeadSplit):
    """A few heads of the model keep everything, the others sinks and recent tokens (DuoAttention).

    Args:
        scores: file of a score per head, a line per layer; `proxy` measures how far back each head
            looks in a random text.
    """

    scores: str = PROXY

    name: ClassVar = "duo"
    paper: ClassVar = "https://arxiv.org/abs/2410.10819"
    whole_prompt: ClassVar = False

    def forecast(
        self, budget: int, prompt: int, kv_heads: int, place: tuple[int, int]
    ) -> list[int]:
        layer, layers = place
        share = retrieval_ratio(torch.tensor(budget), torch.tensor(prompt)).item()
        whole = int(share * kv_heads * layers + 1e-9) - layer * kv_heads
        whole = min(max(whole, 0), kv_heads)
        return [UNLIMITED] * whole + [min(budget, _SINK + _RECENT)] * (kv_heads - whole)

    def tokens(self, heads: Heads) -> Tensor:
        if heads.rank is None:
            raise ValueError("heads must be ranked before a budget is split by their ranks")
        batch, kv_heads = heads.positions.shape[:2]
        device = heads.positions.device
        budget = torch.as_tensor(heads.budget, device=device).expand(batch, 1, 1)[..., 0]
        seen = torch.as_tensor(heads.tokens_seen, device=device).expand(batch, 1, 1)[..., 0]
        # a share this close below a whole number of heads is that number
        whole = (retrieval_ratio(budget, seen) * heads.of + 1e-9).floor()
        streaming = budget.clamp(max=_SINK + _RECENT).expand(batch, kv_heads)
        split = torch.where(heads.rank < whole, UNLIMITED, streaming)
        return torch.where(seen <= budget, budget, split)
