"""How the policies rank on a model, beside how they rank on models of 8B.

    kvtool eval recipes/claims/unknown-question.yaml -o runs/ranking
    python recipes/reference-model/ranking.py runs/ranking/results.json

The two columns are RULER at 4096 tokens, 13 tasks, the question unknown, half and a quarter of the
prompt kept, as published on kvpress' board (https://huggingface.co/spaces/nvidia/kvpress-leaderboard,
read 2026-08-05). Its Expected Attention is `expected+ada`. Other policies of a run, `h2o` and
`expected(epsilon=0)`, are shown beside them, unranked: the board has none, or another form of it.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

BOARD: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "Qwen3-8B": {
        "kvzip": (95.18, 95.02),
        "expected+ada": (94.72, 88.33),
        "keydiff": (78.57, 64.44),
        "tova": (77.61, 62.38),
        "streaming": (61.13, 42.44),
        "snapkv": (55.71, 33.06),
        "pyramidkv": (40.67, 30.00),
        "random": (50.83, 12.43),
    },
    "Llama-3.1-8B": {
        "kvzip": (95.43, 95.24),
        "expected+ada": (92.18, 75.94),
        "keydiff": (85.46, 72.90),
        "tova": (76.21, 63.32),
        "streaming": (59.23, 37.69),
        "snapkv": (69.66, 43.36),
        "pyramidkv": (69.08, 43.39),
        "random": (6.88, 0.56),
    },
}
KEPT = ("50%", "25%")


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


def scores(results: Mapping[str, list[dict]], kept: str) -> dict[str, float]:
    """Return the mean over tasks of each policy's share of the full cache's score, in percent.

    Args:
        results: a document of results, as JSON has it.
        kept: the budget, such as `50%`.
    """
    full = {r["task"]: r["value"] for r in results["results"] if r["arm"] == "full"}
    found: dict[str, list[float]] = {}
    for result in results["results"]:
        policy, _, budget = result["arm"].partition("@")
        if budget == kept and full.get(result["task"]):
            found.setdefault(policy, []).append(100 * result["value"] / full[result["task"]])
    return {policy: statistics.fmean(shares) for policy, shares in found.items()}


def main(arguments: list[str] | None = None) -> None:
    """Print the two rankings and what they have in common."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    path = parser.parse_args(arguments).results
    if not path.is_file():
        parser.error(f"no file {path}; give the results.json of a run")
    results = json.loads(path.read_text())
    for i, kept in enumerate(KEPT):
        ours = scores(results, kept)
        names = [name for name in BOARD["Qwen3-8B"] if name in ours]
        if len(names) < 2:
            parser.error(f"{path} has fewer than two of {', '.join(BOARD['Qwen3-8B'])} at {kept}")
        titles = [f"{kept} kept", "percent of full", *BOARD]
        rows = [
            [name, f"{ours[name]:.1f}", *(f"{BOARD[of][name][i]:.1f}" for of in BOARD)]
            for name in sorted(names, key=lambda name: -ours[name])
        ]
        beside = sorted(ours.keys() - {*names, "full"}, key=lambda name: -ours[name])
        rows += [
            [f"{name} (unranked)", f"{ours[name]:.1f}", *("" for _ in BOARD)] for name in beside
        ]
        agree = [
            f"{spearman([ours[n] for n in names], [BOARD[of][n][i] for n in names]):.2f}"
            for of in BOARD
        ]
        for cells in (titles, ["---"] * len(titles), *rows, ["Spearman", "", *agree]):
            sys.stdout.write(f"| {' | '.join(cells)} |\n")
        sys.stdout.write("\n")


if __name__ == "__main__":
    main()
