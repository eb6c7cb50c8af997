"""Train a bundled model from scratch, or further from a checkpoint.

    python recipes/reference-model/train.py --out DIR [--curriculum trace]

A stage ends when its measured accuracy is reached, so no clock drives the schedule. The run may be
killed at any time, or ended by `--minutes`: the same command goes on from the last checkpoint,
optimisers and random numbers included. For several processes, start the command with `torchrun
--nproc-per-node N`.
"""

import argparse
import sys
from pathlib import Path

import torch

from kvtool.errors import KvtoolError
from training.run import Run
from training.stages import CURRICULA


def _places(text: str) -> list[int]:
    return [int(place) for place in text.split(",")]


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--init", type=Path, help="start from this checkpoint's weights")
    parser.add_argument("--grow", type=int, help="layers to grow the model of --init to")
    parser.add_argument("--sinks", type=_places, default=[], help="layers with sinks: 1,3,5,7")
    parser.add_argument("--curriculum", choices=CURRICULA, default="recall")
    parser.add_argument("--stage", type=int, default=0, help="the first, from 0")
    parser.add_argument("--cool-down-now", action="store_true", help="skip to the last stage")
    parser.add_argument("--cool-down", type=float, default=12.0, help="its millions of tokens")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--lr", type=float, default=4e-3, help="peak rate of the matrices")
    parser.add_argument("--adam-lr", type=float, default=3e-3, help="of embeddings and norms")
    parser.add_argument("--samples", type=int, default=48, help="prompts per task at each gate")
    parser.add_argument("--check-every", type=int, default=200, help="steps between gates")
    parser.add_argument("--log-every", type=int, default=50, help="steps between log lines")
    parser.add_argument("--minutes", type=float, help="stop after so many, to go on another time")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Read the options and train."""
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        run = Run(options)
    except KvtoolError as error:
        sys.exit(f"error: {error}")
    run.train()


if __name__ == "__main__":
    main()
