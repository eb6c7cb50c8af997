"""Expected Attention: the attention that queries to come are expected to give each token.

Devoto et al., 2025, https://arxiv.org/abs/2510.00636. Queries before RoPE are taken as normally
distributed, with the mean m and the covariance C of the text so far. Rotated by the mean rotation R
of the next `future` positions, they have mean R m and covariance R C R^T, and exp(q.k * scale) has
the expectation exp(l) with

    l = (R m).k * scale + k^T (R C R^T) k * scale^2 / 2

for each query head. Its softmax over the slots is the attention that they are expected to get. With
`a` for the mean of that over the group, a slot's score is (a + epsilon) |v|. `epsilon` lets the
length of the value decide among the many slots whose attention is close to 0.

`epsilon` is that of kvpress' board, whose entry is AdaKV over Expected Attention (`expected+ada`);
its class has 0. On SmolLM2-135M, the question unknown, 0 loses every code that 0.01 finds.

Differences from the paper: `scale` is the layer's own, 1 / sqrt(head_dim) in most models. A cap on
the logits and sink logits are left out. In a prompt run in blocks, and in later turns, moments are
those of all prompt tokens read so far, evicted ones included. Queries of answers do not count.
A prompt is cut by its exact moments. For later turns the covariance is held as variances in float32
and correlations rounded to multiples of 1/127 (`kvtool.maths.statistics`), a seventh of the bytes.
A turn that is far shorter than the text before it may leave correlations as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvtool.lazy_torch import Tensor, torch
from kvtool.policies.evidence import AttentionRows, MomentsAsked, QueryMoments
from kvtool.policies.numbers import Count, State
from kvtool.policies.parts import Evidence, Score, SlotView
from kvtool.policies.scores.shared import moments_of_layers
from kvtool.policies.spelling import limited

_SLOTS = 1024  # keys that are multiplied by a covariance at a time


def expected_logits(keys: Tensor, queries: QueryMoments) -> Tensor:
    """Compute the logarithm of the expectation of exp(q.k * scale) over normal queries q.

    Args:
        keys: (batch, kv_heads, slots, head_dim).
        queries: of all heads, as they will be rotated.

    Returns:
        (batch, kv_heads, group, slots) float32.
    """
    heads, scale = keys.shape[1], queries.scale
    mean = queries.mean.unflatten(1, (heads, -1))
    covariance = queries.covariance
    if covariance is not None:
        covariance = covariance.unflatten(1, (heads, -1))
    parts = []
    for part in keys.split(_SLOTS, 2):
        states = part.float()[:, :, None]
        logits = (states @ mean[..., None])[..., 0] * scale
        if covariance is not None:
            logits = logits + (states @ covariance * states).sum(-1) * (scale**2 / 2)
        parts.append(logits)
    return torch.cat(parts, -1)


@dataclass(frozen=True)
class Expected(Score):
    """Keep the prompt tokens to which later queries are expected to attend; then append.

    Args:
        sinks: first tokens that are always kept, whose own queries count for nothing.
        future: positions, from the end of the text on, at which queries are expected.
        covariance: whether queries vary about their mean.
        values: whether the expected attention is weighed by the length of the value.
        epsilon: what is added to the expected attention before it is weighed; 0 or more.
    """

    sinks: int = limited(4, "0 or more")
    future: int = limited(512, "1 or more")
    covariance: bool = True
    values: bool = True
    epsilon: float = limited(0.01, "0 or more")

    name: ClassVar = "expected"
    paper: ClassVar = "https://arxiv.org/abs/2510.00636"
    evidence: ClassVar = Evidence.MOMENTS
    when: ClassVar = "prompt"

    @property
    def attention(self) -> bool:
        return not self.values

    @property
    def unweighed(self) -> str | None:
        return f"{self.name}(values=false)" if self.values else None

    @property
    def moments(self) -> MomentsAsked:
        return MomentsAsked(self.sinks, self.covariance)

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        queries = moments_of_layers(view)[0].ahead(view.tokens_seen, self.future)
        logits = expected_logits(view.keys[0], queries)
        judged = (view.positions >= self.sinks)[:, :, None]  # neither sinks nor empty slots
        logits = logits.masked_fill(~judged, torch.finfo(logits.dtype).min)
        attention = (logits.softmax(-1) * judged).mean(2)
        if not self.values:
            return attention
        weighed = (attention + self.epsilon) * view.values[0].float().norm(dim=-1)
        return weighed * judged[:, :, 0]

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor | None:
        return view.sinks(self.sinks) if self.sinks else None

    def reserved(self, budget: int) -> Mapping[str, int]:
        return {"sinks": self.sinks}
