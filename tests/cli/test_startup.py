"""What a command imports before it refuses or answers: modules, not seconds."""

import http.server
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path

import pytest

from kvtool.models import reference
from kvtool.transformers_versions import reads_plain_configs

PROGRAM = (
    "import sys\nfrom kvtool.cli.main import main\ncode = main(sys.argv[1:])\n"
    "heavy = {'torch', 'transformers', 'numpy', 'datasets', 'pydantic', 'matplotlib'}\n"
    "heavy &= set(sys.modules)\n"
    "print(code, sorted(heavy), file=sys.stderr)"
)


def ended(*arguments, **more):
    """The last line of a command's stderr but one, its exit code and the heavy imports."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, **more
    )
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    "command",
    [
        ["policies"],
        ["policies", "-f", "json"],
        ["policies", "calidrop"],
    ],
    ids=" ".join,
)
def test_policies_are_listed_without_torch(command):
    assert ended(*command)[-1] == "0 []"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["generate", "-p", "h20"], "no policy named `h20`"),
        (["generate", "-p", "h2o,snapkw"], "no policy named `snapkw`"),
        (["compress", "-p", "h2o(recnt=8)"], "`h2o` has no parameter `recnt`"),
        (["plan-budget", "-b", "64", "-p", "quest+caote"], "`quest` keeps everything"),
        (["eval", "-t", "niah", "-p", "h2o,snapkw"], "no policy named `snapkw`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_policy_typo_is_refused_without_torch(command, told):
    lines = ended(*command)
    assert lines[-1] == "2 []"
    assert any(told in line for line in lines)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("polcy: h2o", "bad.yaml:3:1: polcy: unknown key `polcy`"),
        ("policy: h20", "no policy named `h20`"),
        ("budget: [oops", "not valid YAML"),
        ("budget: -3", "bad.yaml:3:"),
    ],
)
def test_a_bad_recipe_is_refused_without_torch(tmp_path, line, told):
    recipe = tmp_path / "bad.yaml"
    recipe.write_text(f"kind: recipe\nschema_version: 1\n{line}\n")
    lines = ended("generate", str(recipe))
    assert lines[-1] == "2 ['pydantic']"
    assert told in lines[0]


@pytest.mark.skipif(not reads_plain_configs(), reason="transformers reads the configuration")
@pytest.mark.parametrize("form", ["yaml", "text"])
@pytest.mark.parametrize("policy", ["h2o", "snapkv+caote", "streaming"])
def test_a_plan_from_a_configuration_needs_no_torch(tmp_path, policy, form):
    (tmp_path / "config.json").write_bytes((reference.path() / "config.json").read_bytes())
    model = ["-m", str(tmp_path), "--context", "1K", "-f", form]
    assert ended("plan-budget", *model, "-b", "64", "-p", policy)[-1] == "0 ['pydantic']"


@pytest.mark.skipif(not version("torch").endswith("+cpu"), reason="torch is asked for GPUs")
@pytest.mark.skipif(not reads_plain_configs(), reason="transformers reads the configuration")
@pytest.mark.parametrize("form", ["yaml", "text"])
def test_a_plan_for_the_bundled_model_needs_no_torch_that_knows_no_gpus(form):
    done = ended("plan-budget", "--context", "1K", "-b", "64", "-f", form)
    assert "dtype: float32, in which it would run here (change: --dtype)" in done
    assert done[-1] == "0 ['pydantic']"


@pytest.mark.skipif(not reads_plain_configs(), reason="transformers reads the configuration")
def test_ways_as_text_come_without_what_they_do_not_use(tmp_path):
    """Half a second of processor time leaves no room for YAML, profiles or settings of prompts."""
    (tmp_path / "config.json").write_bytes((reference.path() / "config.json").read_bytes())
    program = (
        "import sys\nfrom kvtool.cli.main import main\ncode = main(sys.argv[1:])\n"
        "unused = {'torch', 'transformers', 'numpy', 'yaml', 'kvtool.documents.profile',\n"
        "    'kvtool.documents.results', 'kvtool.documents.recipe', 'kvtool.calls.settings'}\n"
        "print(code, sorted(unused & set(sys.modules)), file=sys.stderr)"
    )
    command = ["plan-budget", "-m", str(tmp_path), "--memory", "8MiB", "-q", "-f", "text"]
    run = [sys.executable, "-c", program, *command]
    done = subprocess.run(run, capture_output=True, text=True)
    assert " ways fit" in done.stdout
    assert done.stderr == "0 []\n"


@pytest.mark.parametrize("module", ["page", "results_layout", "export", "notebook", "words"])
def test_reports_are_written_without_torch(module):
    """Torch comes with the first interval that is drawn."""
    program = f"import sys, kvtool.report.{module}\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n"


def test_a_missing_gpu_is_refused_without_transformers():
    lines = ended("generate", "--device", "cuda:63")
    assert "error: no device `cuda:63`" in lines[-3]
    assert lines[-1].startswith("2 ")
    assert "transformers" not in lines[-1]


def test_a_gguf_file_that_is_none_is_refused_without_torch(tmp_path):
    (tmp_path / "some.gguf").write_text("<html>")
    lines = ended("generate", "-m", str(tmp_path))
    assert lines[-2] == f"error: `{tmp_path}` is no GGUF file"
    assert lines[-1] == "2 ['pydantic']"


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


def test_a_hub_that_cannot_be_reached_is_asked_once(hub):
    lines = ended("generate", "-m", "nobody/nothing", "-p", "h2o")
    assert "the hub cannot be reached for a model of that name" in lines[-3]
    assert "torch" not in lines[-1]
    assert "transformers" not in lines[-1]
    assert hub.asked == 1


def test_a_dry_run_needs_no_hub(hub):
    lines = ended("generate", "-m", "nobody/nothing", "-p", "h2o", "-b", "64", "--dry-run")
    assert lines[-3].startswith("memory: unknown, no folder `nobody/nothing` here, and the hub ")
    assert lines[-2].startswith("hint: give a folder, or check the network")
    assert lines[-1].startswith("0 ")
    assert hub.asked == 1


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize(
    ("given", "missing"),
    [
        (["-m", "nobody/nothing", "-t", "niah", "-p", "h2o", "-b", "64"], "a model of that name"),
        (["recipes/ppl-pg19.yaml"], "data `emozilla/pg19`"),
    ],
    ids=["model", "data"],
)
def test_a_dry_evaluation_is_outlined_without_the_hub(hub, monkeypatch, given, missing, offline):
    if offline:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    lines = ended("eval", *given, "--dry-run")
    assert lines[-2].startswith("samples and memory: unknown, ")
    assert lines[-2].endswith(f"the hub cannot be reached for {missing}")
    assert lines[-1].startswith("0 ")
    assert "torch" not in lines[-1]
    assert "transformers" not in lines[-1]
    assert hub.asked == (0 if offline or "recipes" in given[0] else 1)


@pytest.mark.exhaustive
def test_a_dry_run_of_every_recipe_needs_no_hub(hub):
    recipes = sorted(map(str, Path("recipes").glob("*.yaml")))
    program = (
        "import sys\nfrom kvtool.cli.main import main\n"
        "print({name: main(['eval', name, '--dry-run']) for name in sys.argv[1:]})"
    )
    run = [sys.executable, "-c", program, *recipes]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == str(dict.fromkeys(recipes, 0)), done.stderr
