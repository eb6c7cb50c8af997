"""Prompts that variants have in common: read once, and every answer is what it was."""

import json

import pytest

from kvtool.documents.settings import Protocol
from kvtool.evaluation.run.index import unfinished
from kvtool.evaluation.run.runner import Place, draw_jobs, run_measurements
from kvtool.evaluation.run.store import Store
from tests.evaluation.tasks.drawing import make
from tests.evaluation.variants import make_variants

TOGETHER = ["h2o", "snapkv", "random", "quest", "snapkv+calidrop"]
VARIANTS = [  # and the full cache
    *make_variants([*TOGETHER, "kvzip"], ["64"]),
    *make_variants(["kvzip"], ["48"])[1:],
]
MODES = [{}, {"query_aware": False}, {"query_aware": False, "keep_question": True}]
FEWER = make_variants(["h2o", "snapkv+calidrop", "kvzip"], ["64"])


@pytest.fixture(scope="module")
def measure(loaded, counter, tmp_path_factory):
    """Measure a needle under variants: the records of each, and how many prompts the model read."""
    jobs = draw_jobs([make("niah", lengths=[320], depths=[50], samples=2)], counter, None)

    def run(name, variants=VARIANTS, **protocol):
        protocol = {"max_new_tokens": 4} | protocol
        store = Store(tmp_path_factory.mktemp(name))
        place = Place({"id": "reference"}, Protocol(**protocol))
        read = []

        def note(module, args, kwargs):
            if kwargs["input_ids"].shape[1] > 256 and kwargs["position_ids"][0, 0] == 0:
                read.append(1)

        hook = loaded.model.register_forward_pre_hook(note, with_kwargs=True)
        left = unfinished(jobs, variants, place, store)
        steps = list(run_measurements(left, jobs, variants, loaded, place, store))
        hook.remove()
        assert len(steps) == len(left)
        paths = {variant.name: store.path(variant.folder, "niah") for variant in variants}
        lines = {name: path.read_text().splitlines() for name, path in paths.items()}
        return {name: list(map(json.loads, each)) for name, each in lines.items()}, len(read)

    return run


@pytest.mark.parametrize("mode", MODES)
def test_answers_bytes_and_seconds_are_those_of_prompts_read_once(measure, mode):
    variants = FEWER if mode else VARIANTS
    alone, reads = measure("alone", variants, **mode)
    shared, fewer = measure("shared", variants, shared_prefill=True, **mode)
    assert (reads, fewer) == (2 * len(variants), 2 * 2)  # once for all, and once for kvzip
    for name in alone:
        for one, other in zip(alone[name], shared[name], strict=True):
            assert one["turns"] == other["turns"]
            assert one["scores"] == other["scores"]
            assert _bytes(one) == _bytes(other)
    if not mode:  # a question that comes later is read by each alone
        _seconds_are_those_of_all_together(shared)


def _bytes(record):
    timed = ("prefill_s", "decode_s", "peak_memory_bytes")
    return {name: value for name, value in record["cost"].items() if name not in timed}


def _seconds_are_those_of_all_together(shared):
    """Nor is there a peak of memory for any of them."""
    for i in range(2):
        costs = {name: records[i]["cost"] for name, records in shared.items()}
        repeated = {costs.pop(name)["prefill_s"] for name in list(costs) if "kvzip" in name}
        assert len(repeated) == 1
        assert {cost["prefill_s"] for cost in costs.values()}.isdisjoint(repeated)
        assert len({cost["prefill_s"] for cost in costs.values()}) == 1
        assert all(cost["peak_memory_bytes"] is None for cost in costs.values())


def test_an_variant_alone_reads_alone(measure):
    variants = make_variants(["h2o"], ["64"], baseline=False)
    shared, reads = measure("shared", variants, shared_prefill=True)
    assert reads == 2
    assert shared["h2o@64"][0]["cost"]["peak_memory_bytes"] is not None


def test_an_variant_that_fails_fails_alone(measure):
    variants = make_variants(["streaming(sinks=4)", "h2o", "snapkv"], ["1%"], baseline=False)
    shared, reads = measure("shared", variants, shared_prefill=True)
    assert [name for name, records in shared.items() if "error" in records[0]] == [
        "streaming@1%",
        "snapkv@1%",
    ]
    assert (reads, shared["h2o@1%"][0]["cost"]["kept_tokens"]) == (2, 2.0)


def test_it_is_another_measurement():
    assert "shared_prefill" not in Protocol().identity()
    assert Protocol(shared_prefill=True).identity()["shared_prefill"]
