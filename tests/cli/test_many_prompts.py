"""`kvtool generate --prompts`: the answers that prompts get alone, each once."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from kvtool.calls.prompts import generate_many
from kvtool.documents.prompts import AnswersFile
from kvtool.errors import UsageError
from kvtool.generation import graphs as graphs_of_steps
from tests import tape

FACTS = "The secret code for falcon: 7429103. The old lamp was near the school. "
PROMPTS = [
    {"prompt": f"{FACTS}The secret code for falcon:", "id": "code", "max_new_tokens": 9},
    f"{FACTS}The old lamp was",
    {"prompt": "The old", "max_new_tokens": 3},
    f"{FACTS * 2}The",
]
ARGUMENTS = ("-p", "h2o", "-b", "24", "-n", "6")


@pytest.mark.parametrize("graphs", [True, False])
def test_many_answers_are_recorded_unless_told_not_to(
    kvtool, prompts, tmp_path, graphs, recordings
):
    """And the answers that are there count for both."""
    arguments = ["generate", "--prompts", prompts, *ARGUMENTS, "-o", "answers.jsonl"]
    assert kvtool(*arguments, *([] if graphs else ["--no-graphs"])).code == 0
    assert bool(recordings) == graphs
    again = kvtool(*arguments, *(["--no-graphs"] if graphs else []))
    assert (again.code, "nothing was left to answer" in again.err) == (0, True)


@pytest.fixture
def recordings(monkeypatch):
    """What is recorded, on a CPU."""
    made = []
    monkeypatch.setattr(graphs_of_steps, "recorder", tape.recorder(made))
    return made


@pytest.fixture
def prompts(tmp_path):
    lines = "".join(json.dumps(prompt) + "\n" for prompt in PROMPTS)
    (tmp_path / "prompts.jsonl").write_text(lines)
    return "prompts.jsonl"


def read(path):
    """The answers of a file, each of which has said what it depends on."""
    return read_lines(path.read_text(encoding="utf-8"))


def read_lines(text):
    lines = [json.loads(line) for line in text.split("\n")[:-1]]
    parts = {"prompt", "settings", "model", "policy", "package"}
    assert all("error" in line or line.pop("fingerprint").keys() == parts for line in lines)
    return lines


def alone(kvtool, prompt, index):
    """The answer of `generate` to one prompt."""
    asked = {"prompt": prompt} if isinstance(prompt, str) else prompt
    more = ["-n", str(asked["max_new_tokens"])] if "max_new_tokens" in asked else ["-n", "6"]
    done = kvtool(
        "generate", "-q", "-f", "json", "-p", "h2o", "-b", "24", "--prompt", asked["prompt"], *more
    )
    document = json.loads(done.out)
    return {
        "index": index,
        "id": asked.get("id"),
        "text": document["text"],
        "token_ids": document["token_ids"],
        "prompt_tokens": document["prompt_tokens"],
        "new_tokens": document["new_tokens"],
    }


def test_answers_are_in_order_and_those_that_prompts_get_alone(kvtool, prompts, tmp_path):
    expected = [alone(kvtool, prompt, index) for index, prompt in enumerate(PROMPTS)]
    done = kvtool("generate", "--prompts", prompts, *ARGUMENTS, "-o", "answers.jsonl")
    assert done.code == 0
    assert "up to 4 at a time" in done.err
    assert read(tmp_path / "answers.jsonl") == expected
    done = kvtool("generate", "-q", "--prompts", prompts, *ARGUMENTS)
    assert done.out == "".join(f"{each['text']}\n" for each in expected)
    found = generate_many(None, PROMPTS[:2], "h2o", 24, max_new_tokens=6)
    assert [answer.text for answer in found] == [each["text"] for each in expected[:2]]


def test_a_memory_bounds_the_rows_and_one_too_small_is_refused(kvtool, prompts):
    done = kvtool("generate", "--prompts", prompts, *ARGUMENTS, "-f", "json")
    few = kvtool("generate", "--prompts", prompts, *ARGUMENTS, "-f", "json", "--memory", "120KiB")
    assert few.out == done.out
    assert "up to 2 at a time" in few.err
    none = kvtool("generate", "--prompts", prompts, *ARGUMENTS, "--memory", "9KiB")
    assert none.code == 1
    assert "bytes of cache, and the memory is 9216" in none.err


def test_wherever_a_run_ends_no_answer_is_lost_or_doubled(kvtool, prompts, tmp_path):
    path = tmp_path / "answers.jsonl"
    arguments = ("generate", "--prompts", prompts, *ARGUMENTS, "-o", "answers.jsonl", "-q")
    assert kvtool(*arguments).code == 0
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    beginnings = [  # what a killed run may leave: answers in any order, the last one not whole
        lines[2] + lines[0][:30],
        lines[3][:-1],
        whole,
    ]
    for left in beginnings:
        path.write_bytes(left)
        done = kvtool(*arguments)
        assert (done.code, done.err) == (0, "")
        assert path.read_bytes() == whole


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills with a signal of POSIX")
def test_a_killed_run_goes_on(shipped_model, kvtool, prompts, tmp_path):
    with (tmp_path / prompts).open("a") as file:
        file.writelines(json.dumps(f"{FACTS}{i} The old") + "\n" for i in range(16))
    path = tmp_path / "answers.jsonl"
    arguments = ["generate", "--prompts", prompts, *ARGUMENTS, "--memory", "120KiB", "-o"]
    assert kvtool(*arguments, "unbroken.jsonl").code == 0
    command = [sys.executable, "-m", "kvtool", *arguments, "answers.jsonl", "-q"]
    with subprocess.Popen(command, cwd=tmp_path) as process:
        while process.poll() is None and (not path.exists() or path.stat().st_size < 800):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert 0 < len(path.read_bytes().splitlines()) < len(PROMPTS) + 16
    assert kvtool(*arguments, "answers.jsonl").code == 0
    assert path.read_bytes() == (tmp_path / "unbroken.jsonl").read_bytes()


def test_policies_whose_rows_cannot_join_run_one_by_one_and_it_is_said(kvtool, prompts):
    done = kvtool("generate", "--prompts", prompts, "-p", "quest", "-b", "24", "-n", "2")
    assert done.code == 0
    assert len(done.out.split("\n")) == 5
    assert "prompts are answered one by one: its tables are made for the rows" in done.err
    assert "up to 1 at a time" in done.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--prompt", "a"), "--prompts and --prompt exclude each other"),
        (("--turns", "prompts.jsonl"), "--prompts and --turns exclude each other"),
        (("--save", "a.safetensors"), "--prompts and --save exclude each other"),
        (("--compare-full",), "--prompts and --compare-full exclude each other"),
        (("-p", "h2o,tova"), "--prompts and several policies exclude each other"),
        (("--stream",), "--prompts and --stream exclude each other"),
        (("-f", "yaml"), "--prompts and --format yaml exclude each other"),
    ],
)
def test_what_does_not_go_with_many_prompts_is_refused(kvtool, prompts, arguments, told):
    settings = ARGUMENTS if "-p" not in arguments else ()
    done = kvtool("generate", "--prompts", prompts, *settings, *arguments)
    assert done.code == 2
    assert told in done.err


@pytest.fixture
def heard():
    """Let Ctrl-C be heard, also where whoever started the tests ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_ctrl_c_keeps_what_has_ended_and_a_further_run_goes_on(
    kvtool, prompts, tmp_path, monkeypatch
):
    sampled = ("generate", "--prompts", prompts, *ARGUMENTS, "--temperature", "0.8", "-o")
    assert kvtool(*sampled, "unbroken.jsonl").code == 0
    append = AnswersFile.append

    def press_after_the_first(file, answer):
        append(file, answer)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(AnswersFile, "append", press_after_the_first)
    assert kvtool(*sampled, "answers.jsonl").code == 130
    assert [line["index"] for line in read(tmp_path / "answers.jsonl")] == [2]  # 3 tokens, not 6
    monkeypatch.setattr(AnswersFile, "append", append)
    done = kvtool(*sampled, "answers.jsonl")
    assert done.code == 0
    assert "1 of 4 prompts are answered already" in done.err
    assert read(tmp_path / "answers.jsonl") == read(tmp_path / "unbroken.jsonl")


def test_a_bad_line_is_refused_with_its_number_before_the_work(
    kvtool, prompts, tmp_path, monkeypatch
):
    with (tmp_path / prompts).open("a") as file:
        file.write('{"prompt": "a", "max_tokens": 3}\n')

    def load(*arguments, **settings):
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("kvtool.models.attached.load", load)
    done = kvtool("generate", "--prompts", prompts, *ARGUMENTS, "-o", "answers.jsonl")
    assert done.code == 2
    assert "prompts.jsonl:5" in done.err
    assert "max_tokens" in done.err
    assert not (tmp_path / "answers.jsonl").exists()
    (tmp_path / "none.jsonl").write_text("")
    none = kvtool("generate", "--prompts", "none.jsonl")
    assert none.code == 2
    assert "`none.jsonl` holds no prompt" in none.err


def test_a_prompt_too_short_for_its_share_is_told_by_its_place(kvtool, prompts):
    done = kvtool("generate", "--prompts", prompts, "-p", "streaming(sinks=4)", "-b", "50%")
    assert done.code == 2
    assert "error: prompt 2: " in done.err


def test_without_a_memory_half_of_what_is_free_bounds_the_rows(kvtool, prompts, monkeypatch):
    room = "kvtool.models.placement.free_memory"
    monkeypatch.setattr(room, lambda *unused, **settings: ("cpu", 240 * 1024))
    assert "up to 2 at a time" in kvtool("generate", "--prompts", prompts, *ARGUMENTS).err
    monkeypatch.setattr("kvtool.calls.request._MOST_ROWS", 3)
    monkeypatch.setattr(room, lambda *unused, **settings: ("cpu", None))
    assert "up to 3 at a time" in kvtool("generate", "--prompts", prompts, *ARGUMENTS).err


def test_a_dry_run_tells_what_would_run(kvtool, prompts):
    done = kvtool(
        "generate",
        "--prompts",
        prompts,
        "-p",
        "quest",
        "--memory",
        "2MiB",
        "--dry-run",
        "-f",
        "json",
    )
    told = json.loads(done.out)
    assert (told["prompts"], told["max_new_tokens"], told["memory_bytes"]) == (4, 128, 2**21)
    assert told["one_by_one"] == "its tables are made for the rows that were read together"


def test_answers_to_other_prompts_are_refused(kvtool, prompts, tmp_path):
    (tmp_path / "one.jsonl").write_text('"The old"\n')
    assert kvtool("generate", "--prompts", "one.jsonl", *ARGUMENTS, "-o", "a.jsonl").code == 0
    before = (tmp_path / "a.jsonl").read_bytes()
    done = kvtool("generate", "--prompts", prompts, *ARGUMENTS, "-o", "a.jsonl")
    assert done.code == 2
    assert "is one to another prompt" in done.err
    more = kvtool("generate", "--prompts", "one.jsonl", "-p", "h2o", "-n", "7", "-o", "a.jsonl")
    assert more.code == 2
    assert "that is there has 6 tokens, and 7 are asked for" in more.err
    fewer = kvtool("generate", "--prompts", "one.jsonl", "-p", "h2o", "-n", "5", "-o", "a.jsonl")
    assert "that is there has 6 tokens, and 5 are asked for" in fewer.err
    assert (tmp_path / "a.jsonl").read_bytes() == before
    with pytest.raises(UsageError, match="prompt 0: "):
        generate_many(None, [3], "h2o", 24)


def test_bad_prompts_are_skipped_alone_where_that_is_asked_for(kvtool, tmp_path):
    """As a prompt of which rocketkv's first stage would leave less than its window."""
    lines = [
        '{"prompt": "The old lamp was near the school. The", "id": "short"}',
        json.dumps({"prompt": FACTS * 2, "id": "between"}),
        '{"prompt": 3}',
        '{"messages": [{"role": "tool", "content": "4"}]}',
        json.dumps({"prompt": FACTS * 5, "id": "long"}),
    ]
    (tmp_path / "mixed.jsonl").write_text("\n".join(lines))
    arguments = ["generate", "--prompts", "mixed.jsonl", "-p", "rocketkv", "-b", "16", "-n", "16"]
    done = kvtool(*arguments)
    assert (done.code, done.out) == (2, "")
    assert "mixed.jsonl:3:1" in done.err
    done = kvtool(*arguments, "--skip-bad", "-o", "answers.jsonl")
    assert done.code == 4
    assert "3 of 5 prompts could not be answered" in done.err
    found = read(tmp_path / "answers.jsonl")
    assert [each["index"] for each in found] == list(range(5))
    assert [each["id"] for each in found] == ["short", "between", None, None, "long"]
    assert ["error" in each for each in found] == [False, True, True, True, False]
    assert "fewer than its window of 32" in found[1]["error"]
    assert "mixed.jsonl:3:1: prompt: must be text" in found[2]["error"]
    assert "no role `tool`" in found[3]["error"]
    for each in (found[0], found[4]):
        asked = json.loads(lines[each["index"]])["prompt"]
        document = kvtool(*arguments[:1], "-q", "-f", "json", *arguments[3:], "--prompt", asked)
        assert each["token_ids"] == json.loads(document.out)["token_ids"]
    again = kvtool(*arguments, "--skip-bad", "-o", "answers.jsonl")
    assert again.code == 4
    assert "2 of 5 prompts are answered already" in again.err
    assert read(tmp_path / "answers.jsonl") == found
    done = kvtool(*arguments, "--skip-bad", "-f", "json", "-q")
    assert (done.code, read_lines(done.out)) == (4, found)


def test_a_prompt_beyond_the_memory_is_skipped_alone(kvtool, tmp_path):
    lines = [json.dumps("The old"), json.dumps(FACTS * 9)]
    (tmp_path / "sizes.jsonl").write_text("\n".join(lines))
    arguments = ["generate", "--prompts", "sizes.jsonl", "-p", "full", "-n", "2", "-f", "json"]
    done = kvtool(*arguments, "--memory", "64KiB")
    assert done.code == 1
    done = kvtool(*arguments, "--memory", "64KiB", "--skip-bad", "-q")
    first, second = (json.loads(line) for line in done.out.splitlines())
    assert (done.code, "error" in first, "error" in second) == (4, False, True)
    assert "bytes of cache, of 65536" in second["error"]


def test_skipping_and_memory_go_with_prompts(kvtool):
    assert kvtool("generate", "--memory", "8GiB").code == 2
    done = kvtool("generate", "--skip-bad", "--prompt", "a")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: --skip-bad goes with --prompts")


SWAPPED = ["the magnet was near the lamp", "the lamp was near the school"]


def write(path, prompts):
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))


@pytest.mark.parametrize(
    ("prompts", "arguments", "told"),
    [
        (SWAPPED[::-1], (), "is one to another prompt"),
        (SWAPPED, ("-p", "streaming", "-b", "8"), "under other settings"),
        (SWAPPED, ("--temperature", "0.5"), "is one to another prompt"),
        (SWAPPED, ("--stop", "lamp"), "under other settings"),
        (SWAPPED, ("--dtype", "bfloat16"), "is another model's"),
        (SWAPPED, ("--attn-implementation", "eager"), "is another model's"),
        (SWAPPED, ("plan.yaml",), "under other settings"),
    ],
)
@pytest.mark.few(3)
def test_answers_to_changed_inputs_are_refused_and_overwritten(
    kvtool, tmp_path, prompts, arguments, told
):
    write(tmp_path / "p.jsonl", SWAPPED)
    run = ("generate", "--prompts", "p.jsonl", "-o", "a.jsonl", "-n", "3")
    plain = ("-p", "h2o", "-b", "8")
    assert kvtool(*run, *plain).code == 0
    before = (tmp_path / "a.jsonl").read_bytes()
    write(tmp_path / "p.jsonl", prompts)
    if "plan.yaml" in arguments:
        plan = ("plan-budget", "-b", "8", "--context", "64", "-o", "plan.yaml")
        assert kvtool(*plan).code == 0
        arguments = (*arguments, "-p", "h2o")
    else:
        given = {arguments[i] for i in range(0, len(arguments), 2)}
        arguments += tuple(
            each for i in (0, 2) if plain[i] not in given for each in plain[i : i + 2]
        )
    done = kvtool(*run, *arguments)
    assert done.code == 2
    assert told in done.err
    assert "hint: --overwrite answers anew, another --output keeps what is there" in done.err
    assert (tmp_path / "a.jsonl").read_bytes() == before
    assert kvtool(*run, *arguments, "--overwrite").code == 0
    elsewhere = [*run[:4], "b.jsonl", *run[5:], *arguments]
    assert kvtool(*elsewhere).code == 0
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_an_unchanged_command_answers_nothing_anew(kvtool, prompts, tmp_path, monkeypatch):
    run = ("generate", "--prompts", prompts, *ARGUMENTS, "-o", "a.jsonl")
    assert kvtool(*run).code == 0
    before = (tmp_path / "a.jsonl").read_bytes()

    def prefill(*arguments, **settings):
        raise AssertionError("the model runs")

    monkeypatch.setattr("kvtool.generation.serving.prefill", prefill)
    assert kvtool(*run, "--memory", "1MiB").code == 0
    assert (tmp_path / "a.jsonl").read_bytes() == before


def test_answers_that_do_not_say_what_they_depend_on_are_refused(kvtool, prompts, tmp_path):
    run = ("generate", "--prompts", prompts, *ARGUMENTS, "-o", "a.jsonl")
    assert kvtool(*run).code == 0
    write(tmp_path / "a.jsonl", read(tmp_path / "a.jsonl"))
    done = kvtool(*run)
    assert done.code == 2
    assert "does not say what it depends on: it is an earlier kvtool's" in done.err
    assert kvtool("generate", "--overwrite").code == 2
