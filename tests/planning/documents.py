"""Models and profiles to plan for, without any file."""

from __future__ import annotations

from kvtool.documents.profile import (
    AnswerLosses,
    HeadLosses,
    Metrics,
    ModelShape,
    ProfileData,
    ProfileDocument,
)

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
F = [2.0, 5.0, 300.0, 600.0]


def shape(*kinds: str, **changes) -> ModelShape:
    """A bfloat16 model whose attention layers store 256 bytes per token."""
    kinds = kinds or (FULL,) * 4
    stored = sum(kind != LINEAR for kind in kinds)
    values = {
        "id": "toy",
        "config_hash": "0",
        "dtype": "bfloat16",
        "layers": len(kinds),
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "layer_types": list(kinds),
        "sliding_window": 64 if SLIDING in kinds else None,
        "kv_bytes_per_token": 256 * stored,
        "trained_length": 4096,
    }
    return ModelShape(**(values | changes))


def of_heads(*samples) -> HeadLosses:
    """Losses of KV heads: for each sample layers x heads x budgets; no mean is looked at."""
    rows = list(samples if len(samples) > 1 else samples * 2)
    return HeadLosses(losses=rows[0], standard_errors=rows[0], by_sample=rows)


def profile(tokens: int = 1000, *, losses=None, budgets=(64, 128, 256), heads=None, **metrics):
    """A profile of `shape()`, with F unless other metrics are given."""
    if losses is not None:
        metrics["answer_loss"] = AnswerLosses(
            policy="h2o",
            budgets=list(budgets),
            losses=losses,
            standard_errors=[[0.0] * len(budgets)] * len(losses),
            by_sample=[losses] * 2,
            heads=heads,
        )
    return ProfileDocument(
        model=shape(),
        data=ProfileData(source="builtin", samples=1, tokens=tokens, seed=0, fingerprint="0"),
        metrics=Metrics(**(metrics or {"f_variance": F})),
    )
