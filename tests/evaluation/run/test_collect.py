"""Means, standard errors, differences to full, averages and gates, by hand."""

import math
from typing import ClassVar

import pytest

from kvtool.documents.results import MetricEntry
from kvtool.errors import UsageError
from kvtool.evaluation.metrics.summary import mean
from kvtool.evaluation.run.collect import Measured, averages, task_result, with_deltas
from kvtool.evaluation.run.gates import Gate, check_gates, judge, parse_least
from kvtool.evaluation.tasks.asking import Asking

COST = {
    "prompt_tokens": 100,
    "new_tokens": 5,
    "decoded_tokens": 4,
    "prefill_s": 0.5,
    "decode_s": 0.25,
    "kept_tokens": 10.0,
    "kv_bytes": 1000,
    "state_bytes": 40,
    "full_bytes": 10000,
    "peak_kv_bytes": 3000,
    "traffic_pairs": 12.5,
    "traffic_bytes": 700,
    "peak_memory_bytes": 5000,
}


class Match(Asking):
    metric = "em"
    best: ClassVar = 1.0

    def draw(self, tokens):
        return []

    def score_answer(self, prediction, references, facts):
        return float(prediction in references)


def record(prediction, cell=None, **cost):
    turns = [{"prediction": prediction, "references": ["yes"]}]
    more = {"cell": cell} if cell else {}
    return {"turns": turns, "facts": {}, "cost": COST | cost, **more}


def result(variant, predictions, task="suite/a", cells=None, failed=0):
    records = [
        record(prediction, None if cells is None else cells[i])
        for i, prediction in enumerate(predictions)
    ]
    measured = Measured(
        variant, Match(name=task), records, failed, len(records) + failed, True, "f"
    )
    return task_result(measured)


def test_the_mean_and_its_standard_error():
    got = result("h2o@8", ["yes", "no", "no", "yes", "yes"])
    assert (got.value, got.n, got.metric) == (0.6, 5, "em")
    variance = (3 * 0.4**2 + 2 * 0.6**2) / 4
    assert got.stderr == pytest.approx(math.sqrt(variance / 5))
    assert mean([7.0]).stderr is None


def test_cells_are_means_of_their_own_samples():
    cells = [{"length": 512, "depth": 0}, {"length": 512, "depth": 100}] * 2
    got = result("full", ["yes", "no", "yes", "yes"], cells=cells)
    assert [(cell.at["depth"], cell.value, cell.n) for cell in got.cells] == [
        (0, 1.0, 2),
        (100, 0.5, 2),
    ]


def test_nothing_measured_is_nothing_and_not_zero():
    got = result("full", [], failed=3)
    assert (got.value, got.n, got.failed, got.cost, got.stderr) == (None, 0, 3, None, None)


def test_costs_are_means_rates_are_of_sums_and_peaks_the_largest():
    records = [record("yes"), record("no", prefill_s=1.5, prompt_tokens=500, peak_kv_bytes=9000)]
    cost = task_result(Measured("a", Match(name="t"), records, 0, 2, True, "f")).cost
    assert (cost.prompt_tokens, cost.prefill_s, cost.kv_bytes) == (300, 1.0, 1000)
    assert (cost.prefill_tokens_per_s, cost.decode_tokens_per_s) == (600 / 2.0, 8 / 0.5)
    assert (cost.peak_kv_bytes, cost.peak_memory_bytes) == (9000, 5000)
    records[1]["cost"]["peak_memory_bytes"] = None
    cost = task_result(Measured("a", Match(name="t"), records, 0, 2, True, "f")).cost
    assert cost.peak_memory_bytes is None


def test_held_bytes_are_buffers_and_policy_state_and_layers_have_means():
    first = record("yes", allocated_bytes=1500, kept_per_layer=[10, 0, 20])
    second = record("no", allocated_bytes=2500, kept_per_layer=[30, 0, 21])
    cost = task_result(Measured("a", Match(name="t"), [first, second], 0, 2, True, "f")).cost
    assert (cost.allocated_bytes, cost.held_bytes) == (2000, 2000 + 40)
    assert cost.kept_per_layer == [20, 0, 20.5]
    mixed = task_result(Measured("a", Match(name="t"), [first, record("no")], 0, 2, True, "f")).cost
    assert (mixed.allocated_bytes, mixed.kept_per_layer) == (None, [])
    unknown = record("no", allocated_bytes=None, kept_per_layer=None)
    null = task_result(Measured("a", Match(name="t"), [first, unknown], 0, 2, True, "f")).cost
    assert null == mixed  # what is null is not recorded
    fewer = [first, record("no", allocated_bytes=2500, kept_per_layer=[30, 0])]
    cost = task_result(Measured("a", Match(name="t"), fewer, 0, 2, True, "f")).cost
    assert cost.kept_per_layer == []  # one record has another number of layers
    hosted = [record("yes", host_bytes=100), record("no", host_bytes=300)]
    assert (
        task_result(Measured("a", Match(name="t"), hosted, 0, 2, True, "f")).cost.host_bytes == 200
    )
    assert mixed.host_bytes is None
    assert mixed.held_bytes == 1000 + 40  # filled slots replace buffers that were not recorded


def fed(variant, chunk, value, **changes):
    """A perplexity of which it is known how many tokens were fed at a time."""
    metrics = [MetricEntry(name="chunk", value=chunk, n=1, stderr=None)]
    about = {"metrics": metrics, "value": value, "lower_is_better": True}
    return result(variant, ["yes"], "ppl").model_copy(update=about | changes)


def test_texts_fed_in_other_blocks_are_not_compared_with_full():
    full, evicting, cutting = fed("full", 1, 10.0), fed("h2o@8", 1, 12.0), fed("snapkv@8", 128, 9.0)
    results = with_deltas([full, evicting, cutting])
    assert [got.delta for got in results] == [0.0, 2.0, None]
    drops = judge([Gate("*", max_drop=50)], results)
    assert [(gate.variant, gate.passed) for gate in drops] == [("h2o@8", True)]
    assert [gate.variant for gate in judge([Gate("*", least=11)], results)] == ["h2o@8", "snapkv@8"]
    asked_for = judge([Gate("ppl", max_drop=50)], results)  # by name: cannot be met
    assert [(gate.variant, gate.passed) for gate in asked_for] == [
        ("h2o@8", True),
        ("snapkv@8", False),
    ]
    lost = fed("full", None, None, metrics=[])
    assert not judge([Gate("*", max_drop=50)], with_deltas([lost, cutting]))[0].passed


def test_deltas_and_averages():
    results = with_deltas(
        [
            result("full", ["yes", "yes"], "suite/a"),
            result("h2o@8", ["yes", "no"], "suite/a"),
            result("full", ["no", "yes"], "suite/b"),
            result("h2o@8", ["no", "no"], "suite/b"),
            result("h2o@8", ["no", "no"], "other"),
        ]
    )
    assert [got.delta for got in results] == [0.0, -0.5, 0.0, -0.5, None]
    found = {
        (got.variant, got.suite): (got.tasks, got.value, got.delta) for got in averages(results)
    }
    assert found == {
        ("full", "suite"): (["suite/a", "suite/b"], 0.75, 0.0),
        ("h2o@8", "suite"): (["suite/a", "suite/b"], 0.25, -0.5),
    }
    unfinished = [*results[:3], result("h2o@8", [], "suite/b")]
    assert [got.variant for got in averages(unfinished)] == ["full"]


def test_scores_over_other_samples_than_those_of_full_are_not_compared():
    results = with_deltas(
        [result("full", ["yes", "no", "no", "no"]), result("h2o@8", ["yes"], failed=3)]
    )
    assert [(got.value, got.delta) for got in results] == [(0.25, 0.0), (1.0, None)]
    (verdict,) = judge([Gate("*", max_drop=10.0)], results)
    assert not verdict.passed


def test_gates_judge_the_compressed_variants_only():
    results = with_deltas(
        [
            result("full", ["no", "yes"]),
            result("h2o@8", ["no", "no"]),
            result("tova@8", ["yes"] * 2),
        ]
    )
    verdicts = judge([Gate("suite", least=0.4), Gate("*", max_drop=50.0)], results)
    assert [(v.gate, v.variant, v.passed) for v in verdicts] == [
        ("least", "h2o@8", False),
        ("least", "tova@8", True),
        ("max_drop", "h2o@8", False),
        ("max_drop", "tova@8", True),
    ]
    assert verdicts[2].value == 100.0
    alone = judge([Gate("suite/a", least=0.4)], results[:1])
    assert [(v.variant, v.passed) for v in alone] == [("full", True)]
    assert [v.passed for v in judge([Gate("*", max_drop=1)], [result("h2o@8", ["yes"])])] == [False]


def test_smaller_is_better_where_the_task_says_so():
    full, worse = result("full", ["yes"]), result("h2o@8", ["yes"])
    full = full.model_copy(update={"value": 10.0, "lower_is_better": True})
    worse = worse.model_copy(update={"value": 12.0, "lower_is_better": True})
    results = with_deltas([full, worse])
    assert judge([Gate("*", max_drop=20)], results)[0].passed
    assert not judge([Gate("*", max_drop=19)], results)[0].passed
    assert judge([Gate("*", least=12)], results)[0].passed
    assert not judge([Gate("*", least=11)], results)[0].passed


def test_percent_of_nothing_is_no_drop():
    full, ours = result("full", ["yes"]), result("h2o@8", ["no"])
    timed = [each.model_copy(update={"droppable": False}) for each in (full, ours)]
    assert judge([Gate("*", max_drop=1)], with_deltas(timed)) == []
    assert len(judge([Gate("suite/a", max_drop=1)], with_deltas(timed))) == 1


def test_gates_that_cannot_be_are_refused():
    tasks = [("niah", 1.0, False), ("ppl", None, True)]
    check_gates([Gate("niah", least=0.9), Gate("ppl", least=30), Gate("*", max_drop=2)], tasks)
    with pytest.raises(UsageError, match="no such task in this run"):
        check_gates([Gate("ruler", least=3)], tasks)
    with pytest.raises(UsageError, match="scored from 0 to 1"):
        check_gates([Gate("niah", least=90)], tasks)
    assert parse_least("niah=0.9") == Gate("niah", least=0.9)
    for text in ("niah", "=3", "niah=high"):
        with pytest.raises(UsageError, match="TASK=VALUE"):
            parse_least(text)
