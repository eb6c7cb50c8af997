"""Commands on a config.json with values that no model can have: one line, whoever reads it."""

import json

import pytest

from kvtool.models import reference

GENERATE = ("generate", "-q", "-p", "h2o", "-b", "64", "-n", "2", "--prompt", "The old lamp")
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}
COMMANDS = {
    "plan": ("plan-budget", "-q", "-b", "64"),
    "dry": (*GENERATE, "--dry-run"),
    "run": GENERATE,
}


@pytest.fixture
def folder(tmp_path):
    """The folder `m` with the bundled model; returns what changes its config.json."""
    (tmp_path / "m").mkdir()
    for path in reference.path().iterdir():
        (tmp_path / "m" / path.name).symlink_to(path)
    before = json.loads((tmp_path / "m" / "config.json").read_text())

    def change(**entries):
        (tmp_path / "m" / "config.json").unlink()
        (tmp_path / "m" / "config.json").write_text(json.dumps(before | entries))

    return change


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "entries",
    [
        {"num_hidden_layers": 10**7},
        {"head_dim": [16]},
        {"num_key_value_heads": 10**9},
        {"model_type": "mistral", "sliding_window": -5},
        {"rope_parameters": LONG | {"short_factor": [1.0] * 3, "long_factor": [1.0] * 3}},
        {"layer_types": ["zebra"]},
    ],
    ids=lambda entries: ",".join(entries),
)
@pytest.mark.each_once
def test_one_line_before_anything_is_built(kvtool, folder, entries, command):
    folder(**entries)
    done = kvtool(*COMMANDS[command], "-m", "m")
    if command == "plan" and "rope_parameters" in entries:  # bytes do not depend on rotations
        assert done.code == 0
        return
    assert (done.code, done.out) == (1, "")
    error, *hint = done.err.splitlines()
    assert error.startswith("error: ")
    assert all(line.startswith("hint: ") for line in hint)


@pytest.mark.parametrize("command", ["dry", "run"])
@pytest.mark.parametrize(
    "entries",
    [
        {"hidden_act": "zebra"},
        {"rope_parameters": {"rope_type": "zebra", "rope_theta": 1e4}},
    ],
    ids=lambda entries: ",".join(entries),
)
def test_a_name_that_transformers_does_not_know_is_told(kvtool, folder, entries, command):
    folder(**entries)
    done = kvtool(*COMMANDS[command], "-m", "m")
    assert (done.code, done.out) == (1, "")
    assert "nothing is known of 'zebra'" in done.err
