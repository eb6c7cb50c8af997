"""Variants compared with the full cache sample by sample, from records."""

import math

import pytest

from kvtool.evaluation.metrics.summary import LINKS
from kvtool.evaluation.run.collect import Measured, summarise
from kvtool.evaluation.run.index import compared_results
from kvtool.evaluation.tasks.fidelity import Reconstruct
from kvtool.evaluation.tasks.perplexity import Perplexity
from tests.evaluation.run.test_collect import COST, Match, record

TASK = Match(name="a")


def measured(variant, answers, task=TASK, failed=0, **cost):
    """Samples by their id: what was answered, or a whole record."""
    records = [
        {"id": name, **(record(said, **cost) if isinstance(said, str) else said)}
        for name, said in answers.items()
    ]
    return Measured(variant, task, records, failed, len(records) + failed, True, "f")


def pair(ours, full):
    return compared_results([full, ours])[1].paired


def answers(right, of=8):
    return {str(i): "yes" if i in right else "no" for i in range(of)}


def test_samples_are_paired_by_their_id_whatever_their_order():
    full, mine = answers(range(6)), answers({0, 1, 2, 7})
    found = pair(measured("h2o@8", dict(reversed(mine.items()))), measured("full", full))
    assert (found.n, found.full, found.difference) == (8, 6 / 8, -2 / 8)
    assert found == pair(measured("h2o@8", mine), measured("full", full))
    assert found.low < found.difference < found.high


def test_only_samples_that_both_have_are_held_against_each_other():
    """Of samples 2 to 7 the full cache knows four, the other three; 0 and 1 it has alone."""
    full = measured("full", answers(range(6)))
    mine = {name: said for name, said in answers({2, 3, 6}).items() if int(name) > 1}
    found = pair(measured("h2o@8", {**mine, "new": "yes"}, failed=2), full)
    assert (found.n, found.full, found.difference) == (6, 4 / 6, pytest.approx(-1 / 6))


def test_the_full_cache_has_no_pair_and_nor_has_what_stands_alone():
    full, ours = measured("full", answers(range(6))), measured("h2o@8", answers({1}))
    both = compared_results([full, ours])
    assert both[0].paired is None
    assert [each.delta for each in both] == [0.0, -5 / 8]
    assert compared_results([ours])[0].paired is None
    assert pair(measured("h2o@8", {}), full) is None
    assert pair(measured("h2o@8", {"other": "yes"}), full) is None


def test_speeds_are_all_tokens_over_all_seconds():
    """0.25 s for 4 tokens, and 0.2 s: 1.25 times as fast, on every sample."""
    full = measured("full", answers(range(6)))
    found = pair(measured("h2o@8", answers(range(6)), decode_s=0.2), full).speed
    assert (found.value, found.low, found.high) == pytest.approx((1.25, 1.25, 1.25))
    assert pair(measured("h2o@8", answers(range(6)), decoded_tokens=0), full).speed is None


def text(nll, tokens, chunk=1):
    return {
        "chunk": chunk,
        "edges": [1, tokens + 1],
        "nll": [nll],
        "tokens": [tokens],
        "cost": COST,
    }


def texts(scale=1.0, chunk=1):
    return {str(i): text(scale * (50 + 3 * i), 20 + i, chunk) for i in range(7)}


def test_perplexities_weigh_samples_by_their_tokens():
    task = Perplexity(name="ppl")
    full, ours = (
        measured(variant, texts(s), task) for variant, s in (("full", 1.0), ("h2o@8", 1.1))
    )
    found = pair(ours, full)
    nll = sum(50 + 3 * i for i in range(7)) / sum(20 + i for i in range(7))
    assert found.full == pytest.approx(math.exp(nll))
    assert found.difference == pytest.approx(math.exp(1.1 * nll) - math.exp(nll))
    assert found.low < found.difference < found.high


def test_texts_fed_in_other_blocks_have_no_pair():
    task = Perplexity(name="ppl")
    ours = measured("snapkv@8", texts(1.1, chunk=128), task)
    assert pair(ours, measured("full", texts(), task)) is None
    assert pair(ours, measured("full", texts(chunk=128), task)).n == 7


def test_the_parts_of_a_headline_give_it():
    def headline(task, records):
        summary = summarise(measured("full", records, task))
        sums, weights = zip(*summary.parts, strict=True)
        return LINKS[summary.link](sum(sums) / sum(weights)), summary.metrics[task.metric].value

    for task, records in ((TASK, answers({1, 2})), (Perplexity(name="ppl"), texts())):
        ours, whole = headline(task, records)
        assert ours == pytest.approx(whole)


def test_a_headline_that_is_no_mean_has_no_parts(monkeypatch):
    pytest.importorskip("sacrebleu")
    said = {"prediction": "a b c d e", "references": ["a b c d f"], "source": "a b c d e"}
    records = {str(i): {**said, "agreement": 0.8, "cost": COST} for i in range(6)}
    task = Reconstruct(name="reconstruct")
    assert summarise(measured("full", records, task)).parts == []
    assert pair(measured("h2o@8", records, task), measured("full", records, task)) is None
