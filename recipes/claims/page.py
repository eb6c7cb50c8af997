"""Write the page of claims, README.md beside this file, from the results that lie here.

    python recipes/claims/page.py
    python recipes/claims/page.py FOLDER > page.md

FOLDER holds the `results.json` of each run as NAME.json or NAME/results.json: of it, the page is
printed. Verdicts are derived anew from the scores of the samples. The folder's `why.json` may give
reasons, by the name of the run, and its `smollm2` the runs of the real model.
"""

import json
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvtool.documents.claim import Claim, ClaimRow, ClaimVerdict
from kvtool.documents.resolve import read_recipe
from kvtool.documents.results import ResultsDocument, when_asked
from kvtool.documents.source import read_file
from kvtool.errors import KvtoolError
from kvtool.evaluation.claims import joined, judge_claim
from kvtool.evaluation.metrics.summary import LINKS
from kvtool.evaluation.run.index import RESULTS, read_results_file
from kvtool.evaluation.verdict import difference, mean_of
from kvtool.report import formats
from kvtool.report.words import at_budgets, claim_in_words, says, than_value

HERE = Path(__file__).parent
REAL = {
    "known": (
        "smollm2/choosing-known.json",
        "smollm2/reading-known.json",
        "smollm2/changing-known.json",
        "../../real-model/results/known.json",
        "../../real-model/results/novels.json",
    ),
    "later, kept": (
        "smollm2/choosing-later.json",
        "smollm2/reading-later.json",
        "smollm2/changing-later.json",
        "../../real-model/results/later.json",
        "smollm2/kvzip-later.json",
    ),
}
"""The runs of the real model by when the question comes, the novels' text going on in its place."""
ELSEWHERE = ("key-bits", "later-turns", "reasoning", "rocketkv-turns")
"""Claims of reasoning and conversations, which no code in a text tests."""
SMALLEST = {"64": "128"}
"""The smallest budget of the claims, and the real model's in its place."""
LONGER = "smollm2/longer-known.json"
DOUBLED = {"128": "256", "256": "512", "512": "1024"}
"""Budgets of texts of 1K tokens, and the same shares of 2K."""
BELIEVED = 0.9
"""What the full cache must score for the real model's verdict to be believed."""
STEP_S = 0.042
"""Seconds of an eager step of an 8B shape under `h2o`, measured on an H200."""
HEAD = """# Claims

What papers and their peers say of policies, tested on two models: the [bundled
model](../../kvtool/models/README.md#the-bundled-model), which ships with kvtool, was trained on
such tasks and knows no English, and SmolLM2-135M-Instruct, [a real language
model](../real-model/README.md) in 4-bit weights that reads novels by Jane Austen. There is a row
for each claim and for each time at which the question may come. *Known*: it is in the prompt that
is compressed; *later, kept*: the context is compressed first, the question stays whole beside it.

**Which should you believe?** SmolLM2's verdict, where it was measured and the full cache answers at
least {believed:.0%} of the questions. Else the bundled model's, and that for *mechanics* alone:
whether a policy does what it says, not what a language model loses by it. What neither has is *not
tested*.

**What a model of 135 million parameters in 4 bits cannot show.** It answers no questions of several
hops and writes no long summaries, so no claim about them is tested. Each digit is a token of its
own, so that a code of four is four chances to fail (Llama-3 has one token for three digits). Where
policies find no code, the likelihood of the right one (`nll`, in nats a token) still sets them
apart. A larger model may rank them differently: each row has what others have measured, and these
lines make the same page for a model of yours, in {answers:,} measurements. Computed from a step
of 42 ms, as an 8B model takes on an H200, that is {hours:.0f} hours; it was not run.

```
cd recipes/claims
for NAME in *.yaml; do kvtool eval $NAME -m Qwen/Qwen3-8B -o mine/${{NAME%.yaml}}; done
python page.py mine > mine.md
```

## How to read it

Verdicts follow from paired 95 % intervals (bootstrap over samples, the same samples for all
variants). A comparison is one pair of policies on one task, each sample's score averaged over the
budgets.
*Holds*: the interval lies on the claim's side of 0 in one comparison or more, and on the other
side in none; *fails*: the other way round; *holds in part*: some of each; *undecided*: neither
anywhere, with this many samples. Intervals are not widened for the number of comparisons: where
two policies are equal, one comparison in forty fails by chance.

Where a claim is of 64 tokens, SmolLM2 has 128. Its comparisons with n=50 are of runs made for this
page ([recipes](smollm2)). Those with n=100 and n=6 are of the [page of that
model](../real-model/README.md): a question that comes later is read under the budget there, too,
and `ppl` is of six novels, cut at 3904 tokens and then read token by token; it asks no question.
Claims of reasoning and of conversations have none: codes do not test them.

A budget in tokens is for each layer and KV head. A budget in percent, and every share of a cache,
is of what the full cache would hold at the same step. Where a run evicted nothing in four samples
of five, `kvtool eval` says that it is no test of compression.

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
near. Of `ppl` (perplexity) and of `nll` less is better. Needles of `niah` lie at five depths (ten
for SmolLM2), the deepest among the newest tokens: a policy with a window of them finds 0.2 (0.1)
whatever else it keeps.

To cite a row, give its section: each names the version of kvtool, the commit, the date, the model
and what it ran on. `python recipes/claims/page.py` writes this page from `results/NAME.json`, which
`python recipes/thin.py` makes of a run.

"""
COLUMNS = (
    *("claim", "question", "bundled model", "SmolLM2-135M", "believe", "the paper"),
    *("measured by others", "command"),
)
OF_PAIRS = (
    *("variant", "than", "task", "budgets", "of", "difference", "95 % interval", "each budget"),
    *("n", "says"),
)


BESIDE = """## The same questions to kvpress

Six policies and the full cache answer as kvpress does with the presses of the same formulas: codes
in the same tokens, read with the same weights in float32 ({title}). The text is compressed before
the question is known, the question stays whole. `kvtool eval` answered on one side, `python -m
recipes.benchmarks.kvpress_answers` has the other. Both cells are shares of codes found, their
difference has its paired 95 % interval over {n} texts. *Same answers* are so in every letter.
"""


AT_2K = """## At twice the length

SmolLM2 reads texts of about 2000 tokens in place of 1000, under twice the budgets
([recipe](smollm2/longer-known.yaml)): 256 and 512 tokens for each layer and KV head. The question
is known. Of each claim, both columns have the pairs that were measured at both lengths, by the same
tasks. The full cache finds {long:.2f} of the codes there and {short:.2f} in 1K tokens: where it
finds less than {believed:.1f}, believe the verdict at 1K. With the question asked later, and with
facts of one word, nothing was measured at this length.
"""


class Judged(NamedTuple):
    """A claim by the runs of one model: what is to be compared, and what the whole says."""

    verdict: ClaimVerdict | None
    each: dict[tuple[str, ...], ClaimRow]
    full: float | None


def page(folder: Path) -> str:
    """Return the page as text, from the results of a folder."""
    reasons = folder / "why.json"
    why = json.loads(reasons.read_text()) if reasons.is_file() else {}
    real = {mode: _read_all(folder, files) for mode, files in REAL.items()}
    rows, parts, runs = [], [], []
    for recipe in sorted(HERE.glob("*.yaml"), key=lambda path: path.stem):
        claim, mode = _asked(recipe)
        run = _read(folder, recipe.stem)
        if run is not None and run.claim is not None:
            claim = run.claim  # names of policies as tables spell them
        command = f"`kvtool eval recipes/claims/{recipe.name} -o runs/claims/{recipe.stem}`"
        mine = _judge(claim, [] if run is None else [run])
        on_real = run is not None and run.model.id == "smollm2"
        asked = [] if recipe.stem in ELSEWHERE else real[mode]
        theirs = mine if on_real else _judge(_at_budgets(claim, SMALLEST), asked)
        cells = [
            f"[{claim.says}](#{recipe.stem})" if run or theirs.verdict else claim.says,
            mode,
            formats.MISSING if on_real else _told(run, mine),
            _told(run, theirs) if on_real else _told(None, theirs),
            _believe(run, mine, theirs),
        ]
        rows.append([*cells, claim.paper or "", claim.others or "", command])
        if run is None and theirs.verdict is None:
            continue
        parts.append(f"## {recipe.stem}\n\n{claim.says}.\n")
        if run is not None:
            runs.append(run)
            parts.append(f"{_in_words(mine)}. {_where(run)}\n")
        if recipe.stem in why:
            parts.append(f"Why: {why[recipe.stem].strip()}\n")
        if mine.verdict is not None:
            parts.append(_table(OF_PAIRS, _pairs(mine)))
        if not on_real and theirs.verdict is not None:
            parts.append(f"SmolLM2-135M: {claim_in_words(theirs.verdict)}.\n")
            parts.append(_table(OF_PAIRS, _pairs(theirs)))
        if run is not None:
            parts.append(_scores(run))
    questions, tokens = _asked_in_all(runs)
    head = HEAD.format(believed=BELIEVED, answers=questions, hours=tokens * STEP_S / 3600)
    ranking = runpy.run_path(str(HERE / "ranking.py"))["section"](folder)
    measured = [_where(each) for runs in real.values() for each in runs]
    made = "## smollm2\n\n" + "\n\n".join(dict.fromkeys(measured)) + "\n" if measured else ""
    whole = [_table(COLUMNS, rows), ranking, _longer(folder), _beside(folder, why), *parts, made]
    return head + "\n".join(filter(None, whole))


def _read(folder: Path, name: str) -> ResultsDocument | None:
    for file in (folder / f"{name}.json", folder / name / RESULTS):
        if file.is_file():
            return read_results_file(file)
    return None


def _read_all(folder: Path, files: Sequence[str]) -> list[ResultsDocument]:
    return [read_results_file(folder / file) for file in files if (folder / file).is_file()]


def _judge(claim: Claim, runs: Sequence[ResultsDocument]) -> Judged:
    """Judge a claim by several runs; a pair on a task is taken from the first that has it."""
    rows: list[ClaimRow] = []
    each: dict[tuple[str, ...], ClaimRow] = {}
    scores = []
    for run in runs:
        known = {(row.variant, row.than, row.task) for row in rows}
        found = judge_claim(claim, run)
        new = [
            row
            for row in ([] if found is None else found.rows)
            if (row.variant, row.than, row.task) not in known
        ]
        if new:
            rows += new
            each = _each_budget(claim, run) | each
            full = [
                each for each in run.results if each.variant == "full" and each.best is not None
            ]
            scores += [each.value / each.best for each in full if each.value is not None]
    return Judged(joined(rows), each, min(scores, default=None))


def _at_budgets(claim: Claim, others: Mapping[str, str]) -> Claim:
    """Return a claim with some of its budgets replaced."""

    def replaced(budgets: Sequence[int | str]) -> list[str]:
        return list(dict.fromkeys(others.get(str(each), str(each)) for each in budgets))

    pairs = [
        pair.model_copy(
            update={"budgets": replaced(pair.budgets), "than_at": replaced(pair.than_at)}
        )
        for pair in claim.pairs
    ]
    return claim.model_copy(update={"pairs": pairs})


def _longer(folder: Path) -> str:
    """Set verdicts on longer texts beside those on the others; empty where none were read."""
    if not (folder / LONGER).is_file():
        return ""
    long, rows, full = read_results_file(folder / LONGER), [], {}
    tasks = {result.task for result in long.results}
    short = [
        run
        for run in _read_all(folder, REAL["known"])
        if tasks & {result.task for result in run.results}
    ]
    for recipe in sorted(HERE.glob("*.yaml"), key=lambda path: path.stem):
        claim, mode = _asked(recipe)
        if mode != "known" or recipe.stem in ELSEWHERE:
            continue
        claim = _at_budgets(claim, SMALLEST)
        doubled = _judge(_at_budgets(claim, DOUBLED), [long])
        found = doubled.verdict
        if found is None:
            continue
        compared = {(row.variant, row.than) for row in found.rows}
        pairs = [pair for pair in claim.pairs if (pair.variant, pair.than) in compared]
        before = _judge(claim.model_copy(update={"pairs": pairs}), short)
        full |= {"long": doubled.full, "short": before.full}
        said = [_told(None, before), claim_in_words(found)]
        rows.append([f"[{claim.says}](#{recipe.stem})", *said])
    table = _table(("claim", "texts of 1K", "texts of 2K"), rows)
    return "\n".join([AT_2K.format(believed=BELIEVED, **full), table, f"{_where(long)}\n"])


def _told(run: ResultsDocument | None, judged: Judged) -> str:
    """Return a verdict for the table, with the model's name where it is another one."""
    if judged.verdict is None:
        return "not run"
    other = run is not None and run.model.id not in ("reference", "smollm2")
    return claim_in_words(judged.verdict) + (f", with {run.model.id}" if other and run else "")


def _in_words(judged: Judged) -> str:
    words = (
        "nothing of it was measured" if judged.verdict is None else claim_in_words(judged.verdict)
    )
    return words[0].upper() + words[1:]


def _believe(run: ResultsDocument | None, mine: Judged, theirs: Judged) -> str:
    """Say which verdict to believe, by the rule of the page."""
    answers = theirs.full is None or theirs.full >= BELIEVED  # perplexity asks no question
    if theirs.verdict is not None and answers:
        return "SmolLM2-135M"
    if mine.verdict is None:
        return "not tested"
    name = "bundled model" if run is None or run.model.id == "reference" else run.model.id
    return f"{name}, for mechanics"


def _beside(folder: Path, why: dict[str, str]) -> str:
    """Set the answers of kvpress beside ours; empty where it was not asked."""
    file = folder / "kvpress.json"
    if not file.is_file():
        return ""
    found = json.loads(file.read_text())
    rows = []
    for line in found["lines"]:
        ours, theirs = ([(value, 1.0) for value in line[side]] for side in ("ours", "theirs"))
        apart = difference(ours, theirs, LINKS["mean"])
        between = formats.interval(apart.low, apart.high, 1.0)
        shares = [formats.score(mean_of(side), 1.0) for side in (ours, theirs)]
        press = f"`{line['press']}`" if line["press"] else formats.MISSING
        told = f"{formats.signed(apart.value, 1.0)} {between}"
        rows.append([f"`{line['policy']}`", press, *shares, told, str(line["same"])])
    text = BESIDE.format(title=found["title"], n=len(found["lines"][0]["ours"]))
    columns = ("policy", "kvpress", "kvtool finds", "kvpress finds", "difference", "same answers")
    parts = [text, _table(columns, rows)]
    return "\n".join([*parts, f"{why['kvpress']}\n"] if "kvpress" in why else parts)


def _asked_in_all(runs: Sequence[ResultsDocument]) -> tuple[int, float]:
    """Return how many questions all runs ask, and how many tokens answer them."""
    found = [result for run in runs for result in run.results]
    written = [result.n * result.cost.new_tokens for result in found if result.cost is not None]
    return sum(result.n for result in found), sum(written)


def _asked(recipe: Path) -> tuple[Claim, str]:
    """Return the claim of a recipe, and when its question comes."""
    read, _ = read_recipe(read_file(recipe, option="RECIPE"))
    assert read.claim is not None, f"{recipe} holds no claim"
    known = read.eval.query_aware is not False
    return read.claim, when_asked(query_aware=known, keep_question=read.eval.keep_question)


def _where(run: ResultsDocument) -> str:
    """Say what was measured, when, and on what; seconds would count the breaks of a run."""
    model, machine, packages = run.model, run.environment, run.environment.packages
    commit = f" ({run.git_commit[:8]})" if run.git_commit else ""
    return (
        f"`{run.name}` was measured with {model.id}, {model.layers} layers (`config.json` "
        f"{model.config_hash[:8]}), {model.dtype}, by kvtool {run.kvtool}{commit}, torch "
        f"{packages['torch']} and transformers {packages['transformers']} on "
        f"{machine.gpu or machine.cpu}, {run.finished[:10]}."
    )


def _each_budget(claim: Claim, run: ResultsDocument) -> dict[tuple[str, ...], ClaimRow]:
    """Compare the pairs at one budget each: by the two policies, the task and the budget."""
    budgets = dict.fromkeys(
        variant.budget for variant in run.variants if variant.budget is not None
    )
    pairs = [
        pair.model_copy(update={"budgets": [budget]})
        for pair in claim.pairs
        for budget in pair.budgets or budgets
        if not pair.than_at
    ]
    found = judge_claim(claim.model_copy(update={"pairs": pairs}), run)
    rows = [] if found is None else found.rows
    return {(row.variant, row.than, row.task, *row.budgets): row for row in rows}


def _difference(row: ClaimRow) -> str:
    star = "" if row.verdict == "undecided" else "*"
    return formats.signed(row.difference, row.best) + star


def _pairs(judged: Judged) -> list[list[str]]:
    def at(row: ClaimRow) -> str:
        if row.than_at or len(row.budgets) < 2:
            return formats.MISSING
        alone = [judged.each[row.variant, row.than, row.task, budget] for budget in row.budgets]
        return " / ".join(map(_difference, alone))

    assert judged.verdict is not None

    return [
        [
            f"`{row.variant}`",
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
        for row in judged.verdict.rows
    ]


def _scores(run: ResultsDocument) -> str:
    """Return the scores: a row for each policy and task, a column for each budget."""
    variants = {variant.name: variant for variant in run.variants}
    budgets = list(
        dict.fromkeys(variant.budget for variant in run.variants if variant.budget is not None)
    )
    rows: dict[tuple[str, str], dict[int | str | None, str]] = {}
    for result in run.results:
        variant = variants[result.variant]
        score = formats.score(result.value, result.best)
        rows.setdefault((result.task, variant.policy), {})[variant.budget] = score
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
    """Write the page, or print that of a folder; say in a line why not."""
    folder = Path(sys.argv[1]) if sys.argv[1:] else HERE / "results"
    if not folder.is_dir():
        sys.exit(f"error: no folder {folder}; give one that holds the results of runs as NAME.json")
    try:
        text = page(folder)
    except KvtoolError as error:
        sys.exit(f"error: {error}")
    if sys.argv[1:]:
        sys.stdout.write(text)
    else:
        (HERE / "README.md").write_text(text)


if __name__ == "__main__":
    main()
