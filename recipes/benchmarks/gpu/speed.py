"""Steps of one row that nothing compiles, and answers as a user has them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import torch
from rich.table import Table

import kvtool
from kvtool.generation.continuation import generate
from recipes.benchmarks.gpu import decode
from recipes.benchmarks.gpu.decode import READERS, STATIC
from recipes.benchmarks.gpu.results import Case, Record
from recipes.benchmarks.gpu.settings import Settings

TITLE = "one row of an 8B shape, random weights, bfloat16"
POLICIES = ("h2o", "h2o+caote", "snapkv", "full", *READERS)
EAGER = ("h2o", "snapkv", "quest")
ANSWERS = ("full", "h2o", "snapkv", "quest")


def cases(settings: Settings) -> Iterator[Case]:
    """Captured steps and eager ones, then whole answers."""
    n = decode.long(settings)
    for how, policies in (("captured", POLICIES), ("eager", EAGER)):
        for policy in (STATIC, *(("h2o", "quest") if settings.tiny else policies)):
            yield decode.step_case(settings, 1, n, policy, how)
    for policy in ANSWERS[:2] if settings.tiny else ANSWERS:
        yield Case(f"answer {n} {policy}", partial(answer, settings, n, policy), seconds=6)


def answer(settings: Settings, n: int, policy: str) -> Record:
    """Let `generate` answer a long prompt by 128 tokens, graphs included; and its later tokens."""
    decode.settle()
    ours, new = decode.models(settings.device, settings.tiny)[0], 8 if settings.tiny else 128
    ids = torch.randint(0, ours.config.vocab_size, (1, n), device=ours.device)
    budget = None if policy == "full" else decode.budget_of(settings)
    cache = kvtool.build_cache(ours, decode.policy_for(policy, settings), budget)
    times: list[float] = []

    def note() -> bool:
        times.append(time.perf_counter())
        return False

    no_text = SimpleNamespace(batch_decode=lambda rows, **options: [""] * len(rows))
    options = {"max_new_tokens": new, "compiled": None, "stop_when": note}
    with decode.endless(ours):
        found = generate(ours, no_text, cache, ids, **options)
    later = [b - a for a, b in zip(times[new // 2 :], times[new // 2 + 1 :], strict=False)]
    return {
        "tokens_per_s": found.new_tokens / found.decode_s,
        "answer_ms": found.decode_s / found.new_tokens * 1e3,
        "later_ms": statistics.median(later) * 1e3,
        "prompt_s": found.prefill_s,
    }


def table(records: dict[str, Record], machine: Record) -> list[Table]:
    """Show steps, and answers beside them."""
    shown = Table(title="answers by generate", show_edge=False)
    shown.add_column("context, policy")
    for name in ("tokens/s", "ms a token", "later tokens", "prompt, s"):
        shown.add_column(name, justify="right")
    for key, record in records.items():
        if "answer_ms" in record:
            numbers = (record[name] for name in ("tokens_per_s", "answer_ms", "later_ms"))
            cells = [f"{number:.2f}" for number in numbers]
            shown.add_row(key.removeprefix("answer "), *cells, f"{record['prompt_s']:.2f}")
    return [*decode.table(records, machine), *([shown] if shown.row_count else [])]
