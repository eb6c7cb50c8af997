"""The benchmarks behind what the README and the notes say of speed and memory still run."""

import json
import re
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch

from kvtool import parse_policy
from kvtool.models.load import load_tokenizer
from recipes.benchmarks import __main__ as all_of_them
from recipes.benchmarks import headline, kvpress, kvpress_answers, llama_cpp
from recipes.benchmarks.models import build_models

TINY = ("--shape", "tiny", "--backend", "eager", "--budget", "16", "--policies", "h2o")


@pytest.mark.exhaustive
def test_the_headline_sets_a_policy_beside_each_full_cache_and_a_prompt(tmp_path, capsys):
    file = tmp_path / "headline.json"
    prompt = ("--prefill-length", "96", "--prefill-budget", "16", "--block", "8")
    prompt += ("--turns", "9", "--tables", "decode", "turns", "prefill", "whole")
    prompt += ("--whole-lengths", "48", "64", "--whole-policies", "h2o", "roco")
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
    assert [(line["policy"], line["kv_ratio"], line["block"]) for line in found["whole"]] == [
        ("h2o", 16 / 48, None),
        ("roco", 16 / 48, None),
        ("h2o", 16 / 64, None),
        ("roco", 16 / 64, None),
    ]
    out = capsys.readouterr().out
    assert "decode at budget 16" in out
    assert "9 eager steps at budget 16 in turns" in out
    assert "prompt of 96 tokens in blocks of 8 at budget 16" in out
    assert "prompts read at once at budget 16" in out


@pytest.mark.exhaustive
def test_the_headline_goes_on_after_a_comparison_that_fails_and_ends_with_an_error(capsys):
    cannot = ("--attentions", "flash_attention_2", "--steps", "3", "--tables", "decode")
    with pytest.raises(SystemExit, match="1 of 1 comparisons failed"):
        headline.main([*TINY, *cannot])
    assert "left out: " in capsys.readouterr().err


@pytest.mark.exhaustive
def test_the_headline_sets_steps_of_each_policy_beside_those_of_the_first(tmp_path, capsys):
    file = tmp_path / "beside.json"
    tiny = (*TINY, "snapkv(window=4)+every(steps=4)", "h2o+int8")
    headline.main(
        [*tiny, "--steps", "3", "--tables", "beside", "--turns", "9", "--json", str(file)]
    )
    found = json.loads(file.read_text())["beside"]
    assert [line["policy"] for line in found] == list(tiny[-3:])
    assert {(line["first"], line["steps"], line["budget"]) for line in found} == {("h2o", 9, 16)}
    assert [line["graphs"] > 0 for line in found] == [False, True, True]  # h2o shares its own
    assert all(line["left_eager"] < 9 for line in found)
    assert "9 steps at budget 16 beside those of h2o" in capsys.readouterr().out


def test_the_leaders_are_policies_of_this_package():
    args = headline.read_options(["--policies", "leaders", "roco"])
    assert args.policies == [*headline.LEADERS, "roco"]
    for policy in headline.LEADERS:
        parse_policy(policy)


def test_kvpress_is_compared_where_no_rank_of_two_partitions_competes():
    for case in kvpress.CASES:
        if not case.ranked:
            continue
        partitions = torch.arange(4, kvpress.TOKENS).split(case.ranked)
        ranked = sum(len(each) == case.ranked for each in partitions) - 1
        always = kvpress.TOKENS - case.ranked * ranked
        for budget in case.budgets(kvpress.TOKENS):
            assert (budget - always) % ranked == 0
            assert always < budget < kvpress.TOKENS
    assert any(case.ranked for case in kvpress.CASES)


def test_a_token_that_kvpress_does_not_keep_counts():
    ours = [[[0, 1, 5], [2, 3]], [[4], []]]
    assert kvpress.differing(ours, ours) == 0
    assert kvpress.differing(ours, [[[0, 2, 5], [2, 3]], [[6], []]]) == 2


@pytest.mark.exhaustive
def test_answers_of_kvpress_are_scored_as_ours(tmp_path, monkeypatch, capsys):
    """Of two texts the other side answers one; the full cache of this side answers both."""
    arguments = SMOKE["kvpress_answers"].replace("--samples 1", "--samples 2")
    arguments = arguments.format(tmp=tmp_path).split()
    monkeypatch.setattr(sys, "argv", ["kvpress_answers", *arguments])

    def answered(python, folder):
        asked = json.loads((folder / "asked.json").read_text())
        tokenizer = load_tokenizer()[0]
        texts = [tokenizer.decode(each["context"]) for each in asked]
        codes = [re.search(r"\d{7}", text).group() for text in texts]
        said = [tokenizer.encode(codes[0]), tokenizer.encode("none")]
        versions = dict.fromkeys(("kvpress", "transformers", "torch"), "0")
        return {**versions, "answers": [said] * (len(kvpress_answers.CASES) + 1)}

    monkeypatch.setattr(kvpress_answers, "theirs", answered)
    kvpress_answers.main()
    lines = capsys.readouterr().out.splitlines()
    [full] = [line.split() for line in lines if "full" in line.split()]
    assert {"1.00", "0.50", "+0.50"} < {*full}


def test_a_policy_that_is_not_there_says_so_and_asks_nothing():
    there, missing = kvpress.known(
        (kvpress.Case("knorm", ["KnormPress", {}]), kvpress.Case("norm", ["KnormPress", {}]))
    )
    assert (there.budgets, there.without) == ([150, 75], "")
    assert missing.budgets == []
    assert "norm" in missing.without


OTHER_SIDE = """
import json, sys
settings = json.loads(sys.argv[1])
print(json.dumps({"ready": "0"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    taken = {"prompt_s": len(asked["tokens"]), "decode_ms": asked["new"], "peak_mib": 77}
    print(json.dumps({"refused": "too long"} if settings["shift"] else taken), flush=True)
"""


@pytest.mark.exhaustive
def test_llama_cpp_takes_turns_with_caches_of_kvtool(tmp_path, monkeypatch, capsys):
    tiny = "--model reference --vocabulary 1000 --lengths 64 --budget 40 --block 16 --new 5 "
    monkeypatch.setattr(llama_cpp, "SIDE", tmp_path / "side.py")
    monkeypatch.setattr(llama_cpp, "OURS", (("full", False), ("h2o", True)))
    llama_cpp.SIDE.write_text(OTHER_SIDE)
    llama_cpp.main([*tiny.split(), "--rounds", "1", "--threads", "1"])
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    shown = {
        name.strip(): [float(cell) for cell in cells]
        for name, *cells in rows
        if "-" not in cells[0]
    }
    assert shown["llama.cpp, f16"] == shown["llama.cpp, q8_0"] == [64, 5, 77]
    for name in ("kvtool, full", "kvtool, h2o, 40 tokens, in blocks"):
        assert shown[name][2] > 77  # MiB of a process that has imported torch


def test_what_llama_cpp_refuses_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(llama_cpp, "SIDE", tmp_path / "side.py")
    monkeypatch.setattr(llama_cpp, "OURS", ())
    llama_cpp.SIDE.write_text(OTHER_SIDE)
    llama_cpp.main(["--lengths", "48", "--new", "5"])
    assert capsys.readouterr().out.endswith("that shifts, 48 tokens: too long\n")
    llama_cpp.SIDE.write_text("print('no such package'); raise SystemExit(3)")
    llama_cpp.main(["--lengths", "48", "--new", "5"])
    assert "llama.cpp, f16, 48 tokens: no such package\n" in capsys.readouterr().out


SMOKE = {
    "speed": "--lengths 48 --budgets 16 --policies h2o snapkv(window=4) --repeats 1 --steps 3",
    "reading": "--length 64 --budget 16 --policies quest --steps 3",
    "streams": "--tokens 1100 --budget 32 --block 32 --policies streaming(positions=cache)",
    "profile": "--lengths 40 --samples 1 --decode 4 --metrics entropy",
    "long": "--lengths 64 96 --budget 16 --block 16 --policies h2o --holding quest",
    "serving": "--prompts 4 --length 64 --new 8 --rows 2 --policies h2o",
    "calidrop": "--bases h2o --length 64 --budget 16 --rounds 1",
    "startup": "--runs 1",
    "steps": "--length 48 --budget 16 --steps 2 --policies h2o quest --threads 1",
    "kvpress": "--seeds 1",
    "kvpress_answers": "--model reference --length 256 --budget 100 --depths 1 --samples 1 "
    "--digits 7 --haystack builtin --folder {tmp}",
}
DRIVEN = ("headline", "models", "decoding", "prefilling", "turns", "llama_cpp")  # by tests above
COUNTED = ("launches", "pretended")  # by test_launches.py
ELSEWHERE = ("kvpress_side", "kvpress_answers_side", "llama_cpp_side")  # in other environments


def test_no_benchmark_is_left_out():
    files = (Path(__file__).parents[1] / "recipes" / "benchmarks").glob("*.py")
    assert {file.stem for file in files} - {"__init__", "__main__"} == {
        *(*SMOKE, *DRIVEN, *COUNTED, *ELSEWHERE)
    }


def test_the_list_tells_what_every_benchmark_answers_and_how_long_it_takes(capsys):
    assert {each.name for each in all_of_them.benchmarks()} == {
        *SMOKE,
        "headline",
        "launches",
        "llama_cpp",
        "gpu",
        "vllm",
    }
    assert all_of_them.main([]) == 0
    told = capsys.readouterr().out
    for each in all_of_them.benchmarks():
        assert " min" in each.takes
        assert each.name in told
    assert {each.name for each in all_of_them.benchmarks()} > {*all_of_them.WAITS}


def test_benchmarks_run_one_after_another_each_with_its_arguments(monkeypatch, capfd):
    run = []

    def record(program, check):
        run.append(program[2:])
        return subprocess.CompletedProcess(program, len(run) % 2)

    monkeypatch.setattr(subprocess, "run", record)
    assert all_of_them.main(["long", "calidrop"]) == 1
    assert run == [["recipes.benchmarks.long"], ["recipes.benchmarks.calidrop"]]
    assert all_of_them.main(["waits"]) == 1
    assert [program[0].rpartition(".")[2] for program in run[2:]] == [*all_of_them.WAITS]
    assert all_of_them.main(["long", "quick"]) == 2
    assert capfd.readouterr().err == "no such benchmark: quick\n"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SMOKE)
def test_every_benchmark_runs_in_small_and_prints_a_line(name, tmp_path, monkeypatch, capsys):
    module = import_module(f"recipes.benchmarks.{name}")
    if hasattr(module, "build_models"):
        monkeypatch.setattr(module, "build_models", partial(build_models, "tiny"))
    monkeypatch.setattr(sys, "argv", [name, *SMOKE[name].format(tmp=tmp_path).split()])
    module.main()
    out = capsys.readouterr().out
    assert any(character.isdigit() for character in out.splitlines()[-2])
