"""Perplexity through an evicting cache against one plain forward, and its summary by hand."""

import math

import pytest
import torch
from transformers import DynamicCache

from kvtool.cache.entry.build import build_cache
from kvtool.documents.settings import Protocol
from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.bench.bench import Bench
from kvtool.evaluation.bench.shared import SharedPrompts
from kvtool.evaluation.tasks.perplexity import Perplexity
from kvtool.generation import compress
from tests.evaluation.variants import make_variants

VARIANTS = make_variants(["h2o", "streaming", "snapkv"], ["40", "4K"])


def measure(loaded, counter, variant, **settings):
    task = Perplexity(name="ppl", **{"lengths": "128", "samples": 2} | settings)
    samples = list(task.draw(counter))
    bench = Bench(loaded, variant, Protocol())
    return task, samples, [task.measure(bench, sample) for sample in samples]


def plain(loaded, text, skip) -> float:
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids
    logprobs = loaded.model(ids).logits.double().log_softmax(-1)[:, :-1]
    scored = logprobs.gather(2, ids[:, 1:, None])[0, skip - 1 :, 0]
    return -scored.mean().item()


@pytest.mark.parametrize(("chunk", "skip"), [(1, 1), (16, 7), (1000, 1)])
def test_the_full_cache_gives_what_one_forward_gives(loaded, counter, chunk, skip):
    task, samples, records = measure(loaded, counter, VARIANTS[0], chunk=chunk, skip=skip)
    for sample, record in zip(samples, records, strict=True):
        assert task.score(record)["nll"] == pytest.approx(
            plain(loaded, sample.context, skip), abs=1e-5
        )


def test_a_budget_that_fits_gives_the_same_and_a_small_one_costs_and_is_held(loaded, counter):
    task, [sample], [record] = measure(loaded, counter, VARIANTS[2], lengths="192", samples=1)
    nll = task.score(record)["nll"]
    assert nll == pytest.approx(plain(loaded, sample.context, 1), abs=1e-5)
    for variant, chunk in zip(VARIANTS[1::2], (1, 1, 128), strict=True):
        _, _, [small] = measure(loaded, counter, variant, lengths="192", samples=1)
        assert task.score(small)["nll"] > nll + 0.1
        assert small["tokens"] == record["tokens"]  # the same positions in every variant
        assert small["cost"]["kept_tokens"] == 40
        assert small["chunk"] == chunk  # policies that cut prompts are fed blocks


def test_documents_fit_their_length_and_end_with_a_recap(loaded, counter):
    _, samples, records = measure(loaded, counter, VARIANTS[0], lengths="128,512", chunk=128)
    for sample, record in zip(samples, records, strict=True):
        length = sample.cell["length"]
        ids = loaded.tokenizer(sample.context).input_ids
        assert length - 20 < len(ids) <= length
        assert sum(record["tokens"]) == len(ids) - 1
        recap = sample.context.split("\n Recap:")[1]
        for sentence in recap.split(".")[:-1]:
            assert sample.context.count(sentence) == 2


def test_the_summary_weighs_tokens(loaded):
    task = Perplexity(name="ppl")
    records = [
        {
            "chunk": 1,
            "edges": [1, 3, 5],
            "nll": [2.0, 4.0],
            "tokens": [2, 2],
            "cell": {"length": 5},
        },
        {"chunk": 1, "edges": [1, 3], "nll": [6.0], "tokens": [2], "cell": {"length": 3}},
    ]
    summary = task.summarise(records)
    assert summary.metrics["nll"].value == 12 / 6
    assert summary.metrics["ppl"].value == pytest.approx(math.exp(2.0))
    spread = math.sqrt(((1.5 - 2.25) ** 2 + (3 - 2.25) ** 2) / 1 / 2)
    assert summary.metrics["ppl"].stderr == pytest.approx(math.exp(2) * spread)
    assert [(cell["length"], number.value) for cell, number in summary.cells] == [
        (3, pytest.approx(math.exp(3))),
        (5, pytest.approx(math.exp(1.5))),
    ]
    curve = summary.curves["nll by position"]
    assert (list(curve.x), list(curve.y)) == ([3.0, 5.0], [8 / 4, 12 / 6])


def test_texts_of_a_file_are_cut_to_length(loaded, counter, tmp_path):
    path = tmp_path / "books.jsonl"
    path.write_text(
        '{"text": "The old lamp was near the school. The quiet falcon was there."}\n' * 3
    )
    task = Perplexity(name="ppl", lengths="9", samples=2, data=str(path))
    samples = list(task.draw(counter))
    assert len(samples) == 2
    assert all(len(loaded.tokenizer(sample.context).input_ids) == 9 for sample in samples)


def test_what_leaves_nothing_to_score_is_refused(loaded, counter, tmp_path):
    with pytest.raises(UsageError, match="ppl: skip 256 leaves none of 256 tokens to score"):
        list(Perplexity(name="ppl", lengths="256", skip=256).draw(counter))
    with pytest.raises(UsageError, match="ppl: prompt 256 leaves none of 256 tokens to score"):
        list(Perplexity(name="ppl", lengths="256", prompt=256).draw(counter))
    short = tmp_path / "short.txt"
    short.write_text("The old")
    with pytest.raises(KvtoolError, match="the text has 5 tokens, skip 9 leaves none to score"):
        measure(loaded, counter, VARIANTS[0], data=str(short), skip=9)


def over_what_is_kept(loaded, ids, prompt: int, budget: int) -> float:
    """The NLL after a prompt whose tokens SnapKV has cut, from a plain cache with the rest."""
    cut = build_cache(loaded.model, "snapkv", budget=budget)
    compress(loaded.model, cut, ids[:, :prompt])
    plain = DynamicCache(config=loaded.model.config)
    logits = [loaded.model(ids[:, :prompt], past_key_values=plain).logits[:, -1:]]
    for i, layer in enumerate(plain.layers):
        kept = cut.kept_positions(i)[..., None]
        assert kept.shape[2] == budget < prompt
        layer.keys, layer.values = (x.take_along_dim(kept, 2) for x in (layer.keys, layer.values))
    for at in range(prompt, ids.shape[1] - 1):
        position = torch.tensor([[at]])
        step = loaded.model(ids[:, at : at + 1], past_key_values=plain, position_ids=position)
        logits.append(step.logits)
    logprobs = torch.cat(logits, 1).double().log_softmax(-1)
    return -logprobs.gather(2, ids[:, prompt:, None]).mean().item()


@torch.no_grad()
def test_what_follows_a_prompt_is_scored_from_what_the_cut_left(loaded, counter):
    task, samples, records = measure(loaded, counter, VARIANTS[5], prompt=100)
    for sample, record in zip(samples, records, strict=True):
        ids = loaded.tokenizer(sample.context, return_tensors="pt").input_ids
        assert task.score(record)["nll"] == pytest.approx(
            over_what_is_kept(loaded, ids, 100, 40), abs=1e-5
        )
        assert (record["chunk"], record["edges"][0]) == (1, 100)
        assert sum(record["tokens"]) == ids.shape[1] - 100


@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[6]], ids=lambda variant: variant.name)
def test_a_prompt_that_fits_changes_nothing_but_where_scores_begin(loaded, counter, variant):
    task, samples, records = measure(loaded, counter, variant, prompt=100, skip=110)
    for sample, record in zip(samples, records, strict=True):
        expected = plain(loaded, sample.context, 110)
        assert task.score(record)["nll"] == pytest.approx(expected, abs=1e-5)


def test_variants_read_the_prompt_of_a_text_together(loaded, counter):
    task = Perplexity(name="ppl", lengths="128", samples=1, prompt=100)
    (sample,) = task.draw(counter)
    prompts = SharedPrompts()
    variants = [VARIANTS[0], VARIANTS[1], VARIANTS[5]]
    benches = [Bench(loaded, variant, Protocol(), prompts=prompts) for variant in variants]
    prompts.begin(benches)
    for bench, variant in zip(benches, variants, strict=True):
        together = task.measure(bench, sample)
        alone = task.measure(Bench(loaded, variant, Protocol()), sample)
        assert together["cost"]["peak_memory_bytes"] is None  # it is of all variants together
        assert together["nll"] == pytest.approx(alone["nll"], abs=1e-4)
