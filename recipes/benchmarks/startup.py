"""How long a command takes before it works, as multiples of what it has to import.

    python -m recipes.benchmarks.startup [--runs 5]    # 2 minutes

A is the time of `import typer, yaml`, B of importing torch with transformers' Llama, each as a
process of its own. C is that of `import pydantic`, above which the ways of Llama-3.1-8B in 24 GiB
are to take half a second. All are run in turn, round after round, so that a busy machine is busy
for all; the table has medians of the processor time, which other processes disturb less than the
clock.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from kvtool.models import reference
from tests.models.published import LLAMA_3

KVTOOL = (sys.executable, "-m", "kvtool")
A = (sys.executable, "-c", "import typer, yaml")
B = (sys.executable, "-c", "import torch; from transformers import LlamaForCausalLM")
C = (sys.executable, "-c", "import pydantic")
MOST_ABOVE = 0.5  # seconds of the ways above C


def commands(folder: Path) -> dict[str, tuple[tuple[str, ...], str, float]]:
    """Return what is run, by its name: the command, `A` or `B`, and its bound as a multiple."""
    recipe = folder / "bad.yaml"
    recipe.write_text("kind: recipe\nschema_version: 1\npolcy: h2o\n")
    model = str(reference.path())
    return {
        "policies": ((*KVTOOL, "policies"), "A", 3),
        "a policy typo": ((*KVTOOL, "generate", "-p", "h20"), "A", 3),
        "a bad recipe": ((*KVTOOL, "generate", str(recipe)), "A", 3),
        "--device cuda without CUDA": ((*KVTOOL, "generate", "--device", "cuda"), "B", 0.5),
        "plan-budget of a configuration": (
            (*KVTOOL, "plan-budget", "-m", model, "-b", "64", "--context", "1K"),
            "B",
            0.5,
        ),
        "ways in a memory as text": (
            (*KVTOOL, "plan-budget", "-m", model, "--memory", "8MiB", "-f", "text"),
            "B",
            0.5,
        ),
        "the first command": ((*KVTOOL, "generate"), "B", 1.25),
    }


def ways(folder: Path) -> tuple[str, ...]:
    """Return the command that lists the ways of a published configuration, alone in a folder."""
    (folder / "config.json").write_text(json.dumps(LLAMA_3))
    return (*KVTOOL, "plan-budget", "-m", str(folder), "--context", "100K", "--memory", "24GiB")


def processor_seconds(command: tuple[str, ...]) -> float:
    """Run a command without a GPU, and return the processor time that it took."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Time all, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        rows = commands(Path(folder))
        timed = {"A": A, "B": B, "C": C, "ways": (*ways(Path(folder)), "-f", "text")}
        timed |= {name: command for name, (command, _, _) in rows.items()}
        seconds: dict[str, list[float]] = {name: [] for name in timed}
        for _ in range(runs):
            for name, command in timed.items():
                seconds[name].append(processor_seconds(command))
    medians = {name: median(found) for name, found in seconds.items()}
    print(f"medians of {runs}: A {medians['A']:.3f} s, B {medians['B']:.2f} s")
    print(f"{'command':32} {'seconds':>8} {'multiple':>10} {'bound':>8}")
    for name, (_, unit, bound) in rows.items():
        multiple = f"{medians[name] / medians[unit]:.2f} {unit}"
        print(f"{name:32} {medians[name]:8.2f} {multiple:>10} {f'{bound:g} {unit}':>8}")
    above = medians["ways"] - medians["C"]
    print(f"ways of Llama-3.1-8B in 24 GiB: {above:.2f} s above C, bound {MOST_ABOVE:g} s")


if __name__ == "__main__":
    main()
