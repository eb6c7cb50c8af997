"""`--tensor-parallel`: one model over several processes, and what several processes are refused."""

import json

import pytest
import transformers

from kvtool.documents.results import ResultsDocument
from kvtool.errors import KvtoolError, UsageError
from kvtool.models.load import load
from tests.launch import finish, launch

GENERATE = ("generate", "-p", "tova", "-b", "64", "-f", "json")
EVAL = ("eval", "-t", "niah", "--lengths", "256", "--depths", "3", "-p", "tova,snapkv")
EVAL = (*EVAL, "-b", "64", "--no-plots", "-f", "json", "-q")

splits_any_vocabulary = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 21),
    reason="transformers before 5.21 splits a vocabulary into equal parts only; this has 1195",
)


@pytest.mark.exhaustive
@splits_any_vocabulary
def test_generate_says_what_one_process_says(shipped_model, kvtool, tmp_path):
    alone = json.loads(kvtool(*GENERATE).out)
    program = ("-m", "kvtool", *GENERATE, "--tensor-parallel", "--compare-full")
    (code, out, err), second = finish(launch(2, *program, folder=tmp_path))
    assert (code, second) == (0, (0, "", "")), err
    split = json.loads(out)
    assert split["token_ids"] == alone["token_ids"]
    assert split["cache"] == alone["cache"]  # bytes of both processes
    assert err.count("model: reference") == 1
    assert err.count("prompt: a built-in text") == 1


@pytest.mark.exhaustive
@splits_any_vocabulary
def test_eval_scores_what_one_process_scores(shipped_model, kvtool, tmp_path):
    alone = ResultsDocument(**json.loads(kvtool(*EVAL, "-o", "alone").out))
    program = ("-m", "kvtool", *EVAL, "--tensor-parallel", "-o", "split", "--fail-under", "niah=1")
    ends = finish(launch(2, *program, folder=tmp_path))
    assert [(code, bool(out), err) for code, out, err in ends] == [(3, True, ""), (3, False, "")]
    split = ResultsDocument(**json.loads(ends[0][1]))
    assert split.complete
    for ours, theirs in zip(split.results, alone.results, strict=True):
        assert (ours.variant, ours.value, ours.n) == (theirs.variant, theirs.value, theirs.n)
        assert ours.cost.kv_bytes == theirs.cost.kv_bytes
    files = sorted((tmp_path / "split" / "samples").rglob("*.jsonl"))
    assert [len(file.read_text().splitlines()) for file in files] == [3, 3, 3]
    assert not (tmp_path / "split" / "parts").exists()


@pytest.fixture
def second_of_three(monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("command", ["generate", "profile"])
def test_several_processes_do_not_do_the_same(kvtool, second_of_three, command):
    done = kvtool(command)
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines() == [
        f"process 1: error: 3 processes were started, and kvtool {command} runs in one",
        "hint: generate --tensor-parallel splits the model over them, eval shares its samples",
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--tensor-parallel splits a model over processes, and there is one"),
        (("--device-map", "auto"), "--tensor-parallel and --device-map exclude each other"),
        (
            ("--device", "cpu"),
            "--tensor-parallel takes a device for each process, not --device cpu",
        ),
        (
            ("--save", "x.safetensors"),
            "--tensor-parallel excludes --save: each process has its own",
        ),
    ],
)
def test_what_tensor_parallelism_excludes_is_told(kvtool, flags, message):
    done = kvtool(*GENERATE, "--tensor-parallel", *flags)
    assert done.code == 2
    assert f"error: {message}" in done.err


def test_heads_that_cannot_be_split_are_refused(second_of_three):
    with pytest.raises(UsageError, match="2 KV heads cannot be split over 3 processes"):
        load(tensor_parallel=True)


def test_a_family_without_a_plan_is_refused(monkeypatch, tmp_path):
    from tests.models_for_tests import peaky_model

    peaky_model("stablelm").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(KvtoolError, match="no tensor-parallel plan for `stablelm`"):
        load(str(tmp_path), tensor_parallel=True)


def test_a_device_map_changes_nothing_that_is_said(kvtool):
    alone, spread = (
        json.loads(kvtool(*GENERATE, *more).out) for more in ((), ("--device-map", "auto"))
    )
    assert (spread["token_ids"], spread["cache"]) == (alone["token_ids"], alone["cache"])
