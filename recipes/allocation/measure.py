"""Compare allocators at equal budgets: one policy, the same texts, and budgets split in each way.

    python recipes/allocation/measure.py bundled|smollm2 [SAMPLES]

Writes results/MODEL.json beside this file: of every question (known, later), task, allocator and
budget whether each code was found (0 or 1), in the order of the samples. Plans that a profile gave
are in `plans`. `kvtool eval` takes one plan a run; here all allocators read a prompt together, so
that a text is read once. Samples come in random order, so a run that is broken off is balanced.
The same command goes on after the texts that the file holds; of another version it begins anew.
"""

import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

from kvtool.cache.entry.build import read_plan
from kvtool.documents.settings import Protocol
from kvtool.evaluation.bench.bench import Bench
from kvtool.evaluation.bench.shared import SharedPrompts
from kvtool.evaluation.samples.sample import Sample, token_counter
from kvtool.evaluation.tasks.table import task_class
from kvtool.evaluation.tasks.task import Task
from kvtool.models.attached import ModelSource
from kvtool.models.load import Loaded
from kvtool.planning.variants import Variant
from kvtool.policies.grammar import parse_policy
from kvtool.sizes import Budget

HERE = Path(__file__).parent
ALLOCATORS = ("d2o-alloc", "d2o-reciprocal", "pyramid", "ada")
PLANS = ("output_error", "answer_loss")  # by which `optimal` split the budget


class Setup(NamedTuple):
    """What is compared on a model."""

    model: str | None
    dtype: str
    policy: str
    budgets: tuple[int, ...]
    tasks: dict[str, dict[str, Any]]


SETUPS = {
    "bundled": Setup(
        None,
        "float32",
        "h2o",
        (64, 128),
        {
            "niah": {"lengths": ["1K"], "depths": 10, "samples": 20},
            "ruler/niah_multikey_1": {"lengths": ["1K"], "samples": 200},
        },
    ),
    "smollm2": Setup(
        "smollm2",
        "float32",
        "keydiff",
        (256,),
        {
            "niah": {
                "lengths": ["1K"],
                "depths": 10,
                "samples": 20,
                "digits": 4,
                "haystack": "texts/austen/austen.txt",
            }
        },
    ),
}


def variants(name: str, setup: Setup) -> dict[str, Variant]:
    """Return every allocator under every budget by its name."""
    found: dict[str, Variant] = {}
    for size in setup.budgets:
        budget = Budget(tokens=size)
        found[f"uniform@{size}"] = Variant(parse_policy(setup.policy), budget)
        for modifier in ALLOCATORS:
            policy = parse_policy(f"{setup.policy}+{modifier}")
            found[f"{modifier}@{size}"] = Variant(policy, budget)
        for metric in PLANS:
            path = HERE / "plans" / f"{name}-{metric}-{size}.json"
            plan = read_plan(path)
            found[f"optimal({metric})@{size}"] = Variant(
                parse_policy(setup.policy), budget, plan=plan
            )
    return {"full": Variant(parse_policy("full"), None), **found}


def scores(name: str, first: int, most: int) -> Iterator[tuple[str, str, str, float]]:
    """Yield question, task, variant, and whether the code was found, of all texts but the first."""
    setup = SETUPS[name]
    source = ModelSource.of(setup.model, dtype=setup.dtype)
    asked = variants(name, setup)
    with source.attached(progress=False) as loaded, torch.inference_mode():
        counter = token_counter(loaded.tokenizer, None)
        tasks = [task_class(each)(name=each, **own) for each, own in setup.tasks.items()]
        drawn = [list(task.draw(counter)) for task in tasks]
        order = Random(0).sample(range(len(drawn[0])), len(drawn[0]))[:most]
        for done, place in enumerate(order[first:], first):
            for task, samples in zip(tasks, drawn, strict=True):
                for question in ("later", "known"):
                    protocol = Protocol(
                        query_aware=question == "known",
                        shared_prefill=True,
                        answers="scored",
                        max_new_tokens=12,  # a code has at most seven digits
                    )
                    for own, found in _ask(loaded, protocol, asked, task, samples[place]):
                        yield question, task.name, own, found
            sys.stderr.write(f"{done + 1} of {most}\n")


def _ask(
    loaded: Loaded, protocol: Protocol, asked: dict[str, Variant], task: Task, sample: Sample
) -> Iterator[tuple[str, float]]:
    """Yield whether each variant finds the code of a sample."""
    shared, prompts = dict[str, Any](), SharedPrompts()
    benches = {
        own: Bench(loaded, variant, protocol, shared, prompts) for own, variant in asked.items()
    }
    prompts.begin(list(benches.values()))
    for own, bench in benches.items():
        record = task.measure(bench, sample)
        found = task.score({**record, "cell": dict(sample.cell)})
        yield own, found[task.metric] / (task.best or 1)


def main() -> None:
    """Measure, and write what was found so far after every text."""
    name, *more = sys.argv[1:]
    setup = SETUPS[name]
    most = int(more[0]) if more else 200
    out, last = HERE / "results" / f"{name}.json", list(variants(name, setup))[-1]
    results = known(out, setup)
    cells = [each for tasks in results.values() for each in tasks.values()]
    whole = len(cells) == 2 * len(setup.tasks)  # both questions of every task
    first = min(len(each.get(last, [])) for each in cells) if whole else 0
    for each in cells:
        for variant in each:
            del each[variant][first:]
    for question, task, variant, found in scores(name, first, most):
        cell = results.setdefault(question, {}).setdefault(task, {})
        cell.setdefault(variant, []).append(round(found, 4))
        if variant == last:
            lines = json.dumps({"environment": environment(setup), "results": results})
            out.write_text(lines.replace("]}", "]}\n").replace("], ", "],\n") + "\n")
    sys.stderr.write(f"wrote {out}\n")


def known(path: Path, setup: Setup) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return what a run of this version has found, if one was broken off."""
    if not path.exists():
        return {}
    run = json.loads(path.read_text())
    same = {**run["environment"], "date": None} == {**environment(setup), "date": None}
    return run["results"] if same else {}


def environment(setup: Setup) -> dict[str, str]:
    """Say what it ran on."""
    import kvtool

    return {
        "kvtool": kvtool.__version__,
        "torch": torch.__version__,
        "dtype": setup.dtype,
        "threads": str(torch.get_num_threads()),
        "date": datetime.now(UTC).date().isoformat(),
    }


if __name__ == "__main__":
    main()
