"""Samples whose answers are decoded in one batch: each is what it would be alone."""

import json
from typing import ClassVar

import pytest

import kvtool
from kvtool.documents.results import ResultsDocument
from kvtool.documents.settings import Protocol
from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.bench import together
from kvtool.evaluation.run.index import unfinished
from kvtool.evaluation.run.runner import Place, draw_jobs, run_measurements
from kvtool.evaluation.run.store import Store
from kvtool.evaluation.samples.sample import token_counter
from kvtool.evaluation.tasks.asking import Asking
from kvtool.evaluation.tasks.trace import Trace
from kvtool.generation import serving
from kvtool.generation.serving import Batch
from kvtool.models import placement
from kvtool.models.load import load
from tests.evaluation.tasks.drawing import make
from tests.evaluation.variants import make_variants

JOINED = ("full", "h2o@48", "rkv@48", "snapkv+int8@48", "adakv@48")
APART = ("random@48", "rocketkv@48")  # one draws for each text, one cannot join a batch
VARIANTS = {v.name: v for v in make_variants(["h2o", "rkv", "snapkv+int8", "adakv"], ["48"])} | {
    v.name: v for v in make_variants(["random", "rocketkv"], ["48"])
}
TIMED = ("prefill_s", "decode_s", "peak_memory_bytes", "batch")
BUFFERS = ("allocated_bytes", "state_bytes", "peak_kv_bytes")


@pytest.fixture(scope="module")
def solver():
    """The bundled model that works in steps."""
    loaded = load("reference-trace")
    kvtool.attach(loaded.model)
    return loaded


@pytest.fixture(scope="module")
def counter(solver):
    return token_counter(solver.tokenizer, 8192)


@pytest.fixture
def measure(solver, counter, tmp_path):
    """Measure a task: the records of each variant by sample, and the steps in their order."""

    def run(names, task=None, folder="run", **protocol):
        task = make("trace", depths=[4, 8, 12], samples=2) if task is None else task
        jobs, variants = draw_jobs([task], counter, None), [VARIANTS[name] for name in names]
        place, store = Place({"id": "reference"}, Protocol(**protocol)), Store(tmp_path / folder)
        left = unfinished(jobs, variants, place, store)
        steps = list(run_measurements(left, jobs, variants, solver, place, store))
        found = {}
        for variant in variants:
            lines = store.path(variant.folder, task.name).read_text().splitlines()
            found[variant.name] = {record["id"]: record for record in map(json.loads, lines)}
        return found, steps

    return run


def costs_less(record, *left_out):
    return {name: value for name, value in record["cost"].items() if name not in left_out}


@pytest.mark.parametrize("name", JOINED)
def test_an_answer_of_a_batch_is_the_one_that_its_sample_gets_alone(measure, name):
    alone, _ = measure([name], folder="alone", batch=1)
    batched, steps = measure([name], folder="together", batch=4)
    assert len(steps) == 6
    sizes = [record["cost"].get("batch") for record in batched[name].values()]
    assert max(sizes) == 4
    for sample, record in alone[name].items():
        other = batched[name][sample]
        assert other["turns"] == record["turns"]
        assert other["scores"] == record["scores"]
        assert [other[name] for name in ("key", "fingerprint")] == [
            record[name] for name in ("key", "fingerprint")
        ]
        assert "batch" not in record["cost"]
        assert other["cost"]["peak_memory_bytes"] is None
        # what is held is the same; buffers have other room to spare, where they grow at all
        less = (*TIMED, *BUFFERS, *(("traffic_pairs", "traffic_bytes") if "ada" in name else ()))
        assert costs_less(other, *less) == costs_less(record, *less)
        for size in BUFFERS:
            assert other["cost"][size] == pytest.approx(record["cost"][size], rel=0.25)
        if name == "h2o@48":
            assert costs_less(other, *TIMED) == costs_less(record, *TIMED)


@pytest.mark.parametrize("name", APART)
def test_a_policy_whose_texts_cannot_share_a_batch_runs_alone(measure, name):
    batched, steps = measure([name, "full"], batch=4)
    assert len(steps) == 12
    assert all("batch" not in record["cost"] for record in batched[name].values())
    assert all("batch" in record["cost"] for record in batched["full"].values())


def test_the_seconds_of_steps_are_shared_by_those_that_they_decode(measure, monkeypatch):
    now, read, scored = [0.0], [], []

    def step(batch, before=Batch.step):
        now[0] += 1
        return before(batch)

    def prefill(*given, before=serving.prefill, **more):
        now[0] += 0.5
        read.append(1)
        return before(*given, **more)

    def score(*given, before=Trace.score_answer):
        now[0] += 100  # which is not decoding
        scored.append(1)
        return before(*given)

    monkeypatch.setattr(Batch, "step", step)
    monkeypatch.setattr(Trace, "score_answer", score)
    monkeypatch.setattr(serving, "prefill", prefill)
    monkeypatch.setattr(serving.time, "perf_counter", lambda: now[0])
    batched, _ = measure(["h2o@48"], batch=4)
    costs = [record["cost"] for record in batched["h2o@48"].values()]
    assert [cost["prefill_s"] for cost in costs] == [0.5] * 6
    steps = now[0] - 0.5 * len(read) - 100 * len(scored)
    assert len(scored) == 6
    assert sum(cost["decode_s"] for cost in costs) == pytest.approx(steps, abs=1e-4)
    assert all(cost["decode_s"] < cost["new_tokens"] for cost in costs)


def test_a_place_that_is_free_is_taken_at_once(measure, monkeypatch):
    """Of six samples in a batch of four, the two that wait do not wait for all four."""
    in_flight = []

    def step(batch, before=Batch.step):
        in_flight.append(len(batch.sequences))
        return before(batch)

    monkeypatch.setattr(Batch, "step", step)
    batched, _ = measure(["h2o@48"], batch=4)
    tokens = [record["cost"]["new_tokens"] for record in batched["h2o@48"].values()]
    assert sum(in_flight) == sum(tokens)
    assert max(in_flight) == in_flight[min(tokens)] == 4


def test_half_of_the_free_memory_bounds_how_many_are_in_flight(measure, monkeypatch):
    monkeypatch.setattr(together, "row_bytes", lambda *given: 100)
    monkeypatch.setattr(placement, "free_memory", lambda *given, **more: ("cpu", 599))
    batched, _ = measure(["h2o@48"], batch=4)
    assert {record["cost"].get("batch") for record in batched["h2o@48"].values()} == {2}


def test_a_sample_that_fails_takes_no_other_with_it(measure):
    class Failing(Trace):
        def knows_query(self, protocol):
            return True

        def score_answer(self, prediction, references, facts):
            if len(references) == 8:
                raise ValueError("no score")
            return 1.0

    task = Failing(name="failing", depths=[4, 8], samples=2)
    batched, steps = measure(["full"], task, batch=4)
    errors = {step.sample: step.error for step in steps if step.error}
    assert errors == dict.fromkeys(["depth=8/0", "depth=8/1"], "ValueError: no score")
    found = [record["cost"]["batch"] for record in batched["full"].values() if "cost" in record]
    assert found == [4, 4]


def test_a_prompt_that_cannot_be_put_is_refused_alone(measure, solver):
    task = make("trace", depths=[4, 64], samples=2)
    batched, steps = measure(["h2o@48"], task, batch=4, max_length=90, truncate="error")
    errors = {step.sample: step.error for step in steps if step.error}
    assert errors.keys() == {"depth=64/0", "depth=64/1"}
    assert all("above the 90 allowed" in error for error in errors.values())
    assert [r["cost"]["batch"] for r in batched["h2o@48"].values() if "cost" in r] == [2, 2]


def test_where_a_batch_fails_those_that_are_left_are_measured_alone(measure, monkeypatch):
    alone, _ = measure(["h2o@48"], folder="alone", batch=1)
    ended = []

    def step(batch, before=Batch.step):
        if len(ended) > 1:
            raise RuntimeError("out of memory")
        found = before(batch)
        ended.extend(each for each in found if each)
        return found

    monkeypatch.setattr(Batch, "step", step)
    batched, done = measure(["h2o@48"], folder="together", batch=4)
    assert [step.error for step in done] == [None] * 6
    for sample, record in alone["h2o@48"].items():
        assert batched["h2o@48"][sample]["turns"] == record["turns"]
    sizes = [record["cost"].get("batch") for record in batched["h2o@48"].values()]
    assert sizes == [4] * len(ended) + [None] * (6 - len(ended))


def test_a_run_that_broke_off_goes_on_with_a_batch_of_another_size(
    solver, counter, measure, tmp_path
):
    task = make("trace", depths=[4, 8, 12], samples=2)
    jobs, store = draw_jobs([task], counter, None), Store(tmp_path / "run")
    place, variants = Place({"id": "reference"}, Protocol()), [VARIANTS["h2o@48"]]
    left = unfinished(jobs, variants, place, store)
    assert len(left) == 6
    for done, _ in enumerate(run_measurements(left, jobs, variants, solver, place, store), 1):
        if done == 2:
            break
    _, steps = measure(["h2o@48"], batch=2)
    assert len(steps) == 4


def test_by_default_reasoning_is_decoded_in_batches(solver):
    for name, size in [("trace", 16), ("chain", 16), ("gsm8k", 16), ("niah", 1), ("ppl", 1)]:
        assert make(name).largest_batch(Protocol()) == size
        assert make(name).largest_batch(Protocol(batch=1)) == 1
        assert make(name).largest_batch(Protocol(batch=8)) == (1 if name == "ppl" else 8)
        for alone in ({"shared_prefill": True}, {"temperature": 0.5}):
            assert make(name).largest_batch(Protocol(**alone)) == 1
    later = Protocol(query_aware=False, batch=8)  # the context is a text of its own
    assert [make(name).largest_batch(later) for name in ("niah", "chain")] == [1, 8]
    assert make("niah").largest_batch(Protocol(answers="scored", batch=8)) == 1
    assert make("gsm8k", samples=4).largest_batch(Protocol()) == 1
    assert make("gsm8k", temperature=0.5).largest_batch(Protocol()) == 1

    class Own(Trace):
        """A task that measures in a way of its own."""

        metric: ClassVar[str] = "em"

        def run(self, bench, sample):
            return super().run(bench, sample)

    assert Own(name="own").largest_batch(Protocol(batch=8)) == 1
    assert Trace.run is Asking.run


def test_results_say_how_many_were_decoded_together(tmp_path, capsys):
    found = kvtool.evaluate(
        "reference-trace",
        tasks=["trace"],
        policies=["h2o"],
        budgets=[48],
        depths="4",
        samples=3,
        batch=2,
        folder=tmp_path / "run",
    )
    assert isinstance(found, ResultsDocument)
    assert [result.cost.batch for result in found.results] == [2, 2]
    assert [result.cost.decode_tokens_per_s for result in found.results] == [None, None]
    assert all(result.cost.decode_s > 0 for result in found.results)
    assert "up to 2 answers were decoded in one batch" in str(found.table())
    assert found.verdict is None or all(
        c.variant is None for c in found.verdict.choices if c.by == "time"
    )


def test_batches_of_none_and_of_prompts_that_variants_share_are_refused():
    with pytest.raises(KvtoolError, match="--batch 0: must be above 0"):
        kvtool.evaluate(tasks=["trace"], policies=["h2o"], batch=0, folder="nowhere")
    with pytest.raises(UsageError, match="--shared-prefill"):
        Protocol(shared_prefill=True, batch=2).check()
    Protocol(shared_prefill=True, batch=1).check()
