"""The benchmark behind what the README promises about speed still runs."""

import json

import pytest

from tests.benchmarks import headline

TINY = ("--shape", "tiny", "--backend", "eager", "--budget", "16", "--policies", "h2o")


def test_the_headline_sets_a_policy_beside_each_full_cache_and_a_prompt(tmp_path, capsys):
    file = tmp_path / "headline.json"
    prompt = ("--prefill-length", "96", "--prefill-budget", "16", "--block", "8")
    headline.main([*TINY, *prompt, "--steps", "3", "--lengths", "48", "--json", str(file)])
    found = json.loads(file.read_text())
    assert [(line["attention"], line["length"]) for line in found["decode"]] == [
        ("sdpa", 16),
        ("sdpa", 48),
        ("unmasked", 16),
        ("unmasked", 48),
    ]
    assert all(line["graphs"] > 0 for line in found["decode"])  # no step of ours stayed eager
    assert [line["kv_ratio"] for line in found["prefill"]] == [16 / 96]
    out = capsys.readouterr().out
    assert "decode at budget 16" in out
    assert "prompt of 96 tokens in blocks of 8 at budget 16" in out


def test_the_headline_goes_on_after_a_comparison_that_fails_and_ends_with_an_error(capsys):
    cannot = ("--attentions", "flash_attention_2", "--steps", "3", "--tables", "decode")
    with pytest.raises(SystemExit, match="1 of 1 comparisons failed"):
        headline.main([*TINY, *cannot])
    assert "left out: " in capsys.readouterr().err
