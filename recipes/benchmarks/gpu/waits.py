"""What else a user waits for: other prompts, CaliDrop, many prompts, beside their baselines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from rich.table import Table

from kvtool.sizes import Budget
from recipes.benchmarks.calidrop import calibrated_lines
from recipes.benchmarks.gpu import decode, prompts
from recipes.benchmarks.gpu.decode import STATIC, release
from recipes.benchmarks.gpu.pays import contexts
from recipes.benchmarks.gpu.results import Case, Record
from recipes.benchmarks.gpu.settings import Settings
from recipes.benchmarks.serving import answer_as_rows_end, make_prompts, sequence_bytes

__all__ = ["TITLE", "cases", "release", "table"]
TITLE = "many prompts, other whole prompts, CaliDrop, further compiled steps"
COMPILED = ("rocketkv", "hsa", "snapkv", "h2o+caote", "roco")
WHOLE = ("roco", "scissorhands", "d2o")
BASES = ("snapkv", "h2o")
SERVED = ("h2o", "snapkv")


def cases(settings: Settings) -> Iterator[Case]:
    """Many prompts first, what takes a minute to compile last."""
    for policy in SERVED[:1] if settings.tiny else SERVED:
        yield Case(f"serving {policy}", partial(serving, settings, policy), seconds=40)
    n = 96 if settings.tiny else 4096
    for base in BASES[:1] if settings.tiny else BASES:
        yield Case(f"calidrop {n} {base}", partial(calidrop, settings, n, base), seconds=10)
    if not settings.tiny:
        for length, policy in product((4096, 16384), WHOLE):
            yield prompts.prompt_case(settings, length, policy, "full")
        for policy in prompts.POLICIES:
            yield prompts.prompt_case(settings, 102400, policy, "block:2048")
        for policy in COMPILED:
            yield decode.step_case(settings, 1, decode.long(settings), policy, "compiled")
    for how in ("compiled, masked", "compiled, not tuned"):
        yield decode.step_case(settings, 1, decode.long(settings), STATIC, how)
    for rows, length in contexts(settings)[1:]:
        for policy in (STATIC, "h2o", "quest"):
            yield decode.step_case(settings, rows, length, policy, "compiled")


@torch.no_grad()
def calidrop(settings: Settings, n: int, base: str) -> Record:
    """Decode with calibration, anew at every eighth step, against the base without it."""
    ours = decode.models(settings.device, settings.tiny)[0]
    ids = torch.randint(0, ours.config.vocab_size, (1, n), device=ours.device)
    base, count = decode.policy_for(base, settings), 1 if settings.tiny else 4
    (line,) = calibrated_lines(ours, base, decode.budget_of(settings), ids, count, ("every 8th",))
    return {"ms": line.ms, "base_ms": line.base_ms, "ratio": line.ratio}


@torch.no_grad()
def serving(settings: Settings, policy: str) -> Record:
    """Answer many prompts at a quarter of their tokens, in the memory of a few full rows.

    The baseline is the full cache in as much memory, whose rows end and join likewise.
    """
    ours = decode.models(settings.device, settings.tiny)[0]
    count, longest, new = (4, 96, 8) if settings.tiny else (24, 8192, 128)
    asked = make_prompts(ours, count, longest, new)
    asked = [replace(each, ids=each.ids.to(settings.device)) for each in asked]
    memory = (1 if settings.tiny else 4) * sequence_bytes(ours, "full", None, longest, new)
    variants = (("full", None), (decode.policy_for(policy, settings), Budget.parse("25%")))
    with decode.endless(ours):
        base, own = (answer_as_rows_end(ours, *variant, asked, memory) for variant in variants)
    return {
        "ms": 1e3 * own.seconds / own.tokens,
        "base_ms": 1e3 * base.seconds / base.tokens,
        "ratio": own.seconds / base.seconds,
        "rows": own.rows,
        "base_rows": base.rows,
        "decoding_ratio": base.decoding_speed / own.decoding_speed,
    }


def table(records: dict[str, Record], machine: Record) -> list[Table]:
    """Show what is timed in turns, and steps."""
    return [*prompts.table(records, machine), *decode.table(records, machine)]
