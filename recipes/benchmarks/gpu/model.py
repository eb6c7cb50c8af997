"""Train the bundled model's recipe for as long as there is time, on from where it stopped."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from rich.table import Table

from recipes.benchmarks.gpu.results import Case, Record, Wrong
from recipes.benchmarks.gpu.settings import Settings

RECIPE = Path(__file__).parents[3] / "recipes" / "reference-model"
TITLE = "training of the bundled model"
TINY = ("--width", "16", "--layers", "1", "--heads", "2", "--kv-heads", "1", "--head-dim", "8")
TINY += ("--samples", "1", "--check-every", "2", "--log-every", "2", "--cool-down", "0.001")
LEFT = 45  # seconds that are kept for the last checkpoint


def cases(settings: Settings) -> Iterator[Case]:
    """One case, which is open until the curriculum is at its end."""
    yield Case("training", partial(training, settings))


def training(settings: Settings) -> Record:
    """Train until the time is up, and print how far the curriculum has come.

    Raises:
        Wrong: no step was taken, or what was saved is not what was trained.
    """
    folder = settings.work / "training"
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / "training_state.pt"
    before = _progress(state)
    left = settings.deadline - LEFT - time.time()
    minutes = 0.02 if settings.tiny else max(left / 60, 0.2)
    log = io.StringIO()
    start = time.perf_counter()
    threads = torch.get_num_threads()
    sys.path.append(str(RECIPE))  # the training is no part of the package
    train = import_module("train")
    with contextlib.redirect_stdout(log):
        options = ("--out", str(folder), "--minutes", f"{minutes:.3f}")
        train.main([*options, "--threads", str(threads), *(TINY if settings.tiny else ())])
    after, seconds = _progress(state), time.perf_counter() - start
    tokens = after.get("tokens", 0) - before.get("tokens", 0)
    gates = [line.strip() for line in log.getvalue().splitlines() if "first/exact" in line]
    found = {
        "step": after.get("step", 0),
        "tokens": after.get("tokens", 0),
        "stage": "cooling down" if after.get("cooling") else after.get("stage"),
        "tokens_per_s": tokens / seconds,
        "gate": gates[-1] if gates else "",
    }
    if tokens <= 0 and not after.get("cooling"):
        raise Wrong("no step was taken", found)
    return found


def _progress(state) -> Record:
    if not state.exists():
        return {}
    return torch.load(state, map_location="cpu", weights_only=True)["progress"]


def table(records: dict[str, Record], machine: Record) -> list[Table]:
    """Show how far the training has come."""
    shown = Table(title=TITLE, show_edge=False)
    for name in ("steps", "M tokens", "stage", "tokens/s", "last gate"):
        shown.add_column(name)
    for record in records.values():
        if "step" in record:
            shown.add_row(
                f"{record['step']}",
                f"{record['tokens'] / 1e6:.2f}",
                f"{record['stage']}",
                f"{record['tokens_per_s']:.0f}",
                record["gate"],
            )
    return [shown]
