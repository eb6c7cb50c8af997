"""Policy strings: built from the tables with odd values, or damaged; what is read also runs."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, get_args, get_type_hints
from unittest.mock import patch

import torch
from typer import Exit

import kvtool
from kvtool.errors import KvtoolError
from kvtool.generation import decode_step, prefill
from kvtool.policies.table import BASES, MODIFIERS, policy_class
from kvtool.sizes import MOST_TOKENS, Budget, parse_count, parse_prefill
from tests.fuzz.contract import Case, command
from tests.fuzz.mutate import NUMBERS, mutate_text, odd_word
from tests.models_for_tests import peaky_model, random_ids

_SOUND = {
    "--max-new-tokens": ["1", "16", "1K"],
    "--seed": ["0", "7", "2147483647"],
    "--temperature": ["0", "0.5", "1", "2.5"],
    "--budget": ["16", "64", "1K", "20%", "0.25", "64MiB"],
    "--prefill": ["full", "block", "block:64"],
    "--set": ["1", "2", "64"],
    "--policy": ["h2o", "snapkv(window=8)", "tova+caote"],
    "--allocator": ["uniform", "pyramid"],
    "--stop": [".", "The end", "\\n"],
    "--dtype": ["auto", "float32"],
    "--device": ["auto", "cpu"],
    "--ratio": ["20%", "0.5", "1"],
    "--bytes": ["1MiB", "64MiB", "2GiB"],
    "--context": ["256", "4K", "100000"],
    "--batch": ["1", "8"],
    "--min-tokens": ["1", "8"],
    "--lengths": ["128", "1K,256"],
    "--samples": ["1", "3"],
    "--depths": ["1", "3"],
    "--limit": ["1", "10"],
    "--max-length": ["512", "2K"],
    "--fail-under": ["0", "0.5", "1"],
    "--max-drop": ["0", "5", "99"],
    "--tasks": ["niah", "ppl,niah", "ruler/vt", "speed"],
    "--data": ["{prompt}"],
}


class Policies:
    name = "policy strings"

    def __init__(self, folder: Path) -> None:
        self.model = kvtool.attach(peaky_model("llama"))
        self.ids = random_ids(48)
        self.table = folder / "heads.tsv"
        self.table.write_text("0.1 0.9\n0.3 0.2\n")

    def case(self, random: Random) -> Case:
        if random.random() < 0.7:
            return self._sound(random)
        text = self._text(random, odd=True)
        if random.random() < 0.3:
            text = mutate_text(random, text)
        budget = random.choice([1, 2, 9, 16, 20, "50%", "4KiB", "9KiB"])
        block = random.choice(["full", "full", "block:16"])
        return lambda: self._run(text, budget, block)

    def _sound(self, random: Random) -> Case:
        """Draw until a cache can be built, or as often as that is quick."""
        for _ in range(12):
            text = self._text(random, odd=False)
            budget = random.choice([16, 20, 36, 40, "50%", "90%", "64KiB"])
            block = random.choice(["full", "full", "block:16"])
            case = partial(self._run, text, budget, block)
            try:
                policy = kvtool.parse_policy(text)
                kvtool.build_cache(self.model, policy, budget if policy.takes_budget else None)
            except KvtoolError:
                continue
            except Exception:
                break  # a fault, which the case itself runs into
            break
        return case

    def _text(self, random: Random, *, odd: bool) -> str:
        parts = [self._part(random, random.choice(list(BASES)), odd)]
        for _ in range(random.choice([0, 0, 1, 1, 2, 3] if odd else [0, 1, 1, 2])):
            parts.append(self._part(random, random.choice(list(MODIFIERS)), odd))
        return "+".join(parts)

    def _part(self, random: Random, name: str, odd: bool) -> str:
        cls = policy_class(name)
        hints = get_type_hints(cls)
        known = [field.name for field in fields(cls)]
        chosen = random.sample(known, min(len(known), random.choice([0, 0, 1, 1, 2])))
        value = self._value if odd else self._small_value
        given = [f"{key}={value(random, hints[key])}" for key in chosen]
        return f"{name}({','.join(given)})" if given else name

    def _small_value(self, random: Random, kind: Any) -> str:
        options = get_args(kind)
        words = [option for option in options if isinstance(option, str)]
        if words:
            return random.choice(words)
        if str in (kind, *options):
            return str(self.table)
        if bool in (kind, *options):
            return random.choice(["true", "false"])
        numbers = [0.25, 0.5, 1.0] if float in (kind, *options) else [1, 2, 3, 4, 5]
        return str(random.choice(numbers))

    def _value(self, random: Random, kind: Any) -> str:
        if random.random() < 0.2:
            return odd_word(random)
        options = get_args(kind)
        words = [option for option in options if isinstance(option, str)]
        if words:
            return random.choice(words)
        if str in (kind, *options):
            return random.choice([str(self.table), "nowhere", "/", "/dev/null", odd_word(random)])
        if bool in (kind, *options):
            return random.choice(["true", "false"])
        if random.random() < 0.4:
            return str(random.choice([0, 1, 2, 3, 4, 5, 8, 0.1, 0.5, 0.9, 1.0, 3.0]))
        return random.choice(NUMBERS)

    def _run(self, text: str, budget: int | str, block: str) -> None:
        policy = kvtool.parse_policy(text)
        assert kvtool.parse_policy(str(policy)) == policy, f"{policy} is read back as another"
        cache = kvtool.build_cache(
            self.model, policy, budget if policy.takes_budget else None, prefill=block
        )
        with torch.no_grad():
            prefill(self.model, cache, self.ids, new_tokens=3)
            for token in (5, 6, 7):
                logits = decode_step(self.model, cache, torch.tensor([token]))
        assert logits.isfinite().all(), f"{policy} makes logits that are not finite"
        kept = cache.report().kept_per_layer
        holds = policy.when == "always" and isinstance(budget, int)
        if holds and policy.allocator is None and policy.head_split is None:
            most = budget + policy.spare - 1  # before the next cut
            assert max(kept) <= most, f"{policy} keeps {kept} of {most}"


class Sizes:
    name = "sizes"

    def __init__(self, folder: Path) -> None:
        pass

    def case(self, random: Random) -> Case:
        if random.random() < 0.6:
            return self._sound(random)
        text = random.choice(NUMBERS) if random.random() < 0.7 else odd_word(random)
        if random.random() < 0.3:
            text += random.choice(["K", "k", "M", "%", "MiB", "GB", "TiB", " K", "\n", "0" * 5000])
        if random.random() < 0.3:
            text = mutate_text(random, text)
        kind = random.randrange(3)
        return lambda: self._run(text, kind)

    def _sound(self, random: Random) -> Case:
        whole = str(random.choice([1, 7, 64, 1000, 4096, random.randrange(1, 10**6)]))
        count = whole + random.choice(["", "", "K"])
        share = random.choice([f"{random.uniform(0.01, 1):.3g}", f"{random.randrange(1, 101)}%"])
        size = whole + random.choice(["KiB", "MiB"])
        kind = random.randrange(3)
        text = random.choice([count, share, size]) if kind == 0 else count
        return lambda: self._run(text, kind)

    def _run(self, text: str, kind: int) -> None:
        if kind == 0:
            budget = Budget.parse(text)
            assert Budget.parse(str(budget)) == budget, f"{budget} is read back as another"
            if budget.bytes is None and not 1 <= budget.for_prompt(1000) <= MOST_TOKENS:
                raise AssertionError(f"{budget} of 1000 tokens is {budget.for_prompt(1000)}")
        elif kind == 1:
            assert abs(parse_count(text)) <= MOST_TOKENS
        else:
            parse_prefill(f"block:{text}")


class Flags:
    """Numbers and names on the command line, up to where a model would be loaded."""

    name = "flags"

    def __init__(self, folder: Path) -> None:
        self.prompt = folder / "prompt.txt"
        self.prompt.write_text("Once upon a time.")

    def case(self, random: Random) -> Case:
        value = random.choice(NUMBERS) if random.random() < 0.7 else odd_word(random)
        generating = ["--max-new-tokens", "--seed", "--temperature", "--budget", "--prefill"]
        generating += ["--set", "--policy", "--allocator", "--stop", "--dtype", "--device"]
        planning = ["--ratio", "--bytes", "--budget", "--context", "--max-new-tokens", "--batch"]
        planning += ["--min-tokens", "--seed", "--allocator", "--policy"]
        measuring = ["--lengths", "--samples", "--depths", "--limit", "--max-length", "--seed"]
        measuring += ["--fail-under", "--max-drop", "--budget", "--tasks", "--data"]
        which = random.randrange(3)
        flag = random.choice([generating, planning, measuring][which])
        if random.random() < 0.6:
            value = random.choice(_SOUND[flag])
        if flag == "--set":
            keys = ["generation.temperature", "seed", "generation.max_new_tokens", "budget", "x"]
            value = f"{random.choice(keys[:4] if value in _SOUND[flag] else keys)}={value}"
        if flag in ("--fail-under", "--data"):
            value = f"{'niah' if flag == '--fail-under' else 'ppl'}={value}"
        value = value.replace("\x00", "0")  # which no shell passes on
        given = f"{flag}={value}".replace("{prompt}", str(self.prompt))
        if which == 0:
            policy = [] if flag in ("--policy",) else ["-p", random.choice(["h2o", "random"])]
            fixed = ["generate", "--dry-run", "--prompt-file", str(self.prompt), *policy]
        elif which == 1:
            target = [] if flag in ("--ratio", "--bytes", "--budget") else ["-b", "64"]
            fixed = ["plan-budget", *target]
        else:
            tasks = [] if flag == "--tasks" else ["-t", "ppl" if flag == "--data" else "niah"]
            fixed = ["eval", *tasks]
        if which == 2:
            return lambda: evaluate_until_drawn(*fixed, given)
        return lambda: command(*fixed, given)


def evaluate_until_drawn(*arguments: str) -> None:
    """Run `kvtool eval` as far as no sample is drawn."""
    with patch("kvtool.evaluation.prepare.draw_jobs", side_effect=Exit(0)):
        command(*arguments)
