"""Write README.md beside this file from the results of `measure.py` that lie in `results`.

python recipes/allocation/page.py
"""

import json
from pathlib import Path
from textwrap import fill

from kvtool.evaluation.verdict import Estimate, difference

HERE = Path(__file__).parent
HEAD = """# Which layers should have the budget?

One policy at equal budgets, split over the layers in seven ways. Texts have about 1000 tokens with
a hidden code. *Later*: the question comes after the text was compressed. *Known*: it is in the
prompt that is compressed. A cell is the percentage of codes found. Behind it is the difference
from equal budgets (`uniform`) with its paired 95 % interval, in points. It is **bold** where the
interval leaves out 0.

"""
DEFAULT = """## The default

Cells whose interval is above equal budgets, and cells whose interval is below. An allocator wins on
a model if some are above and none is below.

| allocator | {models} |
| --- |{lines}
{counts}
{said}

"""
SAID = (
    "A plan splits by `optimal` where its profile holds `answer_loss` of the policy. With any "
    "other profile it splits by `d2o`: the rule of `d2o-alloc`, on the attention of the profile's "
    "texts in place of the prompt's."
)
TAIL = """## The plans

`optimal(answer_loss)` is `kvtool plan-budget --allocator optimal`: the layers whose cut costs the
answer most get the tokens. `optimal(output_error)` minimised the sum of the layers' output errors
and is no longer offered. `d2o-alloc`, `d2o-reciprocal` and `pyramid` split by the prompt itself or
along a line. `ada` lets the heads of a layer compete, with equal budgets of the layers. All of them
hold the same number of tokens.

The profiles of both models read eight texts of the built-in haystack, with a question and its right
answer. Of the comparison's 200 needles for the bundled model, two may be among these eight. For
SmolLM2 the haystack is another one: novels by Jane Austen, in which codes have four digits in place
of seven. Its profile has the shares 1/16, 1/8, 1/4 and 1/2 (`-m smollm2 --dtype bfloat16 -p
keydiff`).

```bash
kvtool profile --metrics answer_loss --data niah -p h2o --budgets 32,64,128,256,512 -o profile.yaml
kvtool plan-budget profile.yaml -b 128 -p h2o --allocator optimal -o plan.yaml
```

| model | layers | layers that get more than the mean |
| --- | --- | --- |
{plans}
`python recipes/allocation/measure.py bundled` and `.. smollm2` measure again, and
`python recipes/allocation/page.py` writes this page. SmolLM2 needs its package and the novels:
[how to get them](../real-model/README.md).
"""
TITLES = {
    "bundled": "The bundled model, `h2o`",
    "smollm2": "SmolLM2-135M-Instruct, `keydiff`",
}


def page(folder: Path) -> str:
    """Return the page as text, from the results and plans of a folder."""
    parts, plans = [HEAD], []
    counts = list[dict[str, tuple[int, int, int]]]()
    for name, title in TITLES.items():
        run = json.loads((folder / "results" / f"{name}.json").read_text())
        parts.append(_section(title, run["results"], run["environment"]))
        counts.append(_counts(run["results"]))
        plans += [_plan(path) for path in sorted((folder / "plans").glob(f"{name}-answer_loss-*"))]
    return "".join([*parts, _default(counts)]) + TAIL.replace("{plans}", "".join(plans))


def _counts(results: dict) -> dict[str, tuple[int, int, int]]:
    """Count the cells of each allocator: surely above equal budgets, surely below, all."""
    found: dict[str, tuple[int, int, int]] = {}
    for cells in (each for tasks in results.values() for each in tasks.values()):
        count = min(map(len, cells.values()))
        for variant, own in cells.items():
            allocator, _, budget = variant.partition("@")
            if budget and allocator != "uniform":
                apart = _apart(own[:count], cells[f"uniform@{budget}"][:count])
                sure = apart.low is not None and apart.high is not None
                above, below, every = found.get(allocator, (0, 0, 0))
                above += sure and apart.low > 0
                below += sure and apart.high < 0
                found[allocator] = above, below, every + 1
    return found


def _default(counts: list[dict[str, tuple[int, int, int]]]) -> str:
    """Say which allocators win on both models, and what the default is."""
    rows, winners = "", []
    for name in counts[0]:
        own = [each[name] for each in counts]
        cells = [f"{above} above, {below} below, of {every}" for above, below, every in own]
        rows += f"| `{name}` | {' | '.join(cells)} |\n"
        if all(above > 0 and below == 0 for above, below, _ in own):
            winners.append(f"`{name}`")
    said = [f"{', '.join(winners)} wins on both models.", SAID]
    if not winners:
        said = ["No allocator wins on both models.", SAID]
    worse = [
        f"{own['d2o-alloc'][1]} of {own['d2o-alloc'][2]} cells of {title}"
        for own, title in zip(counts, TITLES.values(), strict=True)
        if own["d2o-alloc"][1]
    ]
    if worse:
        said.append(f"This rule is below equal budgets in {' and '.join(worse)}.")
        said.append("There `--allocator uniform` finds more codes.")
    return (
        DEFAULT.replace("{models}", " | ".join(TITLES.values()))
        .replace("{lines}", " --- |" * len(TITLES))
        .replace("{counts}", rows)
        .replace("{said}", fill(" ".join(said), 100, break_on_hyphens=False))
    )


def _apart(found: list[float], even: list[float]) -> Estimate:
    """Compare the same texts under an allocator and under equal budgets."""
    return difference([(each, 1.0) for each in found], [(each, 1.0) for each in even])


def _section(title: str, results: dict, environment: dict) -> str:
    columns, rows = [], {}
    for question, tasks in results.items():
        for task, cells in tasks.items():
            count = min(map(len, cells.values()))
            for variant, found in cells.items():
                allocator, _, budget = variant.partition("@")
                if not budget:
                    continue
                column = f"{task}, {question}, {budget} (n={count})"
                columns += [column] if column not in columns else []
                even = cells[f"uniform@{budget}"][:count]
                rows.setdefault(allocator, {})[column] = _cell(found[:count], even)
    lines = [("allocator", *columns), ("---",) * (len(columns) + 1)]
    lines += [(f"`{name}`", *(row[column] for column in columns)) for name, row in rows.items()]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    where = ", ".join(f"{key} {value}" for key, value in environment.items())
    return f"## {title}\n\n{table}\nMeasured with {where}.\n\n"


def _cell(found: list[float], even: list[float]) -> str:
    """Write a score in percent, and how far it is from that of equal budgets."""
    score = f"{100 * sum(found) / len(found):.0f}"
    if found is even or found == even:
        return score
    apart = _apart(found, even)
    if apart.low is None or apart.high is None:
        return score
    text = f"{100 * apart.value:+.0f} ({100 * apart.low:+.0f} to {100 * apart.high:+.0f})"
    sure = apart.low > 0 or apart.high < 0
    return f"{score}, **{text}**" if sure else f"{score}, {text}"


def _plan(path: Path) -> str:
    plan = json.loads(path.read_text())
    tokens, mean = plan["layers"]["tokens"], plan["target"]["tokens"]
    more = [f"{i}: {own}" for i, own in enumerate(tokens) if own > mean]
    return f"| {plan['model']['id']}, {mean} tokens | {len(tokens)} | {', '.join(more)} |\n"


if __name__ == "__main__":
    (HERE / "README.md").write_text(page(HERE))
