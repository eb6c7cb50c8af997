"""`kvtool plan-budget` lists ways to run a model; each command that it prints is accepted."""

import json
import shlex
from pathlib import Path

import pytest

from tests.models.published import LLAMA_3 as LLAMA
from tests.models_for_tests import FAMILIES

SMALL = LLAMA | {
    "hidden_size": 128,
    "head_dim": 32,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
}


@pytest.fixture
def folders(tmp_path):
    """Folders that hold a configuration alone."""
    for name, config in (("llama", LLAMA), ("a small one", SMALL)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))


def planned(kvtool, *arguments):
    done = kvtool("plan-budget", "-q", *arguments)
    assert done.code == 0, done.err
    return done.out


@pytest.mark.parametrize(
    "asked", [["--bytes", "300KiB"], ["--memory", "3MiB", "-n", "16"]], ids=str
)
def test_every_command_is_accepted(kvtool, folders, asked):
    model = ["-m", "a small one", "--context", "1K"]
    plan = json.loads(planned(kvtool, *model, *asked, "-f", "json"))
    text = planned(kvtool, *model, *asked, "-f", "text")
    commands = [way["command"] for way in plan["ways"] if way["fits"]]
    assert len(commands) > 3
    printed = [line.strip() for line in text.splitlines() if line.startswith("  kvtool generate")]
    assert printed == commands[: len(printed)]
    for command in commands:
        program, *words = shlex.split(command)
        done = kvtool(*words, "--dry-run", "-f", "json")
        assert (program, done.code) == ("kvtool", 0), (command, done.err)
        said = json.loads(done.out)
        way = next(way for way in plan["ways"] if way["command"] == command)
        assert said["policy"] == way["policy"]
        assert said["model"] == "a small one"


@pytest.mark.parametrize(("width", "asked"), [(62, {"bytes": "5GiB"}), (120, {"memory": "24GiB"})])
def test_ways_are_readable_at_every_width(folders, tmp_path, width, asked):
    from kvtool.calls.plan import plan

    made = plan(str(tmp_path / "llama"), context="100K", **asked)
    lines = made.table(width).splitlines()
    told = [line for line in lines if not line.startswith("  kvtool generate")]
    assert len(told) < len(lines) - 5
    assert max(map(len, told)) <= width
    assert not any(line.endswith(" ") or "…" in line for line in lines)
    text = " ".join(" ".join(told).split())
    for said in ("102,400", "full+int4 *", "Does not fit: full by", "GiB"):
        assert said in text
    assert "a model of 135 million parameters" in text
    assert "rocketkv at" not in text
    assert "k8v4 keeps keys in 8 bits" in text


def test_a_plan_with_ways_is_a_plan(kvtool, folders):
    """Whatever took a plan from `--bytes` still does."""
    planned(kvtool, "--bytes", "1MiB", "--context", "1K", "-o", "plan.yaml")
    assert "\nways:\n" in Path("plan.yaml").read_text()
    done = kvtool("generate", "plan.yaml", "-p", "streaming", "-n", "2", "--dry-run", "-q")
    assert done.code == 0, done.err


def test_a_plan_for_a_memory_runs_the_first_way(kvtool):
    planned(kvtool, "--memory", "20MiB", "--context", "1K", "-n", "8", "-o", "plan.yaml")
    done = kvtool("generate", "plan.yaml", "-n", "2", "-q", "-f", "json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["policy"] in Path("plan.yaml").read_text()


def test_a_profile_alone_has_no_ways_and_no_memory(kvtool):
    from tests.planning.documents import profile

    Path("profile.json").write_text(profile().to_json())
    plan = json.loads(planned(kvtool, "profile.json", "--bytes", "200KiB", "-f", "json"))
    assert "ways" not in plan
    done = kvtool("plan-budget", "profile.json", "--memory", "200KiB")
    assert done.code == 2
    assert "--memory needs the model's configuration" in done.err


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_models_of_all_shapes_have_ways(kvtool, family):
    from transformers import AutoConfig

    kind, changes = FAMILIES[family]
    config = AutoConfig.for_model(kind, **({"num_hidden_layers": 4, "hidden_size": 64} | changes))
    config.save_pretrained("odd")
    model = ["-m", "odd", "--context", "1000", "-f", "json"]
    plan = json.loads(planned(kvtool, *model, "--bytes", "200KiB"))
    fitting = [way for way in plan["ways"] if way["fits"]]
    assert all(way["bytes"] <= 200 * 1024 for way in fitting)
    assert {"full", "full+int8", "keydiff"} <= {way["policy"] for way in plan["ways"]}
    done = kvtool("plan-budget", *model, "--memory", "1MiB")
    assert done.code == 2
    assert "error: the weights take" in done.err.splitlines()[-1]
