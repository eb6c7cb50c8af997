"""Where a generated text ends: stop texts, the shortest answer."""

import pytest

import kvtool
from kvtool import generation
from kvtool.models.load import load
from kvtool.models.reference.tasks import needle_prompt


@pytest.fixture(scope="module")
def loaded():
    loaded = load()
    kvtool.attach(loaded.model)
    return loaded


def answer(loaded, **settings) -> str:
    prompt, _ = needle_prompt(tokens=200, seed=1)
    ids = loaded.tokenizer(prompt, return_tensors="pt").input_ids
    cache = kvtool.build_cache(loaded.model, "full")
    result = generation.generate(
        loaded.model, loaded.tokenizer, cache, ids, max_new_tokens=20, **settings
    )
    return result.text[0]


def test_a_stop_text_ends_the_answer_and_stays(loaded):
    _, right = needle_prompt(tokens=200, seed=1)
    right = right.strip()
    assert answer(loaded).strip().startswith(right)
    assert answer(loaded, stop=("never", right[:3])).strip() == right[:3]


def test_nothing_ends_before_the_shortest_answer(loaded):
    _, right = needle_prompt(tokens=200, seed=1)
    first = right.strip()[0]
    assert len(answer(loaded, stop=(first,)).strip()) == 1
    longer = answer(loaded, stop=(first,), min_new_tokens=1).strip()
    assert len(longer) > 1
    unstopped = answer(loaded)
    assert unstopped.strip().endswith(".")
    assert len(answer(loaded, min_new_tokens=15)) > len(unstopped)
