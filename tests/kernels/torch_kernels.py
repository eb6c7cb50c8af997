"""Substitutes for torch's own kernels of a GPU, which refuse what those refuse."""

from types import SimpleNamespace

import torch
from torch.nn import functional

from kvtool.kernels import attend_causal, reference

ROWS = 32  # the memory-efficient kernel returns the log-sum-exp of a multiple of them


def _attend(query, key, value, scale):
    """Causal attention in float32, rounded, and its log-sum-exp."""
    rows = torch.arange(query.shape[2])
    places = rows.expand(len(query), -1), rows.expand(len(query), 1, -1)
    out, lse, _ = reference.attend_rows(
        query.float(), key.float(), value.float(), *places, scale=scale
    )
    return out.to(value.dtype), lse


def flash(query, key, value, dropout, causal, *, scale):
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
    assert query.shape[-1] % 8 == 0
    assert query.shape[1] % key.shape[1] == 0
    assert causal
    assert dropout == 0
    return *_attend(query, key, value, scale), None, None, query.shape[2], key.shape[2]


def efficient(query, key, value, bias, returns_lse, dropout, causal, *, scale):
    assert query.shape[1] == key.shape[1]
    assert returns_lse
    assert causal
    assert bias is None
    assert dropout == 0
    out, lse = _attend(query, key, value, scale)
    return out, functional.pad(lse, (0, -lse.shape[-1] % ROWS), value=float("nan")), None, None


def put_in_place(monkeypatch, wrap=lambda kernel: kernel) -> None:
    """Let these run where torch's own are asked for."""
    own = SimpleNamespace(
        _scaled_dot_product_flash_attention=wrap(flash),
        _scaled_dot_product_efficient_attention=wrap(efficient),
    )
    monkeypatch.setattr(attend_causal, "_ATEN", own)
