"""Measure a reference model: exact answers by task and length, with the full cache.

python recipes/reference-model/accuracy.py [DIR] --lengths 256,1024 --samples 50
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvtool.models.reference import path
from kvtool.models.reference.filler import Filler
from kvtool.models.reference.tasks import TASKS, Example, draw_example

FILLER_SEED = 2  # sentences no training run sees
_FILLER_SENTENCES = 5_000
_TOKENS_AT_ONCE = 16_384


def _correct(model: PreTrainedModel, examples: list[Example]) -> list[Tensor]:
    """Return, for each example, which answer tokens are the model's first choice.

    All of an answer is right exactly when greedy decoding gives that answer: each token is
    judged after the true ones before it.
    """
    rows = [example.context + example.question + example.answer for example in examples]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
    ids = ids.to(model.device)
    hidden = model.model(ids, use_cache=False).last_hidden_state
    correct = []
    for index, (row, example) in enumerate(zip(rows, examples, strict=True)):
        start = len(row) - len(example.answer)
        logits = model.lm_head(hidden[index, start - 1 : len(row) - 1])
        correct.append((logits.argmax(-1) == ids[index, start : len(row)]).cpu())
    return correct


@torch.no_grad()
def measure(
    model: PreTrainedModel, task: str, tokens: int, *, samples: int, filler: Filler, seed: int = 0
) -> dict[str, float]:
    """Measure one task at one length.

    Returns:
        `exact`: share of prompts answered in full; `first`: share whose first answer token is
        right; `token`: share of answer tokens.
    """
    rng = np.random.default_rng([seed, tokens, list(TASKS).index(task)])
    examples = [draw_example(rng, task, tokens, filler) for _ in range(samples)]
    at_once = max(1, _TOKENS_AT_ONCE // (tokens + 64))
    correct: list[Tensor] = []
    for start in range(0, samples, at_once):
        correct += _correct(model, examples[start : start + at_once])
    return {
        "exact": sum(bool(row.all()) for row in correct) / samples,
        "first": sum(bool(row[0]) for row in correct) / samples,
        "token": torch.cat(correct).float().mean().item(),
    }


def main(arguments: list[str] | None = None) -> None:
    """Print a table of exact-match accuracies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, default=path())
    parser.add_argument("--lengths", default="256,512,1024,2048,4096")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    filler = Filler(FILLER_SEED, _FILLER_SENTENCES)
    lengths = [int(length) for length in options.lengths.split(",")]
    sys.stdout.write("| task | " + " | ".join(map(str, lengths)) + " |\n")
    sys.stdout.write("|---|" + "---|" * len(lengths) + "\n")
    for task in options.tasks.split(","):
        cells = []
        for tokens in lengths:
            result = measure(
                model, task, tokens, samples=options.samples, filler=filler, seed=options.seed
            )
            cells.append(f"{result['exact']:.2f}")
        sys.stdout.write(f"| {task} | " + " | ".join(cells) + " |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
