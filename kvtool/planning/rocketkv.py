"""RocketKV: from a token budget to everything that its two stages need.

Behnam et al., 2025, https://arxiv.org/abs/2502.14051, section 3. A token budget t is what one
decode step may read per KV head, in pairs of key and value: half of it estimates which pages
matter, from keys alone, half attends. With C tokens left by stage 1, pages of P tokens and k1 of D
channels read, C / P * k1 = t * D, hence k1 = D * P / c2 with c2 = C / t.

As the authors' accuracy code, where it goes beyond the paper: generated tokens are reserved, and a
page size above c2, for which k1 would exceed D, becomes 1. Unlike theirs, a context that fits into
the budget is attended in full (`strict` follows them).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtool.documents.stages import compression_ratio, stage1_tokens
from kvtool.errors import UsageError

_LEAST_BUDGET = 16
_SPLIT_AT_1, _SPLIT_PER_DOUBLING, _SPLIT_MOST = 0.2, 0.06, 0.8


@dataclass(frozen=True)
class RocketKVPlan:
    """The two stages of RocketKV for one length of context.

    Attributes:
        context: S, tokens of the prompt and those generated.
        token_budget: t, pairs of key and value read per decode step.
        dense: everything fits into the budget, and nothing is selected or dropped.
        compression_ratio: c = S / t.
        split_factor: r, the share of log c that stage 1 takes.
        stage1_tokens: C, tokens that stage 1 leaves, room for generated ones included.
        prompt_tokens: tokens of the prompt that stage 1 keeps.
        page_size: P.
        head_dims: k1, channels of a key that stage 2 reads to estimate.
        top_k: k2, tokens that stage 2 attends to.
    """

    context: int
    token_budget: int
    dense: bool
    compression_ratio: float
    split_factor: float
    stage1_tokens: int
    prompt_tokens: int
    page_size: int
    head_dims: int
    top_k: int

    @property
    def pages(self) -> int:
        """Pages of the tokens that stage 1 leaves, the last one perhaps not full."""
        return -(-self.stage1_tokens // self.page_size)

    def storage(self) -> float:
        """Return what is stored as a share of a full cache: tokens, and a pair of keys per page."""
        if self.dense:
            return 1.0
        return (self.stage1_tokens + self.pages) / self.context

    def traffic(self, head_dim: int) -> float:
        """Return what a decode step reads as a share of a full cache.

        Of every page one key in `head_dims` channels, half a pair each, and `top_k` pairs.
        """
        if self.dense:
            return 1.0
        estimation = self.pages * self.head_dims / (2 * head_dim)
        return (estimation + self.top_k) / self.context


def split_factor(compression_ratio: float) -> float:
    """Return r, the share of the compression that stage 1 takes.

    >>> round(split_factor(64), 6), split_factor(2**20)
    (0.56, 0.8)
    """
    growth = _SPLIT_PER_DOUBLING * math.log2(compression_ratio)
    return min(_SPLIT_AT_1 + growth, _SPLIT_MOST)


def page_size(stage2_ratio: float) -> int:
    """Return P for stage 2's compression ratio c2: its root rounded up, 1 where that is above c2.

    >>> page_size(6.2324), page_size(1.3633), page_size(1.0)
    (3, 1, 1)
    """
    size = math.ceil(math.sqrt(stage2_ratio))
    return size if size <= stage2_ratio else 1


def plan_rocketkv(
    context: int,
    token_budget: int,
    head_dim: int,
    *,
    max_new_tokens: int = 0,
    window: int = 32,
    split: float | None = None,
    strict: bool = False,
) -> RocketKVPlan:
    """Plan both stages.

    Args:
        context: S, tokens of the prompt and those generated.
        token_budget: t.
        head_dim: D.
        max_new_tokens: tokens of S that will be generated.
        window: newest prompt tokens that stage 1 always keeps.
        split: the split factor r; None computes it from the compression ratio.
        strict: select even where everything fits into the budget, as the authors' code does.

    Raises:
        UsageError: a budget of fewer than 16 tokens, or one that leaves the prompt no more than
            its window.
    """
    if context <= token_budget and not strict:
        return _everything(context, token_budget, head_dim, max_new_tokens)
    if token_budget < _LEAST_BUDGET:
        raise UsageError(
            f"rocketkv needs a budget of {_LEAST_BUDGET} tokens or more, got {token_budget}"
        )
    ratio = compression_ratio(context, token_budget)
    split = split_factor(ratio) if split is None else split
    stage1 = stage1_tokens(context, token_budget, split, max_new_tokens)
    if stage1 - max_new_tokens < window:
        raise UsageError(
            f"rocketkv with {token_budget} of {context} tokens keeps {stage1 - max_new_tokens} "
            f"tokens of the prompt, fewer than its window of {window}",
            hint="a larger budget, or fewer new tokens",
        )
    stage2_ratio = max(1.0, stage1 / token_budget)
    size = page_size(stage2_ratio)
    return RocketKVPlan(
        context=context,
        token_budget=token_budget,
        dense=False,
        compression_ratio=ratio,
        split_factor=split,
        stage1_tokens=stage1,
        prompt_tokens=stage1 - max_new_tokens,
        page_size=size,
        head_dims=min(head_dim, max(1, int(head_dim * size / stage2_ratio))),
        top_k=token_budget // 2,
    )


def _everything(
    context: int, token_budget: int, head_dim: int, max_new_tokens: int
) -> RocketKVPlan:
    return RocketKVPlan(
        context=context,
        token_budget=token_budget,
        dense=True,
        compression_ratio=1.0,
        split_factor=split_factor(1.0),
        stage1_tokens=context,
        prompt_tokens=context - max_new_tokens,
        page_size=1,
        head_dims=head_dim,
        top_k=context,
    )


def nominal_storage(
    compression_ratio: float, split: float, *, keeps_all: bool = False, doubled: bool = False
) -> float:
    """Return the stored share of a full cache by the real-valued formula.

    The paper's table 1 (`doubled`) weighs the page tensors against the keys alone, though a page
    of P tokens holds one pair of vectors where P pairs of key and value stand.

    >>> round(nominal_storage(64, 0.56), 6), round(nominal_storage(64, 0.56, doubled=True), 6)
    (0.136406, 0.175416)

    Args:
        keeps_all: RocketKV-MT, which selects anew in each turn and drops nothing.
        doubled: as the paper prints it.
    """
    kept = 1.0 if keeps_all else compression_ratio**-split
    pages = compression_ratio ** (-(1 + split) / 2)
    return kept + (2 if doubled else 1) * pages
