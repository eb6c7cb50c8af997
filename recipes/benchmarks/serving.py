"""Many prompts of different lengths in one memory: rows in flight, and tokens per second.

    python -m recipes.benchmarks.serving                    # about 3 min, two cores
    python -m recipes.benchmarks.serving --prompts 8 --policies h2o

Random prompts of a half to a whole `--length`, answers of an eighth to a whole `--new` tokens, on a
random Llama of 42 million parameters. The memory is what `--rows` of the largest rows take of a
full cache. The first two lines are transformers' `DynamicCache` with sdpa: one prompt after
another (the first `--alone` of them), and batches of `--rows` padded prompts, which wait for their
longest answer. The others are what `kvtool generate --prompts --memory` does: rows that end are
free for the next prompt, with as many in flight as fit into the same memory, policy state included.

Tokens per second count the tokens that were asked for; `decoding` leaves out the seconds in which
prompts are read. `rows` and `tokens/s` are set beside the static batches of the full cache.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel

import kvtool
from kvtool.documents.memory import DeviceMemory
from kvtool.generation.feeding import wait
from kvtool.generation.serving import Served, Waiting, serve
from kvtool.planning.bytes import Text
from kvtool.planning.estimate import estimate_memory
from kvtool.planning.variants import Variant
from kvtool.sizes import Budget
from recipes.benchmarks.models import build_models

UNKNOWN = DeviceMemory(device="", free_bytes=None, weights_bytes=None)


@dataclass(frozen=True)
class Taken:
    """What a way to answer has taken.

    Attributes:
        rows: in flight at a time, at most.
        tokens: that were asked for.
        reading: of the seconds, those in which prompts were read.
    """

    rows: int
    tokens: int
    seconds: float
    reading: float

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def decoding_speed(self) -> float:
        """Tokens per second in which no prompt was read."""
        return self.tokens / (self.seconds - self.reading)


def make_prompts(model: PreTrainedModel, count: int, longest: int, most_new: int) -> list[Waiting]:
    """Random prompts and lengths of answers, the same whenever they are made."""
    source = torch.Generator().manual_seed(0)

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=source))

    prompts = []
    for index in range(count):
        length = between(longest // 2, longest)
        ids = torch.randint(model.config.vocab_size, (1, length), generator=source)
        prompts.append(Waiting(index, ids, between(max(1, most_new // 8), most_new)))
    return prompts


def sequence_bytes(
    model: PreTrainedModel, policy: str, budget: Budget | None, tokens: int, new: int
) -> int:
    """What a row takes of a cache, as `kvtool generate --prompts` forecasts it."""
    variant = Variant(kvtool.parse_policy(policy), budget)
    dtype = str(model.dtype).removeprefix("torch.")
    found = estimate_memory(model.config, dtype, variant, Text(tokens, new), UNKNOWN)
    return found.kv_bytes + found.state_bytes


@torch.no_grad()
def answer_in_batches(model: PreTrainedModel, prompts: Sequence[Waiting], rows: int) -> Taken:
    """Answer prompts in padded batches, each of which runs until its longest answer has ended."""
    reading, start = 0.0, time.perf_counter()
    for first in range(0, len(prompts), rows):
        batch, begun = prompts[first : first + rows], time.perf_counter()
        width = max(prompt.ids.shape[1] for prompt in batch)
        new = max(prompt.max_new_tokens for prompt in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.ones(len(batch), width + new, dtype=torch.long)
        for row, prompt in enumerate(batch):
            padding = width - prompt.ids.shape[1]
            ids[row, padding:], mask[row, :padding] = prompt.ids[0], 0
        ids, mask = ids.to(model.device), mask.to(model.device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache, past = DynamicCache(config=model.config), 0
        for step in range(new):
            logits = model(
                input_ids=ids,
                attention_mask=mask[:, : past + ids.shape[1]],
                position_ids=positions[:, past : past + ids.shape[1]],
                past_key_values=cache,
                logits_to_keep=1,
            ).logits
            past += ids.shape[1]
            ids = logits[:, -1].argmax(-1, keepdim=True)
            if step == 0:
                wait(model)
                reading += time.perf_counter() - begun
    wait(model)
    seconds = time.perf_counter() - start
    return Taken(rows, sum(each.max_new_tokens for each in prompts), seconds, reading)


def answer_as_rows_end(
    model: PreTrainedModel, policy: str, budget: Budget | None, prompts: list[Waiting], memory: int
) -> Taken:
    """Answer prompts with as many rows in flight as fit into a memory."""

    def new_cache():
        return kvtool.build_cache(model, policy, budget)

    prompts = [
        replace(
            each,
            sequence_bytes=sequence_bytes(
                model, policy, budget, each.ids.shape[1], each.max_new_tokens
            ),
        )
        for each in prompts
    ]
    served = Served()
    list(serve(model, None, new_cache, prompts, memory=memory, served=served))
    return Taken(served.most_sequences, served.new_tokens, served.seconds, served.reading_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rows", type=int, default=4, help="of a full cache, which set the memory")
    parser.add_argument("--alone", type=int, default=6, help="prompts answered one after another")
    parser.add_argument("--budget", default="25%")
    parser.add_argument("--policies", nargs="+", default=["h2o", "snapkv"])
    args = parser.parse_args()
    model, plain = build_models()
    for each in (model, plain):
        each.generation_config.eos_token_id = None  # every answer is as long as it is asked to be
    prompts = make_prompts(model, args.prompts, args.length, args.new)
    budget = Budget.parse(args.budget)
    memory = args.rows * sequence_bytes(model, "full", None, args.length, args.new)
    ways = {
        ("DynamicCache", "one by one"): lambda: answer_in_batches(plain, prompts[: args.alone], 1),
        ("DynamicCache", "static batches"): lambda: answer_in_batches(plain, prompts, args.rows),
    }
    for policy in ("full", *args.policies):
        bound = None if policy == "full" else budget

        def answer(policy=policy, bound=bound) -> Taken:
            return answer_as_rows_end(model, policy, bound, prompts, memory)

        ways[policy if bound is None else f"{policy}, {args.budget}", "as rows end"] = answer
    taken: dict[tuple[str, str], Taken] = {}
    for way, answer in ways.items():
        taken[way] = found = answer()
        told = f"{found.tokens} tokens in {found.seconds:.1f} s, {found.rows} rows"
        print(f"{', '.join(way)}: {told}", file=sys.stderr, flush=True)
    tokens = sum(prompt.max_new_tokens for prompt in prompts)
    print_table(taken, f"{len(prompts)} prompts, {tokens} tokens, {memory / 2**20:.0f} MiB of rows")


def print_table(taken: dict[tuple[str, str], Taken], title: str) -> None:
    """Print a line for each way, set beside the static batches of the full cache."""
    table = Table(title=title)
    names = ("cache", "answered", "rows", "times", "seconds", "tokens/s", "times", "decoding/s")
    for name in (*names, "times"):
        table.add_column(name, justify="left" if name in names[:2] else "right")
    base = taken["DynamicCache", "static batches"]
    for way, found in taken.items():
        table.add_row(
            *way,
            str(found.rows),
            f"{found.rows / base.rows:.2f}",
            f"{found.seconds:.1f}",
            f"{found.speed:.1f}",
            f"{found.speed / base.speed:.2f}",
            f"{found.decoding_speed:.1f}",
            f"{found.decoding_speed / base.decoding_speed:.2f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
