"""The READMEs keep their word: sessions, commands and Python run as printed, tables are complete.

Of every page, blocks marked `console` run and print the lines below their commands, equal but for
times, rates and the widths of columns; commands of `bash` blocks and of tables run, comparisons
(`kvtool eval`) as a dry run; blocks marked `python` at the beginning of a line run one after
another in one namespace. A small local model stands in for every model of
the hub. The main job alone is in the default tier.
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from kvtool.cli.main import main
from kvtool.models.reference.tasks import needle_prompt
from kvtool.policies.table import BASES, MODIFIERS, describe
from tests.docs.test_own_harness_task import write_harness_task
from tests.models import tiny_gguf
from tests.models.bundled import shipped
from tests.models.published import LLAMA_3
from tests.tiers import first

ROOT = Path(__file__).parents[1]
FIRST = ROOT / "README.md"
PAGES = [
    FIRST,
    *sorted(
        page
        for room in ("kvtool", "recipes", "tests")
        for name in ("README.md", "reference.md")
        for page in (ROOT / room).rglob(name)
    ),
]
TEXT = {page: page.read_text(encoding="utf-8") for page in PAGES}
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
OTHERS = r"\b(MODEL|FOLDER)\b"  # a model and data of the reader's
TIMES = [
    re.compile(r"(?<![\w.,])[\d.,]+(?= (?:tokens/s|s)\b)"),  # 109.2 tokens/s after 0.18 s
    re.compile(r"(?<=\dx)\s+[\d.]+\s+[\d.]+\s+[\d.]+x"),  # of a table: 0.057   153.5 1.00x
]
CHAT = [
    '{"user": "The secret code for falcon: 7429103."}',
    '{"user": "The secret code for falcon:"}',
]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT[page], re.DOTALL | re.MULTILINE)


def sessions() -> Iterator:
    """Of each console block, the commands and what is printed below each."""
    for page in PAGES:
        for number, block in enumerate(blocks(page, "console")):
            steps = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
            session = [tuple((step + "\n").split("\n", 1)) for step in steps]
            main_job = page == FIRST and number == 0
            marks = () if main_job else pytest.mark.exhaustive
            yield pytest.param(session, id=f"{name_of(page)}-{number}", marks=marks)


def commands() -> Iterator:
    """Of each page, the commands of its bash blocks and tables that are not comparisons alone."""
    for page in PAGES:
        found = [line for block in blocks(page, "bash") for line in block.splitlines()]
        rows = [line for line in TEXT[page].splitlines() if line.startswith("|")]
        found += [code for row in rows for code in re.findall(r"`(kvtool [^`]* [^`]*)`", row)]
        found = [line for line in found if re.match(r"kvtool (?!eval )", line)]
        if found:
            yield pytest.param(found, id=name_of(page))


def evaluations() -> list[str]:
    """The `kvtool eval` commands outside sessions that need no data of the reader's."""
    lines = [line for page in PAGES for line in TEXT[page].splitlines()]
    lines = [re.sub(r"^torchrun .*? -m (?=kvtool eval )", "", line) for line in lines]
    found = [line for line in lines if line.startswith("kvtool eval ") and "FOLDER" not in line]
    return list(dict.fromkeys(found))


def launches() -> list[str]:
    """The commands in several processes that need no model of the reader's, but comparisons."""
    lines = [line for page in PAGES for line in TEXT[page].splitlines()]
    found = [line for line in lines if line.startswith("torchrun ") and " eval " not in line]
    return [line for line in found if not re.search(OTHERS, line)]


def as_compared(text: str) -> str:
    """Mask times and rates, and with them the widths of tables, which vary from run to run.

    Answers, scores and bytes do not: they were the same without any vector instructions of the CPU.
    """
    text = re.sub(r"^measured .*, not finished\n", "", text, flags=re.MULTILINE)  # where it is slow
    for pattern in TIMES:
        text = pattern.sub("#", text)
    return re.sub(r"[ ─]+", " ", text).replace(" \n", "\n").strip()


@pytest.fixture
def folder(shipped_model, tmp_path) -> Path:
    """A folder with the files that commands read, and Llama 3.1 8B without its weights."""
    llama = tmp_path / "llama"
    shutil.copytree(shipped(), llama, ignore=shutil.ignore_patterns("*.safetensors"))
    (llama / "config.json").write_text(json.dumps(LLAMA_3))
    (llama / "generation_config.json").unlink(missing_ok=True)
    save_file({}, llama / "model.safetensors")
    text, _ = needle_prompt(tokens=2600, seed=1)
    (tmp_path / "book.txt").write_text(text)
    (tmp_path / "log.txt").write_text(text)
    novels = tmp_path / "texts" / "austen"  # what `python recipes/texts.py austen` fetches
    novels.mkdir(parents=True)
    (novels / "austen.txt").write_text(text)
    for name in ("novels", "chapters"):
        (novels / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    write_harness_task(tmp_path)
    (tmp_path / "chat.jsonl").write_text("\n".join(CHAT))
    if importlib.util.find_spec("gguf") is not None:
        tiny_gguf.write(tmp_path / "model.gguf")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    return tmp_path


def with_local_model(command: str) -> str:
    """Put local models in place of those of the hub and of the reader's."""
    command = command.replace(LLAMA, "llama")
    return re.sub(r"(?<=-m )(Qwen/\S+|MODEL|DIR|smollm2)", str(shipped()), command)


def run(command: str, folder: Path) -> subprocess.CompletedProcess:
    scripts = Path(sys.executable).parent
    path = f"{scripts}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{{ {command}\n}} 2>&1"],
        cwd=folder,
        env=os.environ | {"PATH": path, "COLUMNS": "100"},
        capture_output=True,
        text=True,
    )


def run_session(session: list[tuple[str, str]], folder: Path) -> Iterator[tuple[str, str]]:
    """Yield what each command prints here and what its page says."""
    for command, printed in session:
        assert command.startswith("kvtool ")
        unfilled = LLAMA in command and "plan-budget" not in command
        done = run(with_local_model(command) + (" --dry-run" if unfilled else ""), folder)
        assert done.returncode == 0, done.stdout
        if not unfilled:
            yield done.stdout, printed


@pytest.mark.exhaustive
@pytest.mark.parametrize("session", list(sessions()))
def test_sessions_run_as_printed(session, folder):
    for here, printed in run_session(session, folder):
        assert as_compared(here) == as_compared(printed)


def test_all_that_is_printed_is_compared_but_times_and_rates():
    """Every digit and letter of a session, changed by hand, makes another text."""
    for block in [block for page in PAGES for block in blocks(page, "console")]:
        for line in block.splitlines():
            times = {
                at
                for pattern in TIMES
                for each in pattern.finditer(line)
                for at in range(*each.span())
            }
            assert len(times) < 30
            for at, letter in enumerate(line):
                changed = line[:at] + ("8" if letter != "8" else "3") + line[at + 1 :]
                if letter.isalnum() and at not in times:
                    assert as_compared(changed) != as_compared(line), (line, at)


def test_times_and_rates_are_masked():
    for line, compared in [
        (
            "7 tokens at 109.2 tokens/s after 0.18 s of prefill; kept 512 of 1022 tokens",
            "7 tokens at # tokens/s after # s of prefill; kept 512 of 1022 tokens",
        ),
        (
            " full      1.9 MiB 100%     2.0 MiB  1.00x     0.057   153.5 1.00x       9.0    0%",
            "full 1.9 MiB 100% 2.0 MiB 1.00x# 9.0 0%",
        ),
        ("measured 1/60: niah length=512 depth=0, not finished\nmeasured 12/60", "measured 12/60"),
        ("turn 2 seconds, 5 samples, 96.0 KiB (1.3x smaller)",) * 2,
    ]:
        assert as_compared(line) == compared


@pytest.mark.exhaustive
@pytest.mark.parametrize("lines", list(commands()))
def test_commands_run(lines, folder, monkeypatch, capsys):
    """In the order of the page, since one may read what another has written."""
    monkeypatch.chdir(folder)
    for line in dict.fromkeys(lines):
        local = with_local_model(line)
        if re.search(r"[|>&]", local):
            done = run(local, folder)
            assert done.returncode == 0, f"{line}\n{done.stdout}"
        else:
            code = main(shlex.split(local)[1:])
            assert code == 0, f"{line}\n{capsys.readouterr().err}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", launches())
def test_commands_run_in_several_processes(command, folder):
    done = run(command, folder)
    assert done.returncode == 0, done.stdout
    assert done.stdout


@pytest.mark.parametrize("command", first(1, evaluations()))
def test_evaluations_are_understood(command, folder, monkeypatch):
    monkeypatch.chdir(folder)
    words = shlex.split(with_local_model(command))[1:]
    if "id: smollm2" in "".join(Path(word).read_text() for word in words if word.endswith(".yaml")):
        words += ["-m", str(shipped())]  # a package that is not always installed
    assert main([*words, "--dry-run", "-q"]) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_python_blocks_run(page, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    chatting = folder / "chatting"  # of a hub's model, which has a chat template
    shutil.copytree(shipped(), chatting)
    (chatting / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }} {% endfor %}"
    )
    names = {}
    for block in blocks(page, "python"):
        code = re.sub(r'"Qwen/[^"]+"', repr(str(chatting)), block)
        code = code.replace('"path/to/model"', repr(str(shipped())))
        exec(compile(code, name_of(page), "exec"), names)
    if page == FIRST:  # an answer alone, without the book
        answer = capsys.readouterr().out
        assert 0 < len(answer) < 4000 < len((folder / "book.txt").read_text())


@pytest.mark.exhaustive
def test_a_chat_of_100k_tokens_in_16_gib_is_what_its_plan_says(folder, monkeypatch, capsys):
    """The chat runs a way that the plan lists, which fits beside weights of 4 bits."""
    session = next(block for block in blocks(FIRST, "console") if LLAMA in block)
    plan_line, chat_line = (line[2:] for line in session.splitlines() if line.startswith("$ "))
    monkeypatch.chdir(folder)
    plan_words = shlex.split(with_local_model(plan_line).split(" | ")[0])[1:]
    assert main([*plan_words[: plan_words.index("-f")], "-f", "json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    way = next(each for each in plan["ways"] if each["policy"] == "full+k8v4")
    chat_words = shlex.split(with_local_model(chat_line))[1:]
    assert set(way["command"].split()[1:-1]) == set(chat_words[:-3])
    assert plan["target"]["context"] == 100 * 1024
    assert way["peak"]["block"] <= 16 * 2**30
    assert "--memory 16GiB --weights 4bit" in plan_line
    full = 2 * 32 * 8 * 128 * 2 * 100 * 1024  # keys and values in bfloat16
    assert full == 12.5 * 2**30
    assert "100K tokens with Llama-3.1-8B that\nis 12.5 GiB" in TEXT[FIRST]
    assert way["share_of_full"] == pytest.approx(way["bytes"] / full)


def test_the_sessions_were_found():
    assert len(list(sessions())) >= 6
    assert len(list(commands())) >= 2
    assert len(evaluations()) >= 5
    assert launches()


def test_the_first_page_is_short_and_begins_with_a_picture_and_the_two_commands():
    lines = TEXT[FIRST].splitlines()
    assert len(lines) <= 200
    for command in (
        "pip install -c constraints.txt -e . && kvtool generate -p h2o+caote",
        "pip install -c constraints.txt -e '.[test]' && pytest",
    ):
        assert lines.count(command) == 1
        assert lines.index(command) < 20
    picture = lines.index("<picture>")
    assert picture < 22
    for name in re.findall(r'src(?:set)?="([^"]+)"', "\n".join(lines[picture : picture + 4])):
        assert (ROOT / name).is_file()


def places(page: Path) -> set[str]:
    """What a link may lead to on a page: its titles, as GitHub spells them, and named anchors."""
    text = page.read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return anchors | {*re.findall(r'<a id="([^"]+)">', text)}


def test_links_lead_somewhere():
    lost = []
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]:
        text = page.read_text(encoding="utf-8")
        prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", prose):
            file, _, anchor = target.partition("#")
            to = (page.parent / file).resolve() if file else page
            if not to.exists() or (anchor and anchor not in places(to)):
                lost.append((name_of(page), target))
    assert lost == []


def test_every_policy_has_a_row():
    summaries = {entry.name: entry.summary for entry in describe()}
    table = TEXT[ROOT / "kvtool" / "policies" / "README.md"]
    rows = "\n".join(line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `"))
    first = [f"\n| `{name}` | {summaries[name]} |" for name in BASES]
    marks = [*(f"`{name}`" for name in BASES), *(f"`+{name}`" for name in MODIFIERS)]
    assert [row for row in first if row not in TEXT[FIRST]] == []
    assert [mark for mark in marks if mark not in TEXT[FIRST] or mark not in rows] == []


def test_the_first_page_counts_the_policies():
    assert f"{len(BASES)} policies" in TEXT[FIRST]
    assert f"{len(MODIFIERS)} modifiers" in TEXT[FIRST]


def test_the_families_have_their_place():
    assert "<!-- families -->" in TEXT[ROOT / "kvtool" / "models" / "reference.md"]
