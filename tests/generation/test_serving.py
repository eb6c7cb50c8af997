"""Many prompts over few rows: every answer is the one that its prompt gets alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kvtool
from kvtool.errors import KvtoolError
from kvtool.generation import decode_step, generate, prefill
from kvtool.generation.serving import Drawing, Served, Waiting, serve
from kvtool.models.load import load
from tests.tiers import first

SIZES = [(40, 9), (90, 3), (25, 14), (64, 1), (130, 6), (33, 12), (71, 5)]  # prompt, new tokens
TIE = 1e-4  # between the two likeliest logits, where float32 sums in another order may differ


@pytest.fixture(scope="module")
def loaded():
    model = load()
    kvtool.attach(model.model)
    return model


def waiting(loaded) -> list[Waiting]:
    text = "The secret code for falcon: 7429103. The old lamp was near the school, and it was red. "
    ids = loaded.tokenizer(text * 20)["input_ids"]
    return [
        Waiting(i, torch.tensor([ids[3 * i : 3 * i + length]]), new)
        for i, (length, new) in enumerate(SIZES)
    ]


def tied(loaded, cache, prompt: Waiting, same: list[int]) -> bool:
    """Whether the likeliest two tokens after the same beginning are as good as equal."""
    logits = prefill(loaded.model, cache, prompt.ids, new_tokens=prompt.max_new_tokens)
    for token in same:
        logits = decode_step(loaded.model, cache, torch.tensor([token]))
    best = logits[0].topk(2).values
    return bool(best[0] - best[1] < TIE)


@pytest.mark.parametrize(
    "policy", first(1, ["h2o(positions=cache)", "full+int8", "snapkv(window=8)", "d2o+uniform"])
)
def test_answers_are_those_that_prompts_get_alone(policy, loaded):
    def new_cache():
        bound = None if policy.startswith("full") else 32
        return kvtool.build_cache(loaded.model, policy, bound)

    prompts, served, ties = waiting(loaded), Served(), 0
    answers = list(
        serve(loaded.model, loaded.tokenizer, new_cache, prompts, most_sequences=3, served=served)
    )
    assert sorted(answer.index for answer in answers) == list(range(len(SIZES)))
    assert served.most_sequences == 3
    assert served.new_tokens == sum(len(answer.token_ids) for answer in answers)
    for answer in answers:
        prompt = prompts[answer.index]
        alone = generate(
            loaded.model,
            loaded.tokenizer,
            new_cache(),
            prompt.ids,
            max_new_tokens=prompt.max_new_tokens,
        ).token_ids[0]
        assert answer.prompt_tokens == prompt.ids.shape[1]
        if answer.token_ids != alone:
            pairs = zip(answer.token_ids, alone, strict=False)
            first = next(i for i, (ours, theirs) in enumerate(pairs) if ours != theirs)
            assert tied(loaded, new_cache(), prompt, alone[:first])
            ties += 1
    assert ties <= 1


def test_rows_that_reach_the_end_of_their_text_make_room_early(loaded, monkeypatch):
    def new_cache():
        return kvtool.build_cache(loaded.model, "h2o", 32)

    def alone(prompt):
        done = generate(loaded.model, loaded.tokenizer, new_cache(), prompt.ids, max_new_tokens=12)
        return done.token_ids[0]

    prompts = [replace(each, max_new_tokens=12) for each in waiting(loaded)[:4]]
    end = alone(prompts[2])[4]
    monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", [end])
    served = Served()
    answers = serve(
        loaded.model, loaded.tokenizer, new_cache, prompts, most_sequences=2, served=served
    )
    found = {answer.index: answer.token_ids for answer in answers}
    assert found == {prompt.index: alone(prompt) for prompt in prompts}
    assert found[2][-1] == end
    assert len(found[2]) <= 5
    assert served.new_tokens == sum(map(len, found.values())) < 12 * len(prompts)
    assert 0 < served.reading_seconds < served.seconds


def test_samples_are_drawn_from_the_seed_of_each_prompt(loaded):
    def new_cache():
        return kvtool.build_cache(loaded.model, "h2o", 32)

    prompts = waiting(loaded)[:4]
    drawing = Drawing(temperature=0.7, seed=5, stop=["."])
    found = {
        answer.index: answer.token_ids
        for answer in serve(
            loaded.model, loaded.tokenizer, new_cache, prompts, most_sequences=2, drawing=drawing
        )
    }
    for prompt in prompts:
        alone = generate(
            loaded.model,
            loaded.tokenizer,
            new_cache(),
            prompt.ids,
            max_new_tokens=prompt.max_new_tokens,
            temperature=0.7,
            seed=5 + prompt.index,
            stop=["."],
        )
        assert found[prompt.index] == alone.token_ids[0]


@pytest.mark.parametrize("policy", first(1, ["snapkv(window=8)", "h2o+int8"]))
def test_rows_in_flight_hold_no_more_than_is_forecast_of_them(policy, loaded):
    from kvtool.documents.memory import DeviceMemory
    from kvtool.planning.bytes import Text
    from kvtool.planning.estimate import estimate_memory
    from kvtool.planning.variants import Variant
    from kvtool.sizes import Budget

    made, budget = [], None if policy == "full" else Budget.parse(32)

    def new_cache():
        made.append(kvtool.build_cache(loaded.model, policy, budget))
        return made[-1]

    prompts, device = waiting(loaded), DeviceMemory(device="", free_bytes=None, weights_bytes=None)
    variant, config = Variant(kvtool.parse_policy(policy), budget), loaded.model.config
    rows = []
    for prompt in prompts:
        text = Text(prompt.ids.shape[1], prompt.max_new_tokens, 1)
        found = estimate_memory(config, "float32", variant, text, device)
        rows.append(found.kv_bytes + found.state_bytes)
    prompts = [
        replace(prompt, sequence_bytes=row) for prompt, row in zip(prompts, rows, strict=True)
    ]
    memory, most = 3 * max(rows), 0
    for _ in serve(loaded.model, loaded.tokenizer, new_cache, prompts, memory=memory):
        held = made[0].report()  # the cache that the others have joined
        assert held.allocated_bytes + held.state_bytes <= memory
        most = max(most, held.allocated_bytes + held.state_bytes)
    assert most > max(rows)


def test_a_memory_holds_as_many_rows_as_go_into_it(loaded):
    def new_cache():
        return kvtool.build_cache(loaded.model, "h2o", 32)

    prompts = [Waiting(each.index, each.ids, 4, sequence_bytes=100) for each in waiting(loaded)]
    served = Served()
    list(serve(loaded.model, loaded.tokenizer, new_cache, prompts, memory=499, served=served))
    assert served.most_sequences == 4
    with pytest.raises(KvtoolError, match="prompt 0 takes 100 bytes of cache, and the memory is"):
        next(serve(loaded.model, loaded.tokenizer, new_cache, prompts, memory=99))
