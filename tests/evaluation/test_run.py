"""What makes a finished measurement another one: whatever of the model its answers depend on."""

import copy
import dataclasses

import pytest

import kvtool
from kvtool.errors import UsageError
from kvtool.evaluation.arms import make_arms
from kvtool.evaluation.bench import Protocol, token_counter
from kvtool.evaluation.run import Run
from kvtool.evaluation.runner import draw_jobs
from kvtool.evaluation.store import Store
from kvtool.evaluation.tasks.niah import Needle
from kvtool.evaluation.tasks.reconstruct import Reconstruct
from kvtool.models.load import load


@pytest.fixture(scope="module")
def loaded():
    loaded = load()
    kvtool.attach(loaded.model)
    return loaded


@pytest.fixture(scope="module")
def jobs(loaded):
    task = Needle(name="niah", lengths="128", depths=[0, 100])
    return draw_jobs([task], token_counter(loaded.tokenizer, 8192), None)


def begin(store, loaded, jobs) -> Run:
    return Run.begin(
        store,
        name="run",
        argv=[],
        loaded=loaded,
        arms=make_arms(["streaming"], ["32"]),
        jobs=jobs,
        protocol=Protocol(),
        gates=[],
    )


def left(store, loaded, jobs) -> int:
    return len(begin(store, loaded, jobs).unfinished(jobs))


def measure(store, loaded, jobs) -> None:
    run = begin(store, loaded, jobs)
    run.measure(run.unfinished(jobs), jobs, loaded, lambda step: None)


@pytest.fixture(scope="module")
def store(loaded, jobs, tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("run"))
    measure(store, loaded, jobs)
    return store


def test_the_same_model_loaded_anew_finds_everything_done(loaded, jobs, store):
    assert left(store, load(), jobs) == 0


def test_another_chat_template_is_another_measurement(loaded, jobs, store):
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    other = dataclasses.replace(loaded, tokenizer=tokenizer)
    assert left(store, other, jobs) == 4


def test_another_tokenizer_is_another_measurement(loaded, jobs, store):
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.add_tokens(["falcon"])
    other = dataclasses.replace(loaded, tokenizer=tokenizer)
    assert left(store, other, jobs) == 4


@pytest.mark.parametrize(("name", "value"), [("eos_token_id", 7), ("repetition_penalty", 1.3)])
def test_other_defaults_of_generation_are_another_measurement(
    loaded, jobs, store, monkeypatch, name, value
):
    monkeypatch.setattr(loaded.model.generation_config, name, value)
    assert left(store, loaded, jobs) == 4


def test_scoring_anew_needs_the_packages_that_scoring_needs(loaded, tmp_path, monkeypatch):
    task = Reconstruct(name="reconstruct", lengths="16", samples=1)
    jobs = draw_jobs([task], token_counter(loaded.tokenizer, 8192), None)
    store = Store(tmp_path)
    measure(store, loaded, jobs)
    first = Run.open(store).results()
    assert first.of("full", "reconstruct").value == pytest.approx(100)
    monkeypatch.setattr("kvtool.evaluation.extras.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="task `reconstruct` needs"):
        Run.open(store)
