"""What a command imports before it refuses or answers: modules, not seconds."""

import http.server
import json
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path

import pytest

from kvtool.models import reference
from kvtool.transformers_versions import reads_plain_configs

HEAVY = ["torch", "transformers", "numpy", "datasets", "pydantic", "matplotlib"]
PROGRAM = """
import contextlib, io, json, sys
commands, watched = json.loads(sys.argv[1])
from kvtool.cli.main import main
done, before = [], set()
for command in commands:
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        code = main(command)
    new = {*watched} & {*sys.modules} - before
    before |= new
    done.append([code, sorted(new), said.getvalue().splitlines()])
print(json.dumps(done))
"""


def ended(*commands, watched=HEAVY, **more):
    """Run commands, one after another in a process of their own.

    Returns:
        Of each command its exit code, what it was the first to import of `watched`, and the lines
        that it said.
    """
    run = [sys.executable, "-c", PROGRAM, json.dumps([commands, watched])]
    done = subprocess.run(run, capture_output=True, text=True, **more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_lists_of_policies_and_typos_in_them_need_nothing():
    typos = {
        ("generate", "-p", "h20"): "no policy named `h20`",
        ("generate", "-p", "h2o,snapkw"): "no policy named `snapkw`",
        ("compress", "-p", "h2o(recnt=8)"): "`h2o` has no parameter `recnt`",
        ("plan-budget", "-b", "64", "-p", "quest+caote"): "`quest` keeps everything",
        ("eval", "-t", "niah", "-p", "h2o,snapkw"): "no policy named `snapkw`",
    }
    lists = [("policies",), ("policies", "-f", "json"), ("policies", "calidrop")]
    found = ended(*lists, *typos)
    assert [each[:2] for each in found] == [[0, []]] * len(lists) + [[2, []]] * len(typos)
    for (*_, lines), told in zip(found[len(lists) :], typos.values(), strict=True):
        assert any(told in line for line in lines)


def test_bad_recipes_and_files_are_refused_without_torch(tmp_path):
    told = {
        "polcy: h2o": "a.yaml:3:1: polcy: unknown key `polcy`",
        "policy: h20": "no policy named `h20`",
        "budget: [oops": "not valid YAML",
        "budget: -3": "a.yaml:3:",
    }
    commands = []
    for number, line in enumerate(told):
        (tmp_path / str(number)).mkdir()
        recipe = tmp_path / str(number) / "a.yaml"
        recipe.write_text(f"kind: recipe\nschema_version: 1\n{line}\n")
        commands.append(("generate", str(recipe)))
    (tmp_path / "some.gguf").write_text("<html>")
    found = ended(*commands, ("generate", "-m", str(tmp_path)))
    assert [each[:2] for each in found] == [[2, ["pydantic"]], *[[2, []]] * len(told)]
    for (*_, lines), said in zip(found, told.values(), strict=False):
        assert said in lines[0]
    assert found[-1][2][-1] == f"error: `{tmp_path}` is no GGUF file"


@pytest.mark.skipif(not reads_plain_configs(), reason="transformers reads the configuration")
def test_a_plan_from_a_configuration_needs_no_torch(tmp_path):
    (tmp_path / "config.json").write_bytes((reference.path() / "config.json").read_bytes())
    usual = ("plan-budget", "-m", str(tmp_path), "--context", "1K")
    found = ended(
        (*usual, "-b", "64", "-p", "h2o"),
        (*usual, "-b", "64", "-p", "snapkv+caote", "-f", "text"),
        (*usual, "--bytes", "1MiB"),
        (*usual, "--memory", "24GiB", "-f", "text"),
    )
    assert [each[:2] for each in found] == [[0, ["pydantic"]], *[[0, []]] * 3]


@pytest.mark.skipif(not version("torch").endswith("+cpu"), reason="torch is asked for GPUs")
@pytest.mark.skipif(not reads_plain_configs(), reason="transformers reads the configuration")
def test_a_plan_for_the_bundled_model_needs_no_torch_that_knows_no_gpus():
    ((code, imported, lines),) = ended(("plan-budget", "--context", "1K", "-b", "64"))
    assert "dtype: float32, in which it would run here (change: --dtype)" in lines
    assert (code, imported) == (0, ["pydantic"])


@pytest.mark.skipif(not reads_plain_configs(), reason="transformers reads the configuration")
def test_ways_as_text_come_without_what_they_do_not_use(tmp_path):
    """Half a second of processor time leaves no room for YAML, profiles or settings of prompts."""
    (tmp_path / "config.json").write_bytes((reference.path() / "config.json").read_bytes())
    unused = ["torch", "transformers", "numpy", "yaml", "kvtool.calls.settings"]
    unused += [f"kvtool.documents.{name}" for name in ("profile", "results", "recipe")]
    command = ("plan-budget", "-m", str(tmp_path), "--memory", "8MiB", "-q", "-f", "text")
    assert ended((*command, "-o", str(tmp_path / "a.txt")), watched=unused) == [[0, [], []]]
    assert " ways fit" in (tmp_path / "a.txt").read_text()


def test_reports_are_written_without_torch():
    """Torch comes with the first interval that is drawn."""
    names = ["page", "results_text", "view", "words"]
    program = f"import sys\nfrom kvtool.report import {', '.join(names)}\n"
    program += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_a_missing_gpu_is_refused_without_transformers():
    ((code, imported, lines),) = ended(("generate", "--device", "cuda:63"))
    assert "error: no device `cuda:63`" in lines[-2]
    assert code == 2
    assert "transformers" not in imported


class Unwell(http.server.BaseHTTPRequestHandler):
    """A hub that hangs up on everybody, and counts them."""

    asked = 0

    def do_HEAD(self):
        type(self).asked += "nothing" in self.path  # the hub's package asks for things of its own
        self.close_connection = True

    do_GET = do_HEAD

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that cannot be talked to; nothing is in its cache."""
    server = http.server.HTTPServer(("127.0.0.1", 0), Unwell)
    monkeypatch.setattr(Unwell, "asked", 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield Unwell
    server.shutdown()
    server.server_close()


OUTLINED = {
    ("eval", "-m", "nobody/nothing", "-t", "niah", "-p", "h2o", "-b", "64"): "a model of that name",
    ("eval", "recipes/ppl-pg19.yaml"): "data `emozilla/pg19`",
}
"""Evaluations of what is not here, and what is missing."""


def outlined(found):
    """Whether each of `OUTLINED` ended well, saying what it does not know."""
    for (code, imported, lines), missing in zip(found, OUTLINED.values(), strict=True):
        assert lines[-1].startswith("samples and memory: unknown, ")
        assert lines[-1].endswith(f"the hub cannot be reached for {missing}")
        assert code == 0
        assert not {"torch", "transformers"} & {*imported}


def test_a_hub_that_cannot_be_reached_is_asked_once_by_each_command(hub):
    model = ("generate", "-m", "nobody/nothing", "-p", "h2o")
    refused, dry, *evaluations = ended(
        model,
        (*model, "-b", "64", "--dry-run"),
        *((*command, "--dry-run") for command in OUTLINED),
    )
    assert refused[0] == 1
    assert "the hub cannot be reached for a model of that name" in refused[2][-2]
    assert not {"torch", "transformers"} & {*refused[1]}
    assert dry[0] == 0
    assert dry[2][-2].startswith("memory: unknown, no folder `nobody/nothing` here, and the hub ")
    assert dry[2][-1].startswith("hint: give a folder, or check the network")
    assert hub.asked == 3  # all but the recipe ask for the model
    outlined(evaluations)


def test_a_dry_evaluation_is_outlined_offline(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    outlined(ended(*((*command, "--dry-run") for command in OUTLINED)))
    assert hub.asked == 0


@pytest.mark.exhaustive
def test_a_dry_run_of_every_recipe_needs_no_hub(hub):
    recipes = sorted(map(str, Path("recipes").glob("*.yaml")))
    program = (
        "import sys\nfrom kvtool.cli.main import main\n"
        "print({name: main(['eval', name, '--dry-run', '--limit', '1']) for name in sys.argv[1:]})"
    )
    run = [sys.executable, "-c", program, *recipes]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == str(dict.fromkeys(recipes, 0)), done.stderr
