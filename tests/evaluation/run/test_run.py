"""What makes a finished measurement another one: whatever of the model its answers depend on."""

import copy
import dataclasses
import json
import shutil

import pytest

import kvtool
from kvtool.documents.results import TaskSamples
from kvtool.documents.settings import Protocol
from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.run.collect import Measured, task_result
from kvtool.evaluation.run.index import read_task
from kvtool.evaluation.run.run import Run
from kvtool.evaluation.run.runner import draw_jobs
from kvtool.evaluation.run.store import Store
from kvtool.evaluation.samples.sample import token_counter
from kvtool.evaluation.tasks.fidelity import Reconstruct
from kvtool.evaluation.tasks.niah import Needle
from kvtool.evaluation.tasks.table import task_class
from kvtool.models.load import load
from tests.evaluation.echo import Echo
from tests.evaluation.variants import make_variants


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
    run = Run.plan(
        store,
        name="run",
        argv=[],
        loaded=loaded,
        variants=make_variants(["streaming"], ["32"]),
        jobs=jobs,
        protocol=Protocol(),
        gates=[],
    )
    run.start()
    return run


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


def test_other_tokens_templates_versions_and_defaults_are_another_measurement(loaded, jobs, store):
    chat, more = copy.deepcopy(loaded.tokenizer), copy.deepcopy(loaded.tokenizer)
    chat.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    more.add_tokens(["falcon"])
    for tokenizer in (chat, more):
        assert left(store, dataclasses.replace(loaded, tokenizer=tokenizer), jobs) == 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtool.evaluation.tasks.niah.samples_version", lambda source: 7)
        assert left(store, loaded, jobs) == 4
    for name, value in [("eos_token_id", 7), ("repetition_penalty", 1.3)]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loaded.model.generation_config, name, value)
            assert left(store, loaded, jobs) == 4


def test_scoring_anew_needs_the_packages_that_scoring_needs(loaded, tmp_path, monkeypatch):
    task = Reconstruct(name="reconstruct", lengths="16", samples=1)
    jobs = draw_jobs([task], token_counter(loaded.tokenizer, 8192), None)
    store = Store(tmp_path)
    measure(store, loaded, jobs)
    first = Run.open(store).results()
    assert first.of("full", "reconstruct").value == pytest.approx(100)
    monkeypatch.setattr("kvtool.extras.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="task `reconstruct` needs"):
        Run.open(store)


# ---- what a folder holds is checked by schemas


def altered(store, tmp_path, name, change):
    """Copy a run and change one of its files: the first line of a file of samples."""
    folder = tmp_path / "run"
    shutil.copytree(store.folder, folder)
    path = next(path for path in folder.rglob(name))
    first, *rest = path.read_text().splitlines() if name.endswith("l") else [path.read_text()]
    path.write_text("\n".join([change(first), *rest]) + "\n")
    return Store(folder)


def put(*way, value):
    def change(text):
        data = json.loads(text)
        inside = data
        for key in way[:-1]:
            inside = inside[key]
        inside[way[-1]] = value
        return json.dumps(data)

    return change


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("niah.jsonl", lambda line: "[" * 9000, "niah.jsonl:1 is not a record of a sample: nested"),
        ("niah.jsonl", lambda line: "9" * 5000, "a number of 5000 digits"),
        ("niah.jsonl", lambda line: '{"key": "a"}', "configuration: is required"),
        ("niah.jsonl", put("cost", value=[1]), "cost: must be a mapping, got a list"),
        ("niah.jsonl", put("cost", "kv_bytes", value=None), "cost: has no kv_bytes, and not all"),
        ("niah.jsonl", put("cost", "decode_s", value=-1), "cost.decode_s: must be at least 0"),
        ("niah.jsonl", put("scores", "em", value=1e200), "scores.em: must be at most"),
        ("niah.jsonl", put("id", value="\ud800"), "half of a surrogate pair"),
        ("niah.jsonl", put("cell", value=3), "cell: must be a mapping, got `3`"),
        ("niah.jsonl", put("turns", value=[]), "turns: list should have at least 1 item"),
        ("niah.jsonl", put("turns", 0, "prediction", value=7), "turns.0.prediction: must be text"),
        ("niah.jsonl", put("facts", value={"protocol": 1}), "facts.protocol: must be text"),
        ("samples.json", put("protocol", "seed", value="x"), "protocol.seed: must be a whole"),
        ("samples.json", put("protocol", "new", value=1), "samples.json` is damaged: protocol.new"),
        ("samples.json", put("tasks", 0, "settings", "depths", value=0), "damaged: niah: depths"),
        ("samples.json", put("tasks", 0, "settings", "name", value=[1]), None),
        ("samples.json", put("tasks", 0, "task", value="nniah"), "damaged: nniah: no task `nniah`"),
        ("samples.json", put("variants", 0, "name", value="../full"), "it calls `full` `../full`"),
        (
            "results.json",
            put("variants", value=3),
            "results.json` is damaged: variants: must be a list",
        ),
        ("results.json", lambda text: text.replace("null", "NaN", 1), "`NaN` is not a finite"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_files_that_no_run_has_written_are_refused(
    loaded, jobs, store, tmp_path, name, change, told
):
    other = altered(store, tmp_path, name, change)
    if told is None:
        assert Run.open(other).results().results[0].task == "niah", "as its entry says"
        return
    with pytest.raises(KvtoolError) as scored:
        Run.open(other).results()
    assert told in str(scored.value)
    if name == "niah.jsonl":
        with pytest.raises(KvtoolError) as resumed:
            begin(other, loaded, jobs)
        assert told in str(resumed.value)


def test_records_that_cannot_be_scored_are_told_by_task_and_variant():
    found = Measured("tova@32", Echo(name="echo"), [{"kept": "x"}], 0, 1, True, "")
    with pytest.raises(KvtoolError, match="tova@32, echo: the records cannot be scored: ValueErr"):
        task_result(found)


@pytest.mark.parametrize(
    "name", ["infinitebench/longbook_qa_eng", "scbench/summary", "longbench/qasper"]
)
def test_a_task_that_says_itself_what_it_needs_is_read_back(tmp_path, name):
    task = task_class(name)(name=name, data="rows.jsonl")
    settings = task.model_dump(mode="json", exclude={"name"})
    entry = TaskSamples(task=name, version=1, settings=settings, fingerprint="", samples=[])
    assert read_task(entry, Store(tmp_path)) == task
