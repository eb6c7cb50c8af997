"""One value of a document, a record or a line at a time: a huge number, or one of a wrong type."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

from kvtool.documents.messages import read_turns
from kvtool.documents.prompts import read_prompts
from tests.fuzz.contract import Case, command
from tests.fuzz.documents import RECIPE, Plans, Profiles
from tests.fuzz.mutate import places
from tests.fuzz.policies import evaluate_until_drawn
from tests.fuzz.runs import RunFolders

WRONG: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 10**6, 2**31 - 1, 2**31, 99_999_999_999, 2**63, 10**30),
    *(-0.5, 0.1, 1.5, 1e15, 1e100, 1e308, 5e-324, float("nan"), float("inf"), float("-inf")),
    *("", " ", "x", "1/3", "0", "-1", "1e400", "4K", "20%", "full", "\x00", "ä" * 300),
    *([], {}, [0], [None], [[]], ["x"], [[1, 2]], {"x": 1}, {"length": "a"}),
]


def changed(random: Random, data: Any) -> Any:
    """Give one value of a document, chosen with equal chance, another one; sometimes none."""
    data = copy.deepcopy(data)
    for _ in range(random.choice([0] * 7 + [1] * 4 + [2])):
        *way, last = random.choice(places(data))
        inside = data
        for key in way:
            inside = inside[key]
        if random.random() < 0.1:
            del inside[last]
        else:
            inside[last] = copy.deepcopy(random.choice(WRONG))
        if not places(data):
            break
    return data


class PlanFields(Plans):
    name = "fields of plans"

    def case(self, random: Random) -> Case:
        self.file.write_text(json.dumps(changed(random, random.choice(self.seeds))))
        policy = random.choice(["h2o", "snapkv(window=4)", "quest", "rocketkv(window=4)"])
        return lambda: self._run(policy)


class ProfileFields(Profiles):
    name = "fields of profiles"

    def case(self, random: Random) -> Case:
        profile = copy.deepcopy(self.profile)
        for key in ("data", "metrics.memory", "metrics.output_error"):
            *way, last = key.split(".")
            if random.random() < 0.15:
                (profile[way[0]] if way else profile).pop(last)
        self.file.write_text(json.dumps(changed(random, profile)))
        target = random.choice([("--ratio", "20%"), ("-b", "24"), ("--bytes", "24KiB")])
        more = random.choice([(), ("--context", "64"), ("--dtype", "bfloat16"), ("-p", "h2o")])
        if random.random() < 0.5 or target[0] == "--bytes":
            more = (
                *more,
                "--allocator",
                random.choice(["uniform", "uniform", "d2o", "pyramid", "optimal"]),
            )
        form = random.choice(["json", "yaml", "text"])
        return lambda: command("plan-budget", str(self.file), *target, *more, "-f", form)


class RecipeFields:
    name = "fields of recipes"

    def __init__(self, folder: Path) -> None:
        self.file = folder / "recipe.yaml"

    def case(self, random: Random) -> Case:
        single = {"policy": "h2o", "budget": {"tokens": 64}} if random.random() < 0.3 else {}
        pair = {"variant": "h2o(recent=8)+caote", "than": "snapkv(window=8)", "budgets": [64]}
        claim = {"says": "a", "paper": "b", "pairs": [pair]} if random.random() < 0.2 else None
        data = {**RECIPE, "prefill": {"mode": "block", "block": 128}, **single, "claim": claim}
        self.file.write_text(json.dumps(changed(random, data)))
        if single:
            return lambda: command("generate", str(self.file), "--dry-run", "--prompt", "x")
        return lambda: evaluate_until_drawn("eval", str(self.file))


class Lines:
    """Lines of prompts and of conversations."""

    name = "fields of lines"

    def __init__(self, folder: Path) -> None:
        self.file = folder / "lines.jsonl"
        self.prompts = [{"prompt": "Who?", "id": "a", "max_new_tokens": 3}, {"prompt": "x"}]
        self.turns = [{"user": "Who?"}, {"role": "user", "content": "x"}, {"prompt": "y"}]

    def case(self, random: Random) -> Case:
        read, lines = random.choice([(read_prompts, self.prompts), (read_turns, self.turns)])
        lines = lines if read is read_prompts else [random.choice(lines)]
        made = changed(random, lines)
        self.file.write_text("".join(f"{json.dumps(line)}\n" for line in made))
        return lambda: read(str(self.file))


class RunFields(RunFolders):
    """Documents and records of a run; scored anew, taken up again, or asked for a plan."""

    name = "fields of runs"

    def case(self, random: Random) -> Case:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.whole, self.folder)
        path = self.folder / random.choice(self.files)
        if path.suffix == ".json":
            path.write_text(json.dumps(changed(random, json.loads(path.read_text()))))
        else:
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            which = random.randrange(len(lines))
            lines[which] = changed(random, lines[which])
            path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        if path.name == "results.json" and random.random() < 0.5:
            return self._recommend
        run = self._rescore if random.random() < 0.7 else self._resume
        pictures = random.random() < 0.01  # which take most of the time
        return run if pictures else lambda: self._without_pictures(run)

    def _recommend(self) -> None:
        command(
            "plan-budget", "--bytes", "1MiB", "--context", "1K", "--recommend", str(self.folder)
        )
