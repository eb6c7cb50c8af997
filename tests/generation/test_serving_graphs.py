"""Batches whose steps are recorded: rows keep their places, answers are those of prompts alone."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

import kvtool
from kvtool.documents.memory import DeviceMemory
from kvtool.generation import generate, graphs, serving
from kvtool.generation.answering_thread import Job, LiveAnswers, Opened
from kvtool.generation.conversation import Asked
from kvtool.generation.decoding import Told
from kvtool.generation.graphs import StaticDecoding
from kvtool.generation.serving import Drawing, Served, Waiting, serve
from kvtool.models.load import load
from kvtool.planning.bytes import Text
from kvtool.planning.estimate import estimate_memory
from kvtool.planning.variants import Variant
from kvtool.sizes import Budget
from tests import tape
from tests.tiers import first

SIZES = [  # prompt, new tokens
    *((40, 9), (90, 3), (25, 14), (64, 1), (130, 6), (33, 12), (71, 5), (50, 20)),
    *((28, 11), (60, 8), (45, 17), (100, 10)),
]
ROWS = 8
BUCKETS = 4  # 8, 4, 2 and 1 rows
JOINS = 4  # prompts that come while others run


@pytest.fixture(scope="module")
def loaded():
    model = load()
    kvtool.attach(model.model)
    return model


@pytest.fixture
def recordings(monkeypatch):
    """What is recorded, on a CPU."""
    made = []
    monkeypatch.setattr(graphs, "recorder", tape.recorder(made))
    monkeypatch.setattr(graphs, "_told", set())
    monkeypatch.setattr(graphs, "_refused", set())
    return made


def budget_of(policy):
    return None if policy.startswith("full") else 96 if policy == "rocketkv" else 32


def new_cache(loaded, policy):
    return kvtool.build_cache(loaded.model, policy, budget_of(policy))


def waiting(loaded) -> list[Waiting]:
    text = "The secret code for falcon: 7429103. The old lamp was near the school, and it was red. "
    ids = loaded.tokenizer(text * 20)["input_ids"]
    return [
        Waiting(i, torch.tensor([ids[3 * i : 3 * i + length]]), new)
        for i, (length, new) in enumerate(SIZES)
    ]


def alone(loaded, policy, prompt, **options):
    options = {"max_new_tokens": prompt.max_new_tokens, "graphs": False} | options
    cache = new_cache(loaded, policy)
    return generate(loaded.model, loaded.tokenizer, cache, prompt.ids, **options).token_ids[0]


def serve_all(loaded, policy, prompts, **options):
    model, tokenizer = loaded.model, loaded.tokenizer
    found = serve(model, tokenizer, lambda: new_cache(loaded, policy), prompts, **options)
    return {answer.index: answer.token_ids for answer in found}


MOST = {  # recordings
    "h2o": BUCKETS,
    "full+int8": BUCKETS,
    "snapkv(window=8)": BUCKETS,
    "adakv(window=8)": BUCKETS + JOINS,  # heads of different counts lie side by side
    "rocketkv": len(SIZES),  # one by one
    "full": BUCKETS,
    "h2o+int8": BUCKETS,
    "h2o+caote": BUCKETS,
    "streaming(positions=cache)": BUCKETS,
    "d2o": BUCKETS + JOINS,
    "h2o+every(steps=4)": BUCKETS + JOINS,
}


@pytest.mark.parametrize("policy", first(5, list(MOST)))
def test_twelve_answers_over_eight_rows_take_few_recordings(policy, loaded, recordings):
    """A prompt that comes takes the place of an answer that has ended, and the recording holds."""
    prompts, served = waiting(loaded), Served()
    rows = 1 if policy == "rocketkv" else ROWS
    found = serve_all(loaded, policy, prompts, most_sequences=rows, served=served)
    assert found == {each.index: alone(loaded, policy, each) for each in prompts}
    assert served.most_sequences == rows
    assert 1 <= len(recordings) <= MOST[policy]
    assert sum(each.replays for each in recordings) >= len(recordings)


def test_without_graphs_nothing_is_recorded(loaded, recordings):
    prompts = waiting(loaded)[:3]
    found = serve_all(loaded, "h2o", prompts, graphs=False)
    assert found == {each.index: alone(loaded, "h2o", each) for each in prompts}
    assert not recordings


@pytest.mark.parametrize(
    "drawing",
    [
        Drawing(temperature=0.8, seed=5, top_p=0.9),
        Drawing(temperature=0.7, seed=5, stop=["."]),
        Drawing(stop=["the", "was"]),
    ],
    ids=str,
)
def test_draws_and_stop_texts_are_those_of_each_prompt(drawing, loaded, recordings):
    prompts = waiting(loaded)
    options = {"most_sequences": 4, "drawing": drawing}
    found = serve_all(loaded, "h2o", prompts, **options)
    assert found == serve_all(loaded, "h2o", prompts, graphs=False, **options)
    assert len({len(each) for each in found.values()}) > 1
    assert recordings


def test_the_next_step_runs_while_the_host_reads_a_token(loaded, recordings, monkeypatch):
    events, feed, read = [], StaticDecoding.feed, Told.read
    monkeypatch.setattr(
        StaticDecoding, "feed", lambda *given: (events.append("feed"), feed(*given))[1]
    )
    monkeypatch.setattr(Told, "read", lambda told: (events.append("read"), read(told))[1])
    prompts = [replace(each, max_new_tokens=6) for each in waiting(loaded)[:3]]
    found = serve_all(loaded, "h2o", prompts)
    assert events == ["feed", "read"] * 5  # the last token is drawn and not fed
    assert found == {each.index: alone(loaded, "h2o", each) for each in prompts}


def test_rows_of_learned_positions_leave_as_they_end(loaded, recordings, monkeypatch):
    """Padding would run beyond what the model has learned."""
    monkeypatch.setattr(serving, "learned_positions", lambda model: 512)
    rows, feed = [], StaticDecoding.feed
    monkeypatch.setattr(
        StaticDecoding, "feed", lambda *given: (rows.append(len(given[2])), feed(*given))[1]
    )
    options = {"most_sequences": ROWS, "drawing": Drawing(stop=["no such text"])}
    found = serve_all(loaded, "full", waiting(loaded), **options)
    recorded, rows[:] = list(rows), []
    assert found == serve_all(loaded, "full", waiting(loaded), graphs=False, **options)
    assert recorded == rows
    assert recordings


def test_where_recording_fails_rows_leave_as_they_end(loaded, recordings, monkeypatch):
    class Refusing(tape.TapeRecording):
        def record(self, run, generators):
            super().record(run, generators)
            raise torch.OutOfMemoryError("no memory is left for a graph")

    monkeypatch.setattr(graphs, "recorder", lambda model: Refusing)
    prompts = waiting(loaded)
    found = serve_all(loaded, "h2o", prompts, most_sequences=ROWS)
    assert found == {each.index: alone(loaded, "h2o", each) for each in prompts}


def ask_all(loaded, policy, prompts, *, graphs=True, memory=None, make=None):
    """Send all prompts to a thread that answers at once: answers, and what went wrong."""
    heard, left = {}, threading.Semaphore(0)
    make = make or (lambda: new_cache(loaded, policy))
    answers = LiveAnswers(loaded.model, loaded.tokenizer, memory=memory, graphs=graphs)

    def job(prompt):
        def end(answer):
            heard[prompt.index] = answer
            left.release()

        return Job(
            policy,
            lambda: Opened(make(), Asked(prompt.ids, None)),
            prompt.max_new_tokens,
            prompt.sequence_bytes,
            Drawing(),
            lambda token: None,
            end,
        )

    with answers._change:  # all are there before the first is begun
        answers._coming += map(job, prompts)
        answers._change.notify()
    for _ in prompts:
        left.acquire(timeout=60)
    answers.stop()
    return {index: getattr(answer, "token_ids", answer) for index, answer in heard.items()}


@pytest.mark.parametrize("policy", first(2, ["h2o", "adakv(window=8)", "full+int8"]))
def test_requests_that_come_while_others_run_join_the_recorded_batch(policy, loaded, recordings):
    prompts = [replace(each, max_new_tokens=24 - each.index) for each in waiting(loaded)]
    expected = {each.index: alone(loaded, policy, each) for each in prompts}
    assert ask_all(loaded, policy, prompts) == expected
    joins = len(prompts) - 1
    buckets = 8  # 1, 2, 4, 8 and 16 rows, and 8, 4 and 2 again
    assert 1 <= len(recordings) <= (joins + buckets if policy.startswith("ada") else buckets)
    recordings.clear()
    assert ask_all(loaded, policy, prompts, graphs=False) == expected
    assert not recordings


class Held:
    """The bytes of all caches that are made, after every prompt and every step."""

    def __init__(self, loaded, policy, monkeypatch):
        self._loaded, self._policy, self._made, self.most = loaded, policy, [], 0
        feed = StaticDecoding.feed
        monkeypatch.setattr(StaticDecoding, "feed", lambda *given: self.count(feed(*given)))

    def make(self):
        self._made.append(new_cache(self._loaded, self._policy))
        return self._made[-1]

    def count(self, found):
        reports = [each.report() for each in self._made if each.first_layer.is_initialized]
        held = sum(each.allocated_bytes + each.state_bytes for each in reports)
        self.most = max(self.most, held)
        return found


def with_bytes(loaded, policy, prompts):
    device = DeviceMemory(device="", free_bytes=None, weights_bytes=None)
    budget = budget_of(policy)
    variant = Variant(kvtool.parse_policy(policy), budget and Budget.parse(budget))
    sized = []
    for prompt in prompts:
        text = Text(prompt.ids.shape[1], prompt.max_new_tokens, 1)
        found = estimate_memory(loaded.model.config, "float32", variant, text, device)
        sized.append(replace(prompt, sequence_bytes=found.kv_bytes + found.state_bytes))
    return sized


@pytest.mark.parametrize("policy", ["full", "snapkv(window=8)", "h2o"])
@pytest.mark.parametrize("fit", [3, 10])
def test_no_memory_goes_beyond_its_bound(policy, fit, loaded, recordings, monkeypatch):
    """Ended rows, padding, slots for tokens to come, and the prompt that is read beside them."""
    held, prefill = Held(loaded, policy, monkeypatch), serving.prefill
    counted = lambda *given, **more: held.count(prefill(*given, **more))  # noqa: E731
    monkeypatch.setattr(serving, "prefill", counted)
    prompts = with_bytes(loaded, policy, waiting(loaded))
    memory = fit * max(each.sequence_bytes for each in prompts)
    served = Served()
    options = {"memory": memory, "served": served}
    answers = serve(loaded.model, loaded.tokenizer, held.make, prompts, **options)
    found = {answer.index: answer.token_ids for answer in answers}
    assert memory / 2 < held.most <= memory
    most = 9 if fit == 10 else fit  # of ten rows, one is for the prompt that is read
    assert served.most_sequences == most if policy != "full" else served.most_sequences >= most
    assert found == {each.index: alone(loaded, policy, each) for each in prompts}


@pytest.mark.parametrize("policy", ["full", "h2o"])
def test_a_thread_keeps_to_its_memory(policy, loaded, recordings, monkeypatch):
    held = Held(loaded, policy, monkeypatch)
    prompts = with_bytes(loaded, policy, waiting(loaded))
    memory = 4 * max(each.sequence_bytes for each in prompts)
    found = ask_all(loaded, policy, prompts, memory=memory, make=held.make)
    assert found == {each.index: alone(loaded, policy, each) for each in prompts}
    assert memory / 2 < held.most <= memory
