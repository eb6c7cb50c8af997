"""The benchmarks behind what the README and the notes say of speed and memory still run."""

import json
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

from tests.benchmarks import headline
from tests.benchmarks.models import build_models

TINY = ("--shape", "tiny", "--backend", "eager", "--budget", "16", "--policies", "h2o")


@pytest.mark.exhaustive
def test_the_headline_sets_a_policy_beside_each_full_cache_and_a_prompt(tmp_path, capsys):
    file = tmp_path / "headline.json"
    prompt = ("--prefill-length", "96", "--prefill-budget", "16", "--block", "8")
    prompt += ("--turns", "9")
    headline.main([*TINY, *prompt, "--steps", "3", "--lengths", "48", "--json", str(file)])
    found = json.loads(file.read_text())
    assert [(line["attention"], line["length"]) for line in found["decode"]] == [
        ("sdpa", 16),
        ("sdpa", 48),
        ("unmasked", 16),
        ("unmasked", 48),
    ]
    assert all(line["graphs"] > 0 for line in found["decode"])  # no step of ours stayed eager
    (turns,) = found["turns"]
    assert (turns["policy"], turns["steps"], turns["ratio"]) == ("h2o", 9, 1)
    assert [line["kv_ratio"] for line in found["prefill"]] == [16 / 96]
    out = capsys.readouterr().out
    assert "decode at budget 16" in out
    assert "9 eager steps at budget 16 in turns" in out
    assert "prompt of 96 tokens in blocks of 8 at budget 16" in out


@pytest.mark.exhaustive
def test_the_headline_goes_on_after_a_comparison_that_fails_and_ends_with_an_error(capsys):
    cannot = ("--attentions", "flash_attention_2", "--steps", "3", "--tables", "decode")
    with pytest.raises(SystemExit, match="1 of 1 comparisons failed"):
        headline.main([*TINY, *cannot])
    assert "left out: " in capsys.readouterr().err


SMOKE = {
    "speed": "--lengths 48 --budgets 16 --policies h2o snapkv(window=4) --repeats 1 --steps 3",
    "reading": "--length 64 --budget 16 --policies quest --steps 3",
    "streams": "--tokens 1100 --budget 32 --block 32 --policies streaming(positions=cache)",
    "profile": "--lengths 40 --samples 1 --decode 4 --metrics entropy",
    "calidrop": "--bases h2o --length 64 --budget 16 --rounds 1",
}
DRIVEN = ("headline", "models", "decoding", "prefilling", "turns")  # by the headline's tests above


def test_no_benchmark_is_left_out():
    files = (Path(__file__).parent / "benchmarks").glob("*.py")
    assert {file.stem for file in files} - {"__init__"} == {*SMOKE, *DRIVEN}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SMOKE)
def test_every_benchmark_runs_in_small_and_prints_a_line(name, monkeypatch, capsys):
    module = import_module(f"tests.benchmarks.{name}")
    if hasattr(module, "build_models"):
        monkeypatch.setattr(module, "build_models", partial(build_models, "tiny"))
    monkeypatch.setattr(sys, "argv", [name, *SMOKE[name].split()])
    module.main()
    out = capsys.readouterr().out
    assert any(character.isdigit() for character in out.splitlines()[-2])
