"""How the policies rank on both models of the claims, beside how they rank on models of 8B.

    python recipes/claims/ranking.py [FOLDER]

`page.py` puts this section on its page. FOLDER holds the results of the claims, by default
`results`, and the real model's in `../../real-model/results`.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvtool.documents.results import ResultsDocument
from kvtool.evaluation.run.index import read_results_file

HERE = Path(__file__).parent
REAL = "../../real-model/results/{}.json"
QWEN, LLAMA, LONGBENCH = "Qwen3-8B, RULER", "Llama-3.1-8B, RULER", "Llama-3-8B, LongBench"
HALF = {
    QWEN: {
        "kvzip": 95.18,
        "expected": 94.72,
        "keydiff": 78.57,
        "tova": 77.61,
        "streaming": 61.13,
        "snapkv": 55.71,
        "pyramidkv": 40.67,
        "random": 50.83,
    },
    LLAMA: {
        "kvzip": 95.43,
        "expected": 92.18,
        "keydiff": 85.46,
        "tova": 76.21,
        "streaming": 59.23,
        "snapkv": 69.66,
        "pyramidkv": 69.08,
        "random": 6.88,
    },
}
QUARTER = {
    QWEN: {
        "kvzip": 95.02,
        "expected": 88.33,
        "keydiff": 64.44,
        "tova": 62.38,
        "streaming": 42.44,
        "snapkv": 33.06,
        "pyramidkv": 30.00,
        "random": 12.43,
    },
    LLAMA: {
        "kvzip": 95.24,
        "expected": 75.94,
        "keydiff": 72.90,
        "tova": 63.32,
        "streaming": 37.69,
        "snapkv": 43.36,
        "pyramidkv": 43.39,
        "random": 0.56,
    },
}
MANY = {
    LONGBENCH: {"h2o": 39.68, "snapkv": 40.26, "adakv": 40.77, "pyramidkv": 40.16, "d2o": 39.50}
}
FEW = {LONGBENCH: {"h2o": 35.56, "snapkv": 35.67, "adakv": 38.60, "pyramidkv": 37.47, "d2o": 34.79}}
ALIKE = {"expected": "expected(epsilon=0.0)"}
"""What stands for a policy where a run has no such one."""


class Setting(NamedTuple):
    """A question's time and a budget: what others have measured, and which runs of ours answer."""

    title: str
    theirs: Mapping[str, Mapping[str, float]]
    ours: Mapping[str, tuple[tuple[str, ...], int | str]]


SETTINGS = (
    Setting(
        "later, half kept",
        HALF,
        {
            "SmolLM2-135M": ((REAL.format("later"),), 512),
            "bundled model": (("unknown-question.json",), "50%"),
        },
    ),
    Setting(
        "later, a quarter kept",
        QUARTER,
        {
            "SmolLM2-135M": ((REAL.format("later"),), 256),
            "bundled model": (("unknown-question.json",), "25%"),
        },
    ),
    Setting(
        "known, the larger budget",
        MANY,
        {
            "SmolLM2-135M": ((REAL.format("known"),), 512),
            "bundled model": (("heads-and-layers.json", "d2o.json"), 256),
        },
    ),
    Setting(
        "known, the smaller budget",
        FEW,
        {
            "SmolLM2-135M": ((REAL.format("known"),), 128),
            "bundled model": (("heads-and-layers.json", "d2o.json"), 64),
        },
    ),
)
TEXT = """## How policies rank

Do these models put policies in the order that models of 8B do? Each cell is a share of the full
cache's score in percent (mean over tasks), except for those of others, which are scores. Below are
Spearman's rank correlations with each of the others: 1 is the same order, 0 none, -1 the reverse.
With five to eight policies, chance alone gives 0.6 now and then.

Of others: RULER at 4096 tokens, 13 tasks, the question unknown, half and a quarter kept (kvpress'
board, read 2026-08-05; its Expected Attention is `expected+ada`), and LongBench at 512 and 128
tokens (SurrogateKV's data; PyramidKV from its published difference to SnapKV). Ours are codes in
texts of about 1000 tokens: SmolLM2 at 512, 256, 512 and 128 tokens, the bundled model at half, a
quarter, 256 and 64. The bundled model has Expected Attention without epsilon: it finds nothing
with it.

{found}
"""
FOUND = """SmolLM2 correlates with the others by {real} (mean of {count}), the bundled model by
{machine}. **The bundled model is a machine test, no evidence of quality**: its scores are not on
the first page.
"""


def ranks(values: Sequence[float]) -> list[float]:
    """Rank values from 1, the least; equal ones share the mean of their ranks.

    >>> ranks([10.0, 30.0, 20.0, 20.0])
    [1.0, 4.0, 2.5, 2.5]
    """
    below = [sum(other < value for other in values) for value in values]
    equal = [values.count(value) for value in values]
    return [low + (same + 1) / 2 for low, same in zip(below, equal, strict=True)]


def spearman(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Correlate the ranks of two lists of equally many values.

    >>> spearman([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
    0.5
    """
    return statistics.correlation(ranks(ours), ranks(theirs))


def scores(runs: Sequence[ResultsDocument], budget: int | str) -> dict[str, float]:
    """Return the mean over tasks of each policy's share of the full cache's score, in percent."""
    found: dict[str, list[float]] = {}
    for run in runs:
        full = {each.task: each.value for each in run.results if each.variant == "full"}
        policies = {
            variant.name: variant.policy
            for variant in run.variants
            if str(variant.budget) == str(budget)
        }
        for result in run.results:
            whole = full.get(result.task)
            if result.variant in policies and result.best and whole and result.value is not None:
                found.setdefault(policies[result.variant], []).append(100 * result.value / whole)
    return {policy: statistics.fmean(shares) for policy, shares in found.items()}


def section(folder: Path) -> str:
    """Return the section of the page; empty where a run is missing."""
    tables, agree = [], {}
    for setting in SETTINGS:
        ours = {}
        for name, (files, budget) in setting.ours.items():
            if not all((folder / file).is_file() for file in files):
                return ""
            ours[name] = scores([read_results_file(folder / file) for file in files], budget)
        tables.append(_table(setting, ours, agree))
    means = {name: f"{statistics.fmean(each):.2f}" for name, each in agree.items()}
    found = FOUND.format(
        real=means["SmolLM2-135M"], machine=means["bundled model"], count=len(agree["SmolLM2-135M"])
    )
    return TEXT.format(found=found) + "\n".join(tables)


def _table(
    setting: Setting, ours: Mapping[str, Mapping[str, float]], agree: dict[str, list[float]]
) -> str:
    first = next(iter(setting.theirs.values()))
    known = {
        name: {each: found.get(each, found.get(ALIKE.get(each, ""))) for each in first}
        for name, found in ours.items()
    }
    order = [each for each in first if all(found[each] is not None for found in known.values())]
    order.sort(key=lambda each: -first[each])
    lines = [
        [setting.title, *known, *setting.theirs],
        ["---"] * (1 + len(known) + len(setting.theirs)),
    ]
    for each in order:
        own = [f"{found[each]:.1f}" for found in known.values()]
        lines.append([f"`{each}`", *own, *(f"{of[each]:.1f}" for of in setting.theirs.values())])
    row = []
    for name, found in known.items():
        each = [
            spearman([found[one] for one in order], [of[one] for one in order])
            for of in setting.theirs.values()
        ]
        agree.setdefault(name, []).extend(each)
        row.append(" / ".join(f"{value:.2f}" for value in each))
    lines.append(["Spearman", *row, *("" for _ in setting.theirs)])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    sys.stdout.write(section(Path(sys.argv[1]) if sys.argv[1:] else HERE / "results"))
