"""The bundled model answers its own built-in prompts, offline and without a word on stderr."""

import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from accuracy import FILLER_SEED, measure
from kvtool.models.reference.filler import Filler
from kvtool.models.reference.tasks import needle_prompt
from tests.models.bundled import shipped

MOST_BYTES = 8 * 2**20


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(shipped(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(shipped())


@pytest.mark.parametrize(("tokens", "seed"), [(1024, 0), (2048, 0)])
def test_the_answer_of_the_built_in_prompt_is_found(model, tokenizer, tokens, seed):
    prompt, answer = needle_prompt(tokens, seed)
    inputs = tokenizer(prompt, return_tensors="pt")
    count = len(tokenizer(answer, add_special_tokens=False)["input_ids"])
    output = model.generate(**inputs, max_new_tokens=count, do_sample=False)
    assert tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]) == answer


@pytest.mark.parametrize("task", ["multikey", "words", "multiquery", "route", "variables"])
def test_nearly_every_prompt_of_a_task_is_answered_in_full(model, task):
    filler = Filler(FILLER_SEED, 500)
    result = measure(model, task, 256, samples=10, filler=filler, seed=5)
    assert result["exact"] >= 0.9


def test_generation_stops_after_the_answer(model, tokenizer):
    prompt, answer = needle_prompt(512, 3)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    new = output[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(new) == f"{answer}.<eos>"


@pytest.mark.parametrize("tokens", [100, 1000, 4096])
def test_the_prompt_is_as_long_as_asked_or_slightly_shorter(tokenizer, tokens):
    for seed in range(3):
        prompt, answer = needle_prompt(tokens, seed)
        assert 0 <= tokens - len(tokenizer(prompt)["input_ids"]) <= 16
        assert prompt.count(answer) == 1


def test_seeds_give_different_prompts_and_the_same_seed_the_same():
    assert needle_prompt(256, 1) == needle_prompt(256, 1)
    assert needle_prompt(256, 1)[1] != needle_prompt(256, 2)[1]


def test_writing_the_prompt_imports_no_torch():
    code = "import sys, kvtool.models.reference.tasks; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


@pytest.mark.exhaustive
def test_loading_is_silent_and_needs_no_network():
    code = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "from transformers.utils import logging\n"
        "from kvtool.models.reference import path\n"
        "logging.disable_progress_bar()\n"
        "AutoModelForCausalLM.from_pretrained(path()); AutoTokenizer.from_pretrained(path())\n"
    )
    settings = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "error", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=settings)
    assert run.stdout + run.stderr == ""


def test_the_folder_is_small():
    assert sum(file.stat().st_size for file in shipped().iterdir()) <= MOST_BYTES
