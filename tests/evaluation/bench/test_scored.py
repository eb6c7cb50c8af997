"""Right answers that are scored: what decoding would find, how likely they are, in fewer runs."""

import pytest
import torch

from kvtool.documents.settings import Protocol
from kvtool.evaluation.bench import ask
from kvtool.evaluation.bench.bench import Bench
from kvtool.evaluation.bench.shared import SharedPrompts
from kvtool.models.load import load
from tests.evaluation.tasks.drawing import make
from tests.evaluation.variants import make_variants

# what a policy does with an answer that is read at once, and whether it knows the question
BLOCKS = [
    ("h2o", True),
    ("d2o", False),
    ("snapkv", True),
    ("kvzip", False),
    ("rkv", True),
    ("h2o+cam", False),
    ("snapkv+every(steps=16)", True),
    ("pyramidkv", False),
    ("full+int8", True),
    ("adakv+int4", False),
]
STEPS = [  # those that read it token by token
    ("quest", False),
    ("rocketkv", True),
    ("h2o+calidrop", False),
    ("streaming(positions=cache)", False),
]


def marked(count, cases):
    """All but a number of first cases are for the exhaustive tier."""
    rest = (pytest.param(*case, marks=pytest.mark.exhaustive) for case in cases[count:])
    return [*cases[:count], *rest]


@pytest.fixture(scope="module")
def samples(counter):
    task = make("niah", lengths=[256], depths=[30, 70], samples=1)
    return task, list(task.draw(counter))


def bench_of(loaded, policy, budget=128, **protocol):
    variant = make_variants([policy], [str(budget)], baseline=False)[0]
    return Bench(loaded, variant, Protocol(**protocol))


def measure(loaded, samples, policy, budget=128, **protocol):
    """The scored records of all samples under one policy, and the runs of the model for each."""
    task, drawn = samples
    bench, runs = bench_of(loaded, policy, budget, **protocol), []
    hook = loaded.model.register_forward_pre_hook(lambda *given: runs.append(1))
    records = []
    for sample in drawn:
        bench.draw_for(sample.id)
        record = task.measure(bench, sample)
        records.append({**record, "scores": task.score(record)})
    hook.remove()
    return records, len(runs) / len(drawn)


@pytest.mark.parametrize(("policy", "known"), marked(2, BLOCKS) + marked(1, STEPS))
def test_the_right_answer_is_the_one_that_decoding_begins_with(loaded, samples, policy, known):
    decoded, _ = measure(loaded, samples, policy, query_aware=known)
    judged, _ = measure(loaded, samples, policy, query_aware=known, answers="scored")
    for one, other in zip(decoded, judged, strict=True):
        ((said,), (found,)) = one["turns"], other["turns"]
        begins = said["prediction"].strip().startswith(said["references"][0])
        assert other["scores"]["em"] == begins
        assert said["prediction"].startswith(found["prediction"])
        assert (found["right_tokens"] == found["new_tokens"]) == begins


def test_right_tokens_end_at_the_first_wrong_one(loaded, samples, monkeypatch):
    def all_but_the_third(model, cache, ids, **how):
        likeliest = ids.cpu().clone()
        likeliest[0, 2] += 1
        return torch.zeros(1, ids.shape[1]), likeliest

    monkeypatch.setattr(ask, "token_scores", all_but_the_third)
    records, _ = measure(loaded, samples, "full", answers="scored")
    assert {record["turns"][0]["right_tokens"] for record in records} == {2}


def test_the_likelihood_is_that_of_the_plain_model(loaded, samples):
    plain, found = load(), measure(loaded, samples, "full", answers="scored")[0]
    for sample, record in zip(samples[1], found, strict=True):
        (turn,) = sample.turns
        prompt = sample.context + turn.question + turn.answer_prefix
        ids = plain.tokenizer(f"{prompt} {turn.references[0]}", return_tensors="pt")["input_ids"]
        begun = plain.tokenizer(prompt, return_tensors="pt")["input_ids"].shape[1]
        with torch.no_grad():
            logprobs = plain.model(ids).logits.float().log_softmax(-1)[0, begun - 1 : -1]
        expected = -logprobs.gather(1, ids[0, begun:, None]).mean().item()
        assert record["scores"]["nll"] == pytest.approx(expected, abs=1e-4)
        assert record["turns"][0]["new_tokens"] == ids.shape[1] - begun == 7


@pytest.mark.parametrize("policy", ["h2o", "full", "full+int8"])
def test_an_answer_takes_one_run_where_steps_only_append_and_evict(loaded, samples, policy):
    assert measure(loaded, samples, policy, answers="scored")[1] == 2  # the prompt's, and one


@pytest.mark.parametrize("policy", ["quest", "h2o+calidrop"])
def test_an_answer_takes_a_run_for_each_token_where_steps_differ(loaded, samples, policy):
    runs = measure(loaded, samples, policy, answers="scored")[1]
    assert runs == 1 + 6  # the first of 7 tokens comes from the prompt's own


def test_an_answer_of_many_tokens_beside_a_small_budget_is_read_token_by_token(loaded, samples):
    assert measure(loaded, samples, "h2o", 64, answers="scored")[1] == 7
    assert measure(loaded, samples, "snapkv", 64, answers="scored")[1] == 2  # it evicts nothing


def test_costs_are_those_of_the_prompt_and_no_speed_is_told(loaded, samples):
    decoded, _ = measure(loaded, samples, "h2o")
    scored, _ = measure(loaded, samples, "h2o", answers="scored")
    for one, other in zip(decoded, scored, strict=True):
        same = ("prompt_tokens", "kept_tokens", "kv_bytes", "allocated_bytes")
        assert [one["cost"][name] for name in same] == [other["cost"][name] for name in same]
        assert other["cost"]["traffic_bytes"] == other["cost"]["kv_bytes"]  # all that is kept
        assert (other["cost"]["decoded_tokens"], other["cost"]["new_tokens"]) == (0, 7)


def test_prompts_that_are_shared_give_the_same_scores(loaded, samples):
    task, drawn = samples
    policies = ["h2o", "snapkv", "quest"]
    alone = [measure(loaded, samples, name, answers="scored")[0] for name in policies]
    prompts = SharedPrompts()
    variants = make_variants(policies, ["128"], baseline=False)
    protocol = Protocol(answers="scored", shared_prefill=True)
    benches = [Bench(loaded, variant, protocol, prompts=prompts) for variant in variants]
    for i, sample in enumerate(drawn):
        for bench in benches:
            bench.draw_for(sample.id)
        prompts.begin(benches)
        for bench, records in zip(benches, alone, strict=True):
            assert task.measure(bench, sample)["turns"] == records[i]["turns"]


def test_it_is_another_measurement():
    assert "answers" not in Protocol().identity()
    assert Protocol(answers="scored").identity()["answers"] == "scored"
