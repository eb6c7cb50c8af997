"""Control characters of whatever others wrote: a terminal shows them, a pipe gets them."""

import io
import json
import shutil
import sys
from itertools import count
from types import SimpleNamespace

import pytest
from rich.table import Table

from kvtool.cli.terminal import Terminal
from kvtool.errors import visible
from kvtool.models import reference

ESCAPE = "\x1b]0;gone\x07\x1b[2J"
SHOWN = "\\x1b]0;gone\\x07\\x1b[2J"
KVTOOL = (sys.executable, "-m", "kvtool")


def test_control_characters_are_spelled_and_nothing_else_is_touched():
    for code in range(0x300):
        plain = chr(code) in "\n\t" or 0x20 <= code < 0x7F or code >= 0xA0
        assert visible(chr(code)) == (chr(code) if plain else f"\\x{code:02x}")
    assert visible("naïve 日本 👩‍👧 \u200f") == "naïve 日本 👩‍👧 \u200f"


@pytest.mark.parametrize("interactive", [True, False])
def test_data_is_filtered_for_a_person_alone(interactive):
    data = io.StringIO()
    terminal = Terminal(data, interactive=interactive, quiet=False, progress=False)
    terminal.write(ESCAPE)
    assert data.getvalue() == (SHOWN if interactive else ESCAPE)


def test_a_table_keeps_its_own_colours(monkeypatch):
    data = io.StringIO()
    data.isatty = lambda: True
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    table = Table("model")
    table.add_row(ESCAPE, style="bold")
    Terminal(data, interactive=True, quiet=False, progress=False).print(table)
    assert "\x1b[1m" in data.getvalue()
    assert "\\x1b]0;gone\\x1b[2J" in data.getvalue()  # rich leaves the bell out by itself
    assert "\x1b]0" not in data.getvalue()


@pytest.fixture
def hostile(tmp_path):
    """The bundled model, whose tokenizer speaks an escape sequence in place of full stops."""
    shutil.copytree(reference.path(), tmp_path / "hostile")
    path = tmp_path / "hostile" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    replace = {"type": "Replace", "pattern": {"String": "."}, "content": ESCAPE}
    tokenizer["decoder"]["decoders"].insert(0, replace)
    path.write_text(json.dumps(tokenizer))
    return str(tmp_path / "hostile")


QUESTION = ("--prompt", "The secret code for falcon: 7429103. The secret code for falcon:")


@pytest.mark.exhaustive
def test_generated_text(kvtool, on_terminal, hostile):
    piped = kvtool("generate", "-q", "-m", hostile, *QUESTION, "-n", "8")
    assert piped.out == f" 7429103{ESCAPE}\n"
    command = ("generate", "-q", "-m", hostile, *QUESTION, "-n", "8")
    assert on_terminal(*KVTOOL, *command, columns=100) == f" 7429103{SHOWN}\r\n"


@pytest.mark.exhaustive
def test_turns_and_names_of_models(on_terminal, tmp_path):
    folder = tmp_path / f"model{ESCAPE}"
    shutil.copytree(reference.path(), folder)
    turns = tmp_path / "turns.jsonl"
    turns.write_text(json.dumps({"user": f"Hello {ESCAPE} there"}) + "\n")
    command = ("generate", "-m", str(folder), "--turns", str(turns), "-n", "1")
    shown = on_terminal(*KVTOOL, *command, columns=300, notes=True)
    assert f"turn 1: Hello {SHOWN} there" in shown
    assert not {"\x07", "\x1b"} & set(shown)


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "-p", f"h2o{ESCAPE}"),
        ("generate", "--prompt-file", ESCAPE),
        ("eval", "-t", f"niah{ESCAPE}", "-p", "h2o"),
    ],
    ids=ascii,
)
@pytest.mark.parametrize("interactive", [True, False])
def test_messages(kvtool, monkeypatch, arguments, interactive):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: interactive)
    done = kvtool(*arguments)
    assert done.code in (1, 2)
    assert ("\x1b" in done.err) is not interactive
    assert (SHOWN[:8] in done.err) is interactive


def test_the_model_is_named_before_it_is_loaded_on_a_terminal_alone(kvtool, monkeypatch):
    command = ("compress", "-p", "h2o", "-b", "16", "--prompt", "The old lamp", "--save", "a.st")
    assert "loading" not in kvtool(*command).err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert kvtool(*command, "--no-progress").err.startswith("loading the model ..\n")
    named = kvtool(*command, "-m", str(reference.path()), "--no-progress").err
    assert named.startswith(f"loading {reference.path()} ..\n")
    for flag in ("-q", "--dry-run"):
        assert "loading" not in kvtool(*command, flag).err


@pytest.mark.parametrize("command", ["generate", "compress"])
def test_a_long_prompt_has_a_bar(kvtool, monkeypatch, tmp_path, command):
    monkeypatch.setattr("kvtool.generation.reading._PATIENCE", 0.0)
    monkeypatch.setattr("kvtool.generation.reading._LONG", 64)
    (tmp_path / "book.txt").write_text("The old lamp was near the school. " * 10)
    more = ["-n", "1"] if command == "generate" else ["--save", "a.st"]
    given = (command, "-p", "h2o", "-b", "16", "--prefill", "block:32", "--prompt-file", "book.txt")
    assert "tokens of the prompt read" in kvtool(*given, *more, "--progress").err
    for flags in ([], ["--no-progress"], ["-q"], ["-q", "--progress"]):
        assert "tokens of the prompt" not in kvtool(*given, *more, *flags).err


def test_many_prompts_have_a_bar(kvtool, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "The old lamp"}\n{"prompt": "A falcon"}\n')
    given = ("generate", "--prompts", "a.jsonl", "-n", "2")
    assert "2/2" in kvtool(*given, "--progress").err
    assert "2/2" not in kvtool(*given).err


def test_long_commands_say_how_far_they_are_where_no_bar_is(kvtool, tmp_path, monkeypatch):
    """Ten prompts, a step apart; here a second passes at each look at the clock."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "The old lamp"}\n' * 10)
    given = ("generate", "--prompts", "a.jsonl", "-n", "2")
    assert " of 10 (" not in kvtool(*given).err  # short
    clock = SimpleNamespace(monotonic=count().__next__)
    monkeypatch.setattr("kvtool.cli.terminal.time", clock)
    monkeypatch.setattr("kvtool.cli.terminal._FIRST_LINE", 2.0)
    lines = [line for line in kvtool(*given).err.splitlines() if " of 10 (" in line]
    assert lines == [f"{n} of 10 ({n}0 %): prompts answered" for n in (2, 6)]
    for flags in (["--no-progress"], ["-q"]):
        assert " of 10 (" not in kvtool(*given, *flags).err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert " of 10 (" not in kvtool(*given).err
