"""The bundled model understands the drawn tasks that are worded for it."""

from functools import lru_cache

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvtool.evaluation.tasks.infinitebench import NumberRetrieval, PassKeyRetrieval
from kvtool.evaluation.tasks.scbench import Variables
from tests.evaluation.tasks.counters import bundled
from tests.models.bundled import shipped


@lru_cache(maxsize=1)
def loaded():
    return AutoModelForCausalLM.from_pretrained(shipped(), dtype=torch.float32)


def answer(text: str, max_new_tokens: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(shipped())
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = loaded().generate(ids, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize(
    "task",
    [
        Variables(name="scbench/vt", lengths=512, samples=1),
        PassKeyRetrieval(name="infinitebench/passkey", lengths=512, samples=2),
        NumberRetrieval(name="infinitebench/number_string", lengths=512, samples=2),
    ],
    ids=lambda task: task.name,
)
def test_every_turn_is_answered(task):
    for sample in task.draw(bundled()):
        text = sample.context
        for turn in sample.turns:
            text += turn.question + turn.answer_prefix
            said = answer(text, turn.max_new_tokens)
            assert task.score_answer(said, turn.references, sample.facts) == 100
            text += f" {turn.references[0]}"
