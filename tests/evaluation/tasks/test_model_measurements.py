"""Fidelity, reconstruction, output error and speed on the reference model."""

import functools
import re

import pytest
import torch

import kvtool
from kvtool.documents.settings import Protocol
from kvtool.errors import UsageError
from kvtool.evaluation.bench.bench import Bench
from kvtool.evaluation.bench.meter import Meter, Peak
from kvtool.evaluation.run.runner import draw_jobs
from kvtool.evaluation.tasks.fidelity import FidelityTask, OutputError, Reconstruct
from kvtool.evaluation.tasks.speed import Speed
from kvtool.generation.graphs import StaticDecoding
from tests.evaluation.variants import make_variants

FULL, TINY, FITS = make_variants(["streaming"], ["24", "4K"])


def measure(loaded, counter, task, *variants, protocol=None):
    """Records per variant, the samples' shared results shared as in a run."""
    samples = list(task.draw(counter))
    records = {variant: [] for variant in variants}
    for sample in samples:
        shared = {}
        for variant in variants:
            bench = Bench(loaded, variant, protocol or Protocol(), shared)
            records[variant].append(task.measure(bench, sample))
    return samples, records


def test_fidelity_of_what_fits_is_perfect_and_of_less_is_not(loaded, counter):
    task = FidelityTask(name="fidelity", lengths="200", samples=2)
    samples, records = measure(loaded, counter, task, FULL, TINY, FITS)
    for variant in (FULL, FITS):
        summary = task.summarise(records[variant])
        assert summary.metrics["agreement"].value == 1.0
        assert summary.metrics["kl"].value == pytest.approx(0, abs=1e-6)
        assert summary.metrics["exact_match"].value == 1.0
        assert summary.metrics["bleu"].value == pytest.approx(100)
        assert "first_divergence" not in summary.metrics
    tiny = task.summarise(records[TINY])
    assert tiny.metrics["agreement"].value < 0.7
    assert tiny.metrics["kl"].value > 0.1
    assert tiny.metrics["bleu"].value < 60
    assert tiny.metrics["first_divergence"].n == 2
    references = [record["references"][0] for record in records[FULL]]
    for sample, reference in zip(samples, references, strict=True):
        assert reference.strip() == sample.turns[0].references[0].strip()  # full answers rightly


def test_fidelity_equals_a_plain_forward_with_the_evicted_keys_masked(loaded, counter):
    """StreamingLLM's cache is known: attend to sinks and the newest, position by position."""
    task = FidelityTask(name="fidelity", lengths="200", samples=1)
    samples, records = measure(loaded, counter, task, FULL, TINY)
    turn = samples[0].turns[0]
    text = samples[0].context + turn.question + turn.answer_prefix
    prompt = loaded.tokenizer(text, return_tensors="pt").input_ids
    answer = loaded.tokenizer(
        records[FULL][0]["references"][0], return_tensors="pt", add_special_tokens=False
    ).input_ids
    end = torch.tensor([[loaded.tokenizer.eos_token_id]])
    ids = torch.cat([prompt, answer, end], 1)[:, :-1]
    n, total = prompt.shape[1], ids.shape[1]
    visible = torch.ones(total, total, dtype=torch.bool).tril()
    for row in range(n, total):
        visible[row, 4 : row + 1 - 21] = False  # 4 sinks, 20 newest, the token itself
    kvtool.detach(loaded.model)
    try:
        logits = loaded.model(ids, attention_mask=visible[None, None]).logits[:, n - 1 :]
    finally:
        kvtool.attach(loaded.model)
    full = loaded.model(ids).logits[:, n - 1 :]
    same = (full.argmax(-1) == logits.argmax(-1)).float().mean().item()
    assert records[TINY][0]["agreement"] == pytest.approx(same)
    p = full.log_softmax(-1)
    kl = (p.exp() * (p - logits.log_softmax(-1))).sum(-1).mean().item()
    assert records[TINY][0]["kl"] == pytest.approx(kl, rel=1e-3)


@pytest.mark.exhaustive
def test_an_unknown_query_makes_fidelity_harder_or_equal_but_not_for_full(loaded, counter):
    task = FidelityTask(name="fidelity", lengths="200", samples=2)
    agnostic = Protocol(query_aware=False)
    _, records = measure(loaded, counter, task, FULL, TINY, protocol=agnostic)
    assert task.summarise(records[FULL]).metrics["agreement"].value == 1.0
    assert task.summarise(records[TINY]).metrics["agreement"].value < 0.7


def test_fidelity_without_the_text_metrics(loaded, counter, monkeypatch):
    task = FidelityTask(name="fidelity", lengths="200", samples=1)
    _, records = measure(loaded, counter, task, FULL)
    monkeypatch.setattr("kvtool.extras.find_spec", lambda name: None)
    assert set(task.score(records[FULL][0])) == {"agreement", "kl", "exact_match"}
    assert "pip install" in task.protocol


@pytest.mark.exhaustive
def test_reconstruction_compares_with_full_or_with_the_source(loaded, counter):
    task = Reconstruct(name="reconstruct", lengths="64", samples=1)
    samples, records = measure(loaded, counter, task, FULL, TINY)
    assert task.summarise(records[FULL]).metrics["bleu"].value == pytest.approx(100)
    assert task.summarise(records[TINY]).metrics["bleu"].value < 100
    source = Reconstruct(name="reconstruct", lengths="64", samples=1, reference="source")
    record = dict(records[TINY][0], prediction=samples[0].context)
    assert source.summarise([record]).metrics["bleu"].value == pytest.approx(100)
    assert task.summarise([record]).metrics["bleu"].value < 100
    assert counter.count(samples[0].context) <= 64
    assert records[FULL][0]["new_tokens"] <= 64


def test_texts_of_a_file_are_summarised(loaded, counter, tmp_path):
    path = tmp_path / "news.jsonl"
    path.write_text('{"article": "%s"}\n' % ("The old lamp was near the school. " * 60))
    task = FidelityTask(name="fidelity", lengths="200", samples=3, data=str(path), new_tokens=8)
    samples, records = measure(loaded, counter, task, FULL, TINY)
    (sample,) = samples
    asked = sample.context + sample.turns[0].question + sample.turns[0].answer_prefix
    assert asked.startswith("The old lamp was near the school. The old lamp")
    assert asked.endswith(task.instruction)
    prompt = loaded.tokenizer(asked, return_tensors="pt")
    length = prompt.input_ids.shape[1]
    assert records[TINY][0]["cost"]["prompt_tokens"] == length
    assert 200 - 8 - 2 <= length <= 200 - 8  # tokens may join where the text is cut
    kvtool.detach(loaded.model)
    try:
        plain = loaded.model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, length:]
    finally:
        kvtool.attach(loaded.model)
    summary = loaded.tokenizer.decode(plain, skip_special_tokens=True)
    for variant in (FULL, TINY):
        assert records[variant][0]["references"] == [summary]
    assert records[FULL][0]["prediction"] == summary
    assert records[TINY][0]["prediction"] != summary
    assert task.summarise(records[FULL]).metrics["agreement"].value == 1.0
    assert task.summarise(records[TINY]).metrics["agreement"].value < 1.0


@pytest.mark.parametrize("kind", [FidelityTask, OutputError], ids=["fidelity", "output-error"])
def test_the_length_that_is_said_to_be_enough_is(counter, kind):
    with pytest.raises(UsageError, match="t: length 64 is too short") as refused:
        list(kind(name="t", lengths="64", samples=1).draw(counter))
    enough = re.search(r"use lengths of (\d+) or more", refused.value.hint)[1]
    (sample,) = kind(name="t", lengths=enough, samples=1).draw(counter)
    assert sample.turns[0].max_new_tokens == kind(name="t").new_tokens


def test_the_full_cache_agrees_with_itself_however_the_prompt_is_split(loaded, counter, tmp_path):
    path = tmp_path / "news.txt"
    path.write_text("The old lamp was near the scho")
    glued = "ol of the town"  # `school` is one token
    task = FidelityTask(name="fidelity", lengths="128", data=str(path), instruction=glued)
    (sample,) = task.draw(counter)
    joined = counter.encode(sample.context + glued)
    assert joined != counter.encode(sample.context) + counter.encode(glued)
    _, records = measure(loaded, counter, task, FULL, protocol=Protocol(query_aware=False))
    assert records[FULL][0]["kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    "task",
    [
        FidelityTask(name="fidelity", lengths="200", samples=1),
        OutputError(name="output-error", lengths="200", samples=1),
    ],
    ids=lambda task: task.name,
)
def test_no_variant_pays_for_the_answer_that_all_compare_with(loaded, counter, task, monkeypatch):
    events = []
    once = Bench.once

    def spy(self, name, make):
        return once(self, name, lambda: events.append("answer") or make())

    monkeypatch.setattr(Bench, "once", spy)
    monkeypatch.setattr(Bench, "restart_meter", lambda self: events.append("restart"))
    monkeypatch.setattr(Bench, "meter", Meter(Peak([torch.device("cpu")])), raising=False)
    measure(loaded, counter, task, TINY)
    assert events[-2:] == ["answer", "restart"]


@pytest.mark.parametrize("mode", ["isolated", "end_to_end"])
def test_output_error_grows_as_the_budget_shrinks(loaded, counter, mode):
    task = OutputError(name="output-error", lengths="160", samples=1, mode=mode, new_tokens=6)
    variants = make_variants(["streaming"], ["24", "80", "4K"])
    _, records = measure(loaded, counter, task, *variants)
    full, tiny, more, fits = (
        task.summarise(records[variant]).metrics["nmse"].value for variant in variants
    )
    assert full < 1e-10
    assert fits < 1e-10
    assert tiny > more > 1e-3
    curve = task.summarise(records[variants[1]]).curves["error by layer"]
    assert list(curve.x) == [0.0, 1.0, 2.0, 3.0]
    assert sum(curve.y) / 4 == pytest.approx(tiny)


def test_speed_counts_what_it_times(loaded, counter):
    task = Speed(name="speed", lengths="64,128", new_tokens=5, batch=2, samples=2)
    samples, records = measure(loaded, counter, task, TINY)
    assert [sample.cell["length"] for sample in samples] == [64, 64, 128, 128]
    for sample, record in zip(samples, records[TINY], strict=True):
        length = sample.cell["length"]
        cost = record["cost"]
        assert (record["prefilled"], record["decoded"]) == (2 * length, 10)
        assert cost["prefill_s"] == pytest.approx(record["prefill_s"], abs=1e-6)
        assert cost["decode_s"] == pytest.approx(record["decode_s"], abs=1e-6)
        assert cost["prompt_tokens"] == record["prefilled"]
        assert cost["new_tokens"] == cost["decoded_tokens"] == record["decoded"]
        assert cost["kept_tokens"] == 24
        assert cost["kv_bytes"] == 2 * 24 * 4 * 2 * 32 * 2 * 4
        scores = task.score(record)
        assert scores["decode_tokens_per_s"] == pytest.approx(10 / record["decode_s"])
        assert scores["ttft_s"] == record["prefill_s"]


@pytest.mark.exhaustive
def test_speed_compiles_before_the_clock_starts(loaded, counter, monkeypatch):
    torch._dynamo.reset()
    steps, reports = StaticDecoding.__call__, []

    def noting(self, *args):
        logits = steps(self, *args)
        reports.append(self.steps)
        return logits

    monkeypatch.setattr(StaticDecoding, "__call__", noting)
    plain = functools.partialmethod(StaticDecoding.__init__, backend="eager")
    monkeypatch.setattr(StaticDecoding, "__init__", plain)
    task = Speed(name="speed", lengths="64", new_tokens=5, samples=1, compile=True)
    _, records = measure(loaded, counter, task, TINY)
    assert records[TINY][0]["decoded"] == records[TINY][0]["cost"]["new_tokens"] == 5
    assert len(reports) == 2 * 8  # of the run that warms up, and of the one that counts
    for run in range(2):
        first, *_, last = reports[8 * run + 2 : 8 * run + 8]
        assert last.compiled_steps == first.compiled_steps + 5
        assert last.graphs == first.graphs  # none is made while the clock runs


def test_another_seed_times_other_tokens(counter):
    keys = [
        draw_jobs([Speed(name="speed", seed=seed)], counter, None)[0].fingerprint for seed in (0, 1)
    ]
    assert keys[0] != keys[1]


def test_a_repetition_must_fit_the_model_beside_its_text(counter):
    list(Reconstruct(name="reconstruct", lengths="3K", samples=1).draw(counter))
    with pytest.raises(UsageError, match=r"reconstruct: length 4096 takes 82\d\d tokens with its"):
        list(Reconstruct(name="reconstruct", lengths="4K", samples=1).draw(counter))


def test_presets_are_the_papers_sizes(counter):
    task = Speed(name="speed", preset="calidrop", samples=1)
    assert task.lengths == (1024,)
    sizes = [tuple(sample.cell.values()) for sample in task.draw(counter)]
    assert sizes[:3] == [(1024, 128, 1), (1024, 128, 2), (1024, 128, 4)]
    assert Speed(**task.model_dump()) == task


def test_speed_takes_the_largest_batch_that_has_room(loaded, counter):
    memory = 2 * 2**20
    task = Speed(name="speed", lengths="128", new_tokens=4, samples=1, memory="2MiB")
    _, records = measure(loaded, counter, task, TINY)
    record = records[TINY][0]
    batch = record["batch"]
    assert (record["prefilled"], record["decoded"]) == (128 * batch, 4 * batch)
    held = record["cost"]["peak_kv_bytes"] + record["cost"]["state_bytes"]
    assert held <= memory < held * (batch + 1) / batch * 1.5
    assert task.score(record)["batch"] == batch > 1


def test_a_memory_is_a_number_of_bytes():
    with pytest.raises(ValueError, match="memory is a number of bytes such as 512MiB, got `4K`"):
        Speed(name="speed", memory="4K")
