"""Recipes, plans and profiles as YAML and JSON, and files of turns, damaged in many ways."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import torch

import kvtool
from kvtool.documents.messages import read_turns
from kvtool.documents.source import read_source
from kvtool.documents.yaml_writer import dump_yaml
from kvtool.generation import decode_step, prefill
from tests.fuzz.contract import Case, command
from tests.fuzz.mutate import mutate_bytes, mutate_data, mutate_text, odd_word, vary
from tests.fuzz.policies import evaluate_until_drawn
from tests.models_for_tests import peaky_model, random_ids

CHOICES: dict[tuple, list[Any]] = {
    ("name",): ["b", "long-name", "ä"],
    ("policy",): ["h2o", "snapkv(window=8)", ["tova", "h2o"], {"name": "roco"}],
    ("modifiers",): [[], ["uniform"], None],
    ("budget",): [64, "25%", 0.25, [16, "1K"], {"tokens": 32}, {"ratio": 0.5}, {"bytes": "1MiB"}],
    ("prefill",): ["full", "block", "block:64", None],
    ("generation",): [{"max_new_tokens": 1}, {"temperature": 0, "stop": ["x", "y"]}, None],
    ("eval", "tasks"): [["niah"], ["ppl", "niah"], ["niah", {"task": "speed", "lengths": [32]}]],
    ("eval", "baseline"): [True, None],
    ("eval", "limit"): [1, 1000, None],
    ("gates",): [[], None],
    ("output",): [{}, {"plots": True}, None],
    ("seed",): [0, 2**31 - 1, None],
}
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
    """Write a document, as it is in two of three cases, else damaged or of an odd shape."""
    damage = random.choice([""] * 12 + ["data"] * 4 + ["text"] + ["both", "bomb"])
    if damage in ("data", "both"):
        data = mutate_data(random, data)
    if random.random() < 0.7:
        text = json.dumps(data, indent=random.choice([None, 1]))
    else:
        text = dump_yaml(data)
    if damage in ("text", "both"):
        text = mutate_text(random, text)
    return text + _bomb(random) if damage == "bomb" else text


def _bomb(random: Random) -> str:
    """Return text that is long or deep, such as people do not write."""
    count = random.choice([100] * 16 + [4000] * 3 + [50_000])
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
        data = vary(random, RECIPE, CHOICES)
        if random.random() < 0.05:
            places = ["secret.txt", "recipe.yaml", "nowhere", "/", odd_word(random)]
            data["include"] = random.choice(places)
        single = {"policy": "h2o", "budget": 64} if random.random() < 0.3 else {}
        data = data | single
        text = document_text(random, data)
        self.file.write_bytes(text.encode("utf-8", "surrogatepass"))
        if random.random() < 0.05:
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
            for target in (("--ratio", "20%"), ("--ratio", "50%"), ("-b", "24"), ("-b", "64"))
            for allocator in ("uniform", "pyramid", "ada")
        ]
        self.seeds += [
            json.loads(
                command(
                    *("plan-budget", "-m", str(checkpoint), "--bytes", "160KiB", "-p", policy),
                    *("--context", "256", "-n", "8", "-f", "json"),
                )
            )
            for policy in ("h2o", "snapkv(window=4)")
        ]
        self.ids = random_ids(48)

    def case(self, random: Random) -> Case:
        text = document_text(random, random.choice(self.seeds))
        self.file.write_bytes(text.encode("utf-8", "surrogatepass"))
        policy = random.choice(["h2o", "snapkv(window=4)", "quest", "tova", "rocketkv(window=4)"])
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
        lines = ["Who is it?", "And why?", "", "Ünïcödé 😀"]
        objects: list[Any] = [{"user": "Who?"}, "Why?", {"prompt": "As it stands"}]
        objects += [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "X"}]
        objects = objects[random.randrange(3) :] * random.choice([1, 1, 5])
        damaged = random.random() < 0.4
        if damaged:
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
            ][: 7 if random.random() < 0.2 else 3]
        )
        if damaged and random.random() < 0.5:
            text = mutate_text(random, text)
        data = text.encode("utf-8", "surrogatepass")
        if damaged and random.random() < 0.2:
            data = mutate_bytes(random, data)
        right = ".json" if text.startswith("[") else ".jsonl" if text.startswith("{") else ".txt"
        suffix = random.choice([right, right, "", ".txt", ".json", ".jsonl", ".x"])
        path = self.folder / f"turns{suffix}"
        path.write_bytes(data)
        return lambda: read_turns(str(path))


class Sources:
    """Any document at all, as far as its values and their places."""

    name = "documents"

    def __init__(self, folder: Path) -> None:
        self.file = folder / "document"

    def case(self, random: Random) -> Case:
        data = vary(random, RECIPE, CHOICES)
        text = document_text(random, data) if random.random() < 0.75 else _bomb(random)
        if random.random() < 0.2:
            text = mutate_text(random, text)
        self.file.write_bytes(text.encode("utf-8", "surrogatepass"))
        return lambda: read_source(str(self.file), option="recipe").data
