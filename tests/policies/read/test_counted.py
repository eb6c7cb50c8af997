"""Readers count what they read; running them without content is the slow twin."""

import pytest

from kvtool.model_shape import LayerShape
from kvtool.policies.read.dry import run_step, run_tables, step_bytes, table_bytes
from kvtool.policies.read.exact_topk import ExactTopK
from kvtool.policies.read.hsa import HSA
from kvtool.policies.read.loki import Loki
from kvtool.policies.read.quest import Quest
from kvtool.policies.read.sparq import SparQ

TOKENS = (1, 2, 7, 16, 48, 49, 200, 1000)
READERS = [
    *(Quest(page=page, k=k) for page, k in ((1, 32), (4, 1), (16, 300))),
    *(HSA(page=page, k1=k1, k=k) for page, k1, k in ((1, 8, 33), (4, 1, 1), (16, 8, 2000))),
    *(SparQ(r=r, k=k) for r, k in ((1, 32), (8, 300))),
    SparQ(r=3, k=7, local=1, reallocate=False),
    *(Loki(d=3, k=k, scope=scope) for k, scope in ((1, "group"), (300, "query_head"))),
    *(ExactTopK(k=k, scope=scope) for k, scope in ((1, "query_head"), (300, "group"))),
]


@pytest.mark.parametrize("reader", READERS, ids=str)
def test_what_is_counted_is_what_a_run_would_read(reader):
    layer = LayerShape(kv_heads=2, heads=6, key_dim=8, value_dim=12, itemsize=2)
    for tokens in TOKENS:
        assert table_bytes(reader, layer, tokens) == run_tables(reader, layer, tokens)
        assert step_bytes(reader, layer, tokens) == run_step(reader, layer, tokens)
