"""Write the page of claims, README.md beside this file, from the results that lie here.

    python recipes/claims/page.py [FOLDER]

FOLDER holds the `results.json` of each run as NAME.json; by default `results`. Verdicts are derived
anew from the scores of the samples. Its `why.json` may give reasons, by the name of the run.
"""

import json
import sys
from pathlib import Path

from kvtool.documents.claim import ClaimRow, ClaimVerdict
from kvtool.documents.recipe_source import read_recipe
from kvtool.documents.results import ResultsDocument, when_asked
from kvtool.documents.source import read_file
from kvtool.errors import KvtoolError
from kvtool.evaluation.claims import judge_claim
from kvtool.evaluation.run.index import read_results_file
from kvtool.report import formats
from kvtool.report.words import at_budgets, claim_in_words, says, than_value

HERE = Path(__file__).parent
HEAD = """# Claims

What papers and their peers say of policies, tested on the [bundled
model](../../kvtool/models/README.md#the-bundled-model) or, where a claim is of reasoning or of real
text, on the model that its section names: a row for each claim and for each time at
which the question may come. *Known*: it is in the prompt that is compressed; *later, kept*: the
context is compressed first, the question stays whole beside it.

Verdicts follow from paired 95 % intervals (bootstrap over samples, the same samples for all
variants). A comparison is one pair of policies on one task, each sample's score averaged over the
budgets.
*Holds*: the interval lies on the claim's side of 0 in one comparison or more, and on the other
side in none; *fails*: the other way round; *holds in part*: some of each; *undecided*: neither
anywhere, with this many samples. Intervals are not widened for the number of comparisons: where
two policies are equal, one comparison in forty fails by chance. A small model that was trained on
such tasks is no 8B model: what fails here may hold there, so each command takes `-m MODEL`, and
each row says what others have measured.

Papers are linked from [the table of policies](../../kvtool/policies/README.md). The others are
kvpress' [board](https://huggingface.co/spaces/nvidia/kvpress-leaderboard), its threads
[38](https://github.com/NVIDIA/kvpress/pull/38), [93](https://github.com/NVIDIA/kvpress/pull/93) and
[219](https://github.com/NVIDIA/kvpress/pull/219) and its issue
[222](https://github.com/NVIDIA/kvpress/issues/222), the data that
[SurrogateKV](https://github.com/kimjunewon/SurrogateKV) has published, NVIDIA's TensorRT-LLM
blog 17, vLLM's blog of 11 May 2026, [SGLang's
page](https://docs.sglang.io/advanced_features/quantized_kv_cache.html), and the papers
[2512.12008](https://arxiv.org/abs/2512.12008) and [2609.03430](https://arxiv.org/abs/2609.03430).

In the tables of comparisons, `of` is the score of the policy compared with. *Each budget* has the
difference at one budget after the other, with a star where it decides the comparison for that
budget alone. A *control* is no part of the claim: `random`, or the like, has to lose. "64 more
than at 256" compares the gains at two budgets: `of` is the gain at the second, the difference
what the first has on top of it. With "at most 5 % below" the claim is that a policy comes that
near. Of `ppl` (perplexity) less is better. Needles of `niah` lie at five depths, the deepest
among the newest tokens: a policy with a window of them finds 0.2 whatever else it keeps.

`python recipes/claims/page.py` writes this page from `results/NAME.json`, the `results.json` of
each run.

"""
COLUMNS = ("claim", "question", "verdict", "the paper", "measured by others", "command")
OF_PAIRS = (
    *("arm", "than", "task", "budgets", "of", "difference", "95 % interval", "each budget"),
    *("n", "says"),
)


def page(folder: Path) -> str:
    """Return the page as text, from the results of a folder."""
    reasons = folder / "why.json"
    why = json.loads(reasons.read_text()) if reasons.is_file() else {}
    rows, parts = [], []
    for recipe in sorted(HERE.glob("*.yaml"), key=lambda path: path.stem):
        file = folder / f"{recipe.stem}.json"
        command = f"`kvtool eval recipes/claims/{recipe.name} -o runs/claims/{recipe.stem}`"
        if not file.is_file():
            rows.append([*_asked(recipe), command])
            continue
        run = read_results_file(file)
        assert run.claim is not None, f"{file} holds no claim"
        found = judge_claim(run.claim, run)
        told = "nothing of it was measured" if found is None else claim_in_words(found)
        modes = dict.fromkeys(result.question for result in run.results)
        said = [run.claim.paper or "", run.claim.others or ""]
        rows.append([f"[{run.claim.says}](#{recipe.stem})", ", ".join(modes), told, *said, command])
        parts.append(f"## {recipe.stem}\n\n{run.claim.says}: {told}.\n\n{_where(run)}\n")
        if recipe.stem in why:
            parts.append(f"Why: {why[recipe.stem].strip()}\n")
        if found is not None:
            parts.append(_table(OF_PAIRS, _pairs(found, _each_budget(run))))
        parts.append(_scores(run))
    return HEAD + "\n".join([_table(COLUMNS, rows), *parts])


def _asked(recipe: Path) -> list[str]:
    """Return the cells of a claim that has not been run, all but the command."""
    read, _ = read_recipe(read_file(recipe, option="RECIPE"))
    assert read.claim is not None, f"{recipe} holds no claim"
    known = read.eval.query_aware is not False
    mode = when_asked(query_aware=known, keep_question=read.eval.keep_question)
    return [read.claim.says, mode, "not run", read.claim.paper or "", read.claim.others or ""]


def _where(run: ResultsDocument) -> str:
    """Say what was measured on; seconds would count the breaks of a run that went on later."""
    model, environment = run.model, run.environment
    return (
        f"Measured with {model.id}, {model.layers} layers (`config.json` {model.config_hash[:8]}), "
        f"{model.dtype}, on {environment.gpu or environment.cpu}."
    )


def _each_budget(run: ResultsDocument) -> dict[tuple[str, ...], ClaimRow]:
    """Compare the pairs at one budget each: by the two policies, the task and the budget."""
    assert run.claim is not None
    budgets = dict.fromkeys(arm.budget for arm in run.arms if arm.budget is not None)
    pairs = [
        pair.model_copy(update={"budgets": [budget]})
        for pair in run.claim.pairs
        for budget in pair.budgets or budgets
        if not pair.than_at
    ]
    found = judge_claim(run.claim.model_copy(update={"pairs": pairs}), run)
    rows = [] if found is None else found.rows
    return {(row.arm, row.than, row.task, *row.budgets): row for row in rows}


def _difference(row: ClaimRow) -> str:
    star = "" if row.verdict == "undecided" else "*"
    return formats.signed(row.difference, row.best) + star


def _pairs(found: ClaimVerdict, each: dict[tuple[str, ...], ClaimRow]) -> list[list[str]]:
    def at(row: ClaimRow) -> str:
        if row.than_at or len(row.budgets) < 2:
            return formats.MISSING
        return " / ".join(_difference(each[row.arm, row.than, row.task, b]) for b in row.budgets)

    return [
        [
            f"`{row.arm}`",
            f"`{row.than}`",
            row.task,
            at_budgets(row),
            than_value(row),
            formats.signed(row.difference, row.best),
            formats.interval(row.low, row.high, row.best) or formats.MISSING,
            at(row),
            str(row.n),
            says(row),
        ]
        for row in found.rows
    ]


def _scores(run: ResultsDocument) -> str:
    """Return the scores: a row for each policy and task, a column for each budget."""
    arms = {arm.name: arm for arm in run.arms}
    budgets = list(dict.fromkeys(arm.budget for arm in run.arms if arm.budget is not None))
    rows: dict[tuple[str, str], dict[int | str | None, str]] = {}
    for result in run.results:
        arm = arms[result.arm]
        score = formats.score(result.value, result.best)
        rows.setdefault((result.task, arm.policy), {})[arm.budget] = score
    return _table(
        ("task", "policy", *(f"at {budget}" for budget in budgets), "without a budget"),
        [
            [task, f"`{policy}`", *(cells.get(key, formats.MISSING) for key in (*budgets, None))]
            for (task, policy), cells in rows.items()
        ],
    )


def _table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main() -> None:
    """Write the page, or say in a line why not."""
    folder = Path(sys.argv[1]) if sys.argv[1:] else HERE / "results"
    if not folder.is_dir():
        sys.exit(f"error: no folder {folder}; give one that holds the results of runs as NAME.json")
    try:
        (HERE / "README.md").write_text(page(folder))
    except KvtoolError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
