"""The recipe that sets bits beside budgets runs, and its bytes are those of its codecs."""

import json
from pathlib import Path

import pytest

from kvtool.documents.results import ResultsDocument
from kvtool.policies.codec.fp8 import FP8
from kvtool.policies.codec.int4 import Int4
from kvtool.policies.codec.int8 import Int8
from kvtool.report.pictures import pictures

RECIPE = Path(__file__).parents[2] / "recipes" / "bits-and-budgets.yaml"
CODECS = {"fp8": FP8(), "int8": Int8(), "int4": Int4(), "int4(rotate=false)": Int4(rotate=False)}
TASKS = ("niah", "ruler/niah_multikey_1", "fidelity")


@pytest.mark.exhaustive
def test_a_sample_of_each_task_in_every_format(kvtool):
    done = kvtool(
        "eval", str(RECIPE), "-L", "1", "-q", "-f", "json", "--no-plots", "-o", "runs/bits"
    )
    assert (done.code, done.err) == (0, "")
    results = ResultsDocument(**json.loads(done.out))
    model, shares = results.model, ["12.5%", "25%", "50%"]
    assert model.dtype == "bfloat16"
    arms = {
        (arm.policy.removesuffix(f"+{arm.codec}"), arm.codec, arm.budget) for arm in results.arms
    }
    bases = [("full", None), *((base, share) for base in ("h2o", "snapkv") for share in shares)]
    assert arms == {(base, codec, share) for base, share in bases for codec in (None, *CODECS)}
    for arm in results.arms:
        codec = CODECS.get(arm.codec or "")
        vector = 2 * model.head_dim if codec is None else codec.vector_bytes(model.head_dim)
        for task in TASKS:
            cost = results.of(arm.name, task).cost
            assert cost.kv_bytes == cost.kept_tokens * model.layers * model.kv_heads * 2 * vector
    assert next(pictures(results)).name == "score-by-bytes"
    assert results.verdict.choices[0].by == "bytes"
