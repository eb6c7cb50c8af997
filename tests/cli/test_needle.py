"""The first command: the built-in prompt is judged, and answered by two others beside it."""

import json
import re
import shlex

import pytest

import kvtool
from kvtool.cache.entry.build import build_cache
from kvtool.calls import needle
from kvtool.calls.generate import prepare_generation
from kvtool.calls.resolve import resolve_settings
from kvtool.calls.settings import GenerationSettings
from kvtool.evaluation.bench.prompts import first_prompt
from kvtool.evaluation.samples.sample import Sample, Turn
from kvtool.generation.conversation import Conversation
from kvtool.models.chat import make_frame
from kvtool.models.load import load
from kvtool.sizes import bytes_in_words
from kvtool.watcher import Listener, Watcher
from tests.calls.conftest import Listening
from tests.chat_templates import VICUNA

JUDGED = r"^(correct|wrong, the code is \d+|cut off, the code is \d+); \S+ \S+ held$"
OTHER = r'^(full cache|streaming, same budget): "(.*)" is (correct|wrong|cut off); (\S+ \S+) held$'
LOOK = "see which tokens were kept: add --show kept.html"


def _prepared(watcher, **settings):
    resolved = resolve_settings(GenerationSettings(**settings), "kvtool generate")
    return prepare_generation(*resolved, watcher)


def held(cache):
    return bytes_in_words(cache["allocated_bytes"] + cache["state_bytes"])


def alone(run, *arguments):
    """What a run of its own answers and holds."""
    prompt, code = needle.write_needle()
    done = run("generate", "-q", "-f", "json", "--prompt", prompt, "-n", "8", *arguments)
    document = json.loads(done.out)
    return document["text"].strip(), code in document["text"], held(document["cache"])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("policy", "budget"),
    [("tova", "20%"), ("quest", None)],
)
def test_what_stands_beside_the_answer_is_what_runs_of_their_own_come_to(kvtool, policy, budget):
    given = ("-b", budget) if budget else ()
    done = kvtool("generate", "-p", policy, *given)
    code = needle.write_needle()[1]
    assert done.code == 0
    *_, judged, full, streaming, look = done.err.splitlines()
    text, right, size = alone(kvtool, "-p", policy, *(given or ("-b", "512")))
    assert done.out == f" {text}\n"
    assert judged == f"{'correct' if right else f'wrong, the code is {code}'}; {size} held"
    others = {"full cache": ("-p", "full"), "streaming, same budget": ("-p", "streaming")}
    for line in (full, streaming):
        name, *told = re.fullmatch(OTHER, line).groups()
        more = (given or ("-b", "512")) if name != "full cache" else ()
        text, right, size = alone(kvtool, *others.pop(name), *more)
        assert told == [text, "correct" if right else "wrong", size]
    assert not others
    assert look == LOOK


def test_the_first_command_finds_what_a_window_of_the_same_size_loses(kvtool):
    done = kvtool("generate", "--policy", "h2o+caote")
    code = needle.write_needle()[1]
    assert done.out == f" {code}.\n"
    assert done.err.splitlines()[-4].startswith("correct; ")
    assert f'full cache: "{code}." is correct; ' in done.err
    assert re.search('^streaming, same budget: ".*" is wrong; ', done.err, re.MULTILINE)


def test_in_a_chat_the_answer_begins_as_it_does_in_benchmarks():
    loaded = load()
    loaded.tokenizer.chat_template = VICUNA
    request = _prepared(Watcher(), policy="full").request
    prompt, prefix = needle.write_needle()[0], request.answer_prefix
    assert re.fullmatch(r" The secret code for \w+:", prefix)
    talk = Conversation(loaded.model, loaded.tokenizer, build_cache(loaded.model, "full"))
    asked = first_prompt(
        loaded.tokenizer,
        make_frame(loaded.tokenizer, "auto", chat=True),
        Sample("needle", "", (Turn(prompt.removesuffix(prefix), ("1",), 8, prefix),)),
        max_length=None,
        truncate="error",
    )
    expected = loaded.tokenizer(asked.context + asked.question, add_special_tokens=asked.special)
    assert talk.turn_ids(request.turn)[0].tolist() == expected["input_ids"]
    said = talk.say(request.turn, max_new_tokens=4)
    begun = loaded.tokenizer(prefix, add_special_tokens=False)["input_ids"]
    heard = talk.cache.input_ids[0, -len(begun) - len(said.token_ids[0]) :].tolist()
    assert heard == [*begun, *said.token_ids[0]]
    assert talk._answered == len(heard)  # a further turn has the beginning in the answer


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (" 72829.", "correct"),
        (" 7 2829", "wrong, the code is 72829"),
        (" 728291", "wrong, the code is 72829"),
        (" 728", "cut off, the code is 72829"),
        ("", "cut off, the code is 72829"),
        (" 729", "wrong, the code is 72829"),
    ],
)
def test_answers_are_judged_by_the_code(text, told):
    assert needle.judge(text, "72829") == told


def judged(err):
    return re.findall(JUDGED, err, re.MULTILINE), re.findall(OTHER, err, re.MULTILINE)


def test_an_answer_that_is_cut_off_is_told_so(kvtool):
    (mine,), (full, streaming) = judged(kvtool("generate", "-p", "h2o", "-n", "2").err)
    assert mine.startswith("cut off, the code is ")
    assert full[2] == "cut off"
    assert streaming[0] == "streaming, same budget"


def test_a_policy_is_not_held_against_itself(kvtool):
    done = kvtool("generate", "-p", "streaming", "-b", "20%")
    assert [other[0] for other in judged(done.err)[1]] == ["full cache"]
    done = kvtool("generate")
    assert judged(done.err) == (["correct"], [])
    assert LOOK not in done.err
    done = kvtool("generate", "-p", "recency", "-b", "3")
    assert "\nstreaming, same budget: budget 3 is not above sinks 4 " in done.err
    assert [other[0] for other in judged(done.err)[1]] == ["full cache"]


@pytest.mark.parametrize("arguments", [("-q",), ("-q", "-f", "json")])
def test_quiet_runs_nothing_beside(kvtool, monkeypatch, arguments):
    def fail(*args, **more):
        raise AssertionError("something ran")

    monkeypatch.setattr("kvtool.calls.conversation.compare_needle", fail)
    done = kvtool("generate", "-p", "h2o", *arguments)
    assert (done.code, done.err) == (0, "")
    assert "AssertionError: something ran" in kvtool("generate", "-p", "h2o").err


def test_documents_are_pure(kvtool, tmp_path):
    quiet = json.loads(kvtool("generate", "-p", "h2o", "-q", "-f", "json").out)
    for arguments in (("-f", "json"), ("-o", "answer.json")):
        done = kvtool("generate", "-p", "h2o", *arguments)
        text = done.out or (tmp_path / "answer.json").read_text()
        assert json.loads(text).keys() == quiet.keys()
        assert json.loads(text)["token_ids"] == quiet["token_ids"]
        assert len(judged(done.err)[1]) == 2


def test_the_saved_cache_is_that_of_the_answer(kvtool):
    assert kvtool("generate", "-p", "h2o", "--save", "a.st").code == 0
    assert kvtool("generate", "-q", "-p", "h2o", "-n", "8", "--save", "b.st").code == 0
    documents = [
        json.loads(kvtool("generate", "-q", "-f", "json", "--cache", name, "-n", "4").out)
        for name in ("a.st", "b.st")
    ]
    for document in documents:
        del document["timing"]
    assert documents[0] == documents[1]
    assert documents[0]["policy"] == "h2o"


@pytest.mark.parametrize("given", ["--prompt", "--turns", "--cache"])
def test_prompts_of_the_user_are_not_judged(kvtool, tmp_path, given):
    (tmp_path / "turns.txt").write_text("Where is the falcon?\n")
    if given == "--cache":
        kvtool("compress", "--prompt", "The falcon.", "-p", "h2o", "-b", "9", "--save", "a.st")
    policy = () if given == "--cache" else ("-p", "h2o", "-b", "9")
    value = {"--prompt": "The falcon", "--turns": "turns.txt", "--cache": "a.st"}[given]
    done = kvtool("generate", given, value, "-n", "2", *policy)
    assert done.code == 0
    assert judged(done.err) == ([], [])


def test_long_answers_are_not_made_three_times(kvtool, monkeypatch):
    monkeypatch.setattr(needle, "_PATIENCE", 0.0)
    done = kvtool("generate", "-p", "h2o")
    assert judged(done.err) == (["correct"], [])
    assert LOOK in done.err
    (said,) = (line for line in done.err.splitlines() if line.startswith("full cache: not run, as"))
    command = shlex.split(said.partition("; run ")[2])
    assert command == ["kvtool", "generate", "-m", "reference", "-p", "full"]
    full = kvtool(*command[1:])
    assert judged(full.err) == (["correct"], [])
    assert "full cache: not run" not in full.err


def test_an_answer_that_somebody_ends_is_not_judged():
    told = Listening()
    run = _prepared(told, policy="h2o", budget="64")
    run.run(told, Listener(stop_when=lambda: True)).finish(told)
    assert not any("held" in line for line in told.told)


def test_python_calls_make_one_answer(monkeypatch):
    made = []
    monkeypatch.setattr(
        "kvtool.calls.conversation.compare_needle", lambda *args, **more: made.append(args)
    )
    kvtool.generate(policy="h2o", budget=64)
    assert made == []
    kvtool.generate(policy="h2o", budget=64, watcher=Listening())
    assert len(made) == 1
