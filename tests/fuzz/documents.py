"""Recipes, plans and profiles as YAML and JSON, and files of turns, damaged in many ways."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import torch

import kvtool
from kvtool.documents.source import read_source
from kvtool.documents.turns import read_turns
from kvtool.documents.yaml_writer import dump_yaml
from kvtool.generation import decode_step, prefill
from tests.fuzz.contract import Case, command
from tests.fuzz.mutate import mutate_bytes, mutate_data, mutate_text, odd_word
from tests.fuzz.policies import evaluate_until_drawn
from tests.models_for_tests import peaky_model, random_ids

RECIPE: dict[str, Any] = {
    "kind": "recipe",
    "schema_version": 1,
    "name": "a",
    "model": {"dtype": "float32"},
    "policy": ["h2o(recent=8)+caote", {"name": "snapkv", "window": 8}],
    "modifiers": ["uniform"],
    "budget": ["20%", 64, "1MiB"],
    "prefill": "block:128",
    "generation": {"max_new_tokens": 32, "temperature": 0.5, "stop": ["."]},
    "eval": {
        "tasks": [
            {"task": "niah", "lengths": ["1K", 512], "depths": 3, "samples": 1},
            {"task": "speed", "lengths": [64], "new_tokens": 4, "batch": [1, 2]},
            "ruler/vt",
            {"task": "ppl", "lengths": [128]},
        ],
        "baseline": True,
        "limit": 2,
        "max_length": "1K",
    },
    "gates": [{"task": "niah", "min": 0.5}, {"task": "niah", "max_drop": 5}],
    "output": {"samples": True, "plots": False},
    "seed": 1,
}


def document_text(random: Random, data: Any) -> str:
    """Write a document, perhaps damaged, perhaps of an odd shape."""
    if random.random() < 0.6:
        data = mutate_data(random, data)
    if random.random() < 0.7:
        text = json.dumps(data, indent=random.choice([None, 1]))
    else:
        text = dump_yaml(data)
    if random.random() < 0.4:
        text = mutate_text(random, text)
    if random.random() < 0.03:
        text += _bomb(random)
    return text


def _bomb(random: Random) -> str:
    """Return text that is long or deep, such as people do not write."""
    count = random.choice([100] * 7 + [4000, 4000, 10_000])
    return "\n" + random.choice(
        [
            "".join(f"unknown{i}: {i}\n" for i in range(count)),
            "a: " + "9" * count + "\n",
            "a: " + "[" * count,
            "a: " + "{a: " * count,
            "a: " + "[" * count + "]" * count + "\n",
            "- " * count,
            "eval: {" + ", ".join(f"x{i}: {i}" for i in range(count)) + "}\n",
            "budget: [" + ", ".join("x" for i in range(count)) + "]\n",
            "policy: [" + ", ".join("h2o" for i in range(count)) + "]\n",
            "a: &a [x, x, x, x]\nb: &b [*a, *a, *a, *a]\nc: [*b, *b, *b, *b]\n",
            'a: "' + "\\ud800" * count + '"\n',
            "".join(f"x: {i}\n" for i in range(count)),
            "#" * count + "\n",
            "? " * count,
            "a: !!x " * 3 + "\n",
            "x" * count + ": 1\n",
        ]
    )


class Recipes:
    name = "recipes"

    def __init__(self, folder: Path) -> None:
        self.file = folder / "recipe.yaml"
        self.lines = folder / "secret.txt"
        self.lines.write_text("root:x:0:0\nsecret: [\n")

    def case(self, random: Random) -> Case:
        data = RECIPE
        if random.random() < 0.1:
            places = ["secret.txt", "recipe.yaml", "nowhere", "/", odd_word(random)]
            data = RECIPE | {"include": random.choice(places)}
        single = {"policy": "h2o", "budget": 64} if random.random() < 0.3 else {}
        data = data | single
        text = document_text(random, data)
        self.file.write_bytes(text.encode("utf-8", "surrogatepass"))
        if random.random() < 0.1:
            self.file.write_bytes(mutate_bytes(random, self.file.read_bytes()))
        return self._generate if "policy" in single else self._measure

    def _measure(self) -> None:
        evaluate_until_drawn("eval", str(self.file))

    def _generate(self) -> None:
        command("generate", str(self.file), "--dry-run", "--prompt", "x")


class Plans:
    name = "plans"

    def __init__(self, folder: Path) -> None:
        self.file = folder / "plan.yaml"
        self.model = kvtool.attach(peaky_model("llama"))
        checkpoint = folder / "tiny"
        self.model.config.save_pretrained(checkpoint)
        self.seeds = [
            json.loads(
                command(
                    *("plan-budget", "-m", str(checkpoint), *target, "--context", "256"),
                    *("-n", "8", "--allocator", allocator, "-f", "json"),
                )
            )
            for target in (("--ratio", "20%"), ("-b", "24"), ("--bytes", "24KiB"))
            for allocator in ("uniform", "pyramid", "ada")
        ]
        self.ids = random_ids(48)

    def case(self, random: Random) -> Case:
        text = document_text(random, random.choice(self.seeds))
        self.file.write_bytes(text.encode("utf-8", "surrogatepass"))
        policy = random.choice(["h2o", "snapkv(window=4)", "quest", "rocketkv(window=4)", "d2o"])
        return lambda: self._run(policy)

    def _run(self, policy: str) -> None:
        cache = kvtool.build_cache(self.model, policy, plan=self.file)
        with torch.no_grad():
            prefill(self.model, cache, self.ids, new_tokens=2)
            for token in (5, 6):
                logits = decode_step(self.model, cache, torch.tensor([token]))
        assert logits.isfinite().all(), "logits that are not finite"
        cache.report()


class Profiles:
    name = "profiles"

    def __init__(self, folder: Path) -> None:
        self.file = folder / "profile.yaml"
        layers, text = 2, {"source": "builtin", "samples": 1, "tokens": 64, "seed": 0}
        self.profile = {
            "kind": "profile",
            "schema_version": 1,
            "model": {
                "id": "tiny",
                "revision": None,
                "config_hash": "0" * 64,
                "dtype": "float32",
                "layers": layers,
                "heads": 8,
                "kv_heads": 2,
                "head_dim": 16,
                "layer_types": ["full_attention"] * layers,
                "sliding_window": None,
                "kv_bytes_per_token": 512,
                "trained_length": 2048,
            },
            "data": {**text, "decode": 4, "fingerprint": "0" * 64},
            "metrics": {
                "f_variance": [1.0, 2.0],
                "entropy": [0.5, 0.6],
                "query_cosine": [0.9, 0.8],
                "topk_union": [10, 12],
                "output_error": {
                    "policy": "h2o",
                    "budgets": [8, 16, 32],
                    "errors": [[0.5, 0.2, 0.1], [0.9, 0.5, 0.3]],
                },
                "memory": {
                    "dtype": "float32",
                    "layer_bytes_per_token": [256, 256],
                    "layer_window": [None, None],
                    "contexts": [64],
                    "batches": [1],
                    "bytes": [[32768]],
                    "memory": [1048576],
                    "largest_context": [[2048]],
                    "largest_batch": [[32]],
                },
            },
        }

    def case(self, random: Random) -> Case:
        text = document_text(random, self.profile)
        self.file.write_bytes(text.encode("utf-8", "surrogatepass"))
        target = random.choice([("--ratio", "20%"), ("-b", "24"), ("--bytes", "24KiB")])
        allocator = random.choice(["uniform", "d2o", "d2o-exp", "pyramid", "optimal"])
        form = random.choice(["json", "yaml", "text"])
        return lambda: command(
            *("plan-budget", str(self.file), *target, "--allocator", allocator, "-f", form)
        )


class TurnFiles:
    name = "turns"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def case(self, random: Random) -> Case:
        lines = ["Who is it?", "And why?", ""]
        objects: list[Any] = [{"user": "Who?"}, "Why?", {"prompt": "As it stands"}]
        objects += [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "X"}]
        random.shuffle(objects)
        objects = mutate_data(random, objects[: random.randrange(1, 5)])
        text = random.choice(
            [
                "\n".join(lines),
                "\n".join(json.dumps(each) for each in objects),
                json.dumps(objects, indent=random.choice([None, 1])),
                "[" * random.choice([100, 100_000]),
                '{"user": ' * random.choice([100, 20_000]),
                '{"user": ' + "9" * random.choice([10, 5000]) + "}",
                "{]\n" * random.choice([10, 5000, 40_000]),
            ]
        )
        if random.random() < 0.5:
            text = mutate_text(random, text)
        data = text.encode("utf-8", "surrogatepass")
        if random.random() < 0.2:
            data = mutate_bytes(random, data)
        path = self.folder / f"turns{random.choice(['.txt', '.json', '.jsonl', '', '.x'])}"
        path.write_bytes(data)
        return lambda: read_turns(str(path))


class Sources:
    """Any document at all, as far as its values and their places."""

    name = "documents"

    def __init__(self, folder: Path) -> None:
        self.file = folder / "document"

    def case(self, random: Random) -> Case:
        text = document_text(random, RECIPE) if random.random() < 0.5 else _bomb(random)
        if random.random() < 0.5:
            text = mutate_text(random, text)
        self.file.write_bytes(text.encode("utf-8", "surrogatepass"))
        return lambda: read_source(str(self.file), option="recipe").data
