"""Do kvtool and kvpress give the same answers with the same policies on a real language model?

    python -m recipes.benchmarks.kvpress_answers --python /path/to/venv/bin/python  # 60 min

Codes of four digits in novels, as in `recipes/claims/smollm2`: the text is compressed before the
question is known, the question stays whole. `kvtool eval` answers on this side. `--python` names
the Python of an environment with kvpress 0.5.5 (`pip install 'transformers<5.3' kvpress torch`):
it reads the same tokens on the same weights in float32, compresses the text with a press, and
answers token by token. Scores are compared sample by sample, with paired 95 % intervals.

`-m smollm2` and the novels have to be there (`python recipes/texts.py austen`); `--model reference
--haystack builtin` is a test of this script. Broken off, `kvtool eval` goes on in `--folder`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

import kvtool
from kvtool.documents.results import ResultsDocument
from kvtool.evaluation.metrics.summary import LINKS
from kvtool.evaluation.metrics.text import contains
from kvtool.evaluation.run.store import Store
from kvtool.evaluation.verdict import difference
from kvtool.models.load import load
from kvtool.report import formats
from recipes.benchmarks.kvpress import WITHOUT, press, spelled

SIDE = Path(__file__).with_name("kvpress_answers_side.py")
NEW_TOKENS = 8
CASES = {
    "snapkv(window=64,kernel=5,pool=avg)": press("SnapKV"),
    "tova": press("TOVA"),
    "keydiff": press("KeyDiff"),
    "expected+ada(safeguard=force)": press("AdaKV", press=press("ExpectedAttention", epsilon=0.01)),
    "kvzip": press("KVzip"),
    "streaming": press("StreamingLLM"),
}
"""Each policy and the press of the same formula, both with the settings of the press."""


@dataclass(frozen=True)
class Setup:
    """What is asked.

    Attributes:
        depths, samples: places of the code, and texts for each.
    """

    length: int
    budget: int
    depths: int
    samples: int
    digits: int
    haystack: str

    def recipe(self, policies: list[str]) -> dict[str, Any]:
        task = {
            "task": "niah",
            "lengths": [self.length],
            "depths": self.depths,
            "samples": self.samples,
            "digits": self.digits,
            "haystack": self.haystack,
        }
        asked = {"shared_prefill": True, "query_aware": False, "keep_question": True}
        return {
            "kind": "recipe",
            "schema_version": 1,
            "policy": policies,
            "budget": {"tokens": [self.budget]},
            "generation": {"max_new_tokens": NEW_TOKENS},
            "eval": {**asked, "tasks": [task]},
        }


def fed(setup: Setup, model: Any, tokenizer: Any, folder: Path) -> list[dict[str, list[int]]]:
    """Return the tokens of each text and question, as a model of one layer is fed them."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=model.config.vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=model.config.max_position_embeddings,
    )
    small = AutoModelForCausalLM.from_config(config).eval()
    calls: list[list[int]] = []

    def note(_: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        calls.append((args[0] if args else kwargs["input_ids"])[0].tolist())

    small.register_forward_pre_hook(note, with_kwargs=True)
    kvtool.evaluate(setup.recipe(["streaming"]), folder, model=small, tokenizer=tokenizer)
    return [
        {"context": context, "question": question}
        for context, question in pairwise(calls)
        if len(context) > setup.length // 2 and len(question) > 1
    ]


def theirs(python: str, folder: Path) -> dict[str, Any] | str:
    """Return the answers of the other side; or why there is none."""
    program = [python, "-I", str(SIDE), str(folder)]
    side = subprocess.run(program, check=False, stdout=subprocess.PIPE, text=True)
    if side.returncode == WITHOUT:
        return side.stdout.strip()
    if side.returncode:
        raise RuntimeError(f"{' '.join(program)} has failed")
    answers: dict[str, Any] = json.loads((folder / "answers.json").read_text())
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="a Python that has kvpress")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--haystack", default="texts/austen/austen.txt")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--depths", type=int, default=10)
    parser.add_argument("--samples", type=int, default=5, help="texts for each depth")
    parser.add_argument("--digits", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("runs/kvpress-answers"))
    parser.add_argument("--json", type=Path, help="where the scores go")
    args = parser.parse_args()
    setup = Setup(args.length, args.budget, args.depths, args.samples, args.digits, args.haystack)
    transformers.utils.logging.disable_progress_bar()
    found = load(args.model, dtype="float32")
    side = args.folder / "side"
    side.mkdir(parents=True, exist_ok=True)
    if not (side / "asked.json").is_file():
        asked = fed(setup, found.model, found.tokenizer, args.folder / "fed")
        assert len(asked) == args.depths * args.samples, f"{len(asked)} texts were fed"
        (side / "asked.json").write_text(json.dumps(asked))
    (side / "presses.json").write_text(json.dumps([*CASES.values(), None]))
    (side / "setup.json").write_text(json.dumps([args.budget, NEW_TOKENS]))
    if not (side / "config.json").is_file():
        found.model.save_pretrained(side)
        plain = found.tokenizer
        plain.chat_template, kept = None, plain.chat_template
        plain.save_pretrained(side)
        plain.chat_template = kept
    answers = theirs(args.python, side)
    if isinstance(answers, str):
        print(f"skipped: {args.python} cannot import kvpress ({answers})")
        print("kvpress 0.5.5 needs transformers below 5.3; name the Python that has it: --python")
        print("nothing was compared")
        return
    recipe, own = setup.recipe(list(CASES)), args.folder / "own"
    run = kvtool.evaluate(recipe, own, model=found.model, tokenizer=found.tokenizer)
    lines = list(compared(run, own, answers["answers"], found.tokenizer))
    versions = ", ".join(f"{name} {answers[name]}" for name in ("kvpress", "transformers", "torch"))
    title = f"{run.model.id}, {setup.budget} of {setup.length} tokens; {versions}"
    show(title, lines)
    if args.json is not None:
        args.json.write_text(json.dumps({"title": title, "lines": [vars(each) for each in lines]}))


@dataclass(frozen=True)
class Line:
    """What a policy finds on both sides, text by text.

    Attributes:
        same: answers that are the same in every letter.
    """

    policy: str
    press: str
    ours: list[float]
    theirs: list[float]
    same: int

    @property
    def interval(self) -> str:
        ours, theirs = ([(value, 1.0) for value in side] for side in (self.ours, self.theirs))
        found = difference(ours, theirs, LINKS["mean"])
        return f"{found.value:+.2f} {formats.interval(found.low, found.high, 1.0)}"


def compared(
    run: ResultsDocument, folder: Path, answers: list[list[list[int]]], tokenizer: Any
) -> Iterator[Line]:
    """Score the other side's answers as the task scores ours."""
    folders = {variant.policy: variant.folder for variant in run.variants}
    for (policy, of), given in zip([*CASES.items(), ("full", None)], answers, strict=True):
        place = folders[str(kvtool.parse_policy(policy))]
        records = {each["id"]: each for each in Store(folder).records(place, "niah").values()}
        ours, theirs, same = [], [], 0
        for name, tokens in zip(run.samples["niah"], given, strict=True):
            [turn] = records[name]["turns"]
            said = tokenizer.decode(tokens, skip_special_tokens=True)
            ours.append(float(records[name]["scores"]["em"]))
            theirs.append(max(contains(said, one) for one in turn["references"]))
            same += turn["prediction"].strip() == said.strip()
        yield Line(policy, "" if of is None else spelled(of), ours, theirs, same)


def show(title: str, lines: list[Line]) -> None:
    """Print a row for each policy."""
    columns = ("kvtool finds", "kvpress finds", "kvtool - kvpress", "same answers")
    table = Table("policy", "kvpress", *columns, title=title)
    for line in lines:
        shares = [f"{statistics.fmean(side):.2f}" for side in (line.ours, line.theirs)]
        same = f"{line.same} of {len(line.ours)}"
        table.add_row(line.policy, line.press, *shares, line.interval, same)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
