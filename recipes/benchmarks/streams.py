"""Next-token loss along a stream far beyond the bundled model's trained positions.

    python -m recipes.benchmarks.streams                    # about 5 min, one core
    python -m recipes.benchmarks.streams --tokens 8192 --policies "streaming(positions=cache)"

The model was trained to 8192 positions. The stream is a row of built-in passages of 384 tokens,
each of which ends with a recap of the codes in it, so that there is always something to remember
and it fits the budget. It is fed in blocks; each token is scored from what the cache holds before
it. A line shows a policy's mean loss over each window of 4096 tokens, seconds of the first and of
the last window, and the process's resident size after the first and the last window.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from rich.console import Console
from rich.table import Table

import kvtool
from kvtool.evaluation.samples.passages import recap_passage
from kvtool.evaluation.samples.sample import TokenCounter
from kvtool.generation import token_logprobs
from kvtool.models.load import load
from recipes.benchmarks.speed import reset_peak

POLICIES = (
    "streaming",
    "streaming(positions=cache)",
    "h2o",
    "h2o(positions=cache)",
    "roco(positions=cache)",
    "tova(positions=cache)",
)
WINDOW, PASSAGE = 4096, 384


def stream_ids(tokenizer, tokens: int) -> torch.Tensor:
    """Passage after passage: (1, tokens) int64."""
    counter = TokenCounter(
        encode=lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        decode=tokenizer.decode,
    )
    ids = [tokenizer.bos_token_id]
    while len(ids) < tokens:
        passage = recap_passage("streams", 0, PASSAGE, len(ids), counter)
        ids += counter.encode(passage)
    return torch.tensor([ids[:tokens]])


@torch.inference_mode()
def measure(model, policy: str, args: argparse.Namespace, ids: torch.Tensor):
    """Mean loss and seconds of each window, and the resident MiB after each."""
    cache = kvtool.build_cache(model, policy, args.budget)
    losses, seconds, resident = [], [], []
    for start in range(0, ids.shape[1] - 1, WINDOW):
        part = ids[:, start : start + WINDOW + 1]  # its last token is scored, and fed next time
        begin = time.perf_counter()
        logprobs, _ = token_logprobs(model, cache, part, chunk=args.block)
        seconds.append(time.perf_counter() - begin)
        losses.append(-logprobs.mean().item())
        resident.append(reset_peak())
    return losses, seconds, resident


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=40960)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--block", type=int, default=32, help="tokens of a forward")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    args = parser.parse_args()
    loaded = load()
    model = kvtool.attach(loaded.model)
    ids = stream_ids(loaded.tokenizer, args.tokens + 1)
    table = Table(title=f"loss in nats by windows of {WINDOW} tokens, budget {args.budget}")
    for name in ("policy", *(f"{start // 1024}K" for start in range(0, args.tokens, WINDOW))):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for name in ("s, first", "s, last", "MiB, first", "MiB, last"):
        table.add_column(name, justify="right")
    for policy in args.policies:
        print(policy, file=sys.stderr)
        losses, seconds, resident = measure(model, policy, args, ids)
        table.add_row(
            policy,
            *(f"{loss:.2f}" for loss in losses),
            *(f"{value:.1f}" for value in (seconds[0], seconds[-1])),
            *(f"{value:.0f}" for value in (resident[0], resident[-1])),
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
