"""Say in words what a run found: its verdict, its claim, its differences, and notes on the numbers.

The verdict, the claim and the differences are tables of the page as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvtool.documents.claim import ClaimRow, ClaimVerdict
from kvtool.documents.results import ResultsDocument
from kvtool.documents.verdict import Choice, Difference, Standing, Verdict
from kvtool.evaluation.samples.questions import one_token_note
from kvtool.evaluation.verdict import LEAST_PAIRS, unseen
from kvtool.report import formats
from kvtool.report.costs import LEAST_EVICTED, UNTESTED, Spent, is_tested, spent_by_variant
from kvtool.report.metrics import meaning, title
from kvtool.report.table import Cell, Column, Look, Note, Row, Table
from kvtool.report.variants import full_variant, labelled, results_of, task_names, variants_in_order

_MOST = 5  # undecided variants that are named
_TITLES = {"bytes": "bytes held", "traffic": "bytes read per token", "time": "time per token"}


def verdict_lines(document: ResultsDocument) -> list[str]:
    """Return the verdict line by line; empty where there is none to speak of."""
    document = labelled(document)
    verdict = document.verdict
    if verdict is None:
        return []
    if verdict.why is not None:
        return [f"no verdict: {verdict.why}"]
    lines = [f"verdict: the cheapest {rule(document)}"]
    return lines + [f"  by {title}: {said}" for title, said in choices_in_words(document)]


def rule(document: ResultsDocument) -> str:
    """Say what a variant of the verdict fulfils, and on which tasks."""
    verdict = document.verdict
    assert verdict is not None, "asked of a document with a verdict only"
    bound = f"within {verdict.within:g} % of the full cache"
    tasks = {result.task for result in document.results if result.droppable}
    left_out = sorted(tasks.difference(verdict.tasks))
    on = "" if len(verdict.tasks) == 1 else f" on each of {len(verdict.tasks)} tasks"
    but = f" (without {', '.join(left_out)}, where it scores nothing)" if left_out else ""
    return f"{bound}{on}{but}, by the paired 95 % interval of the score"


def choices_in_words(document: ResultsDocument) -> list[tuple[str, str]]:
    """Return each cost and what the verdict chooses by it; empty without a verdict."""
    verdict, found = document.verdict, []
    for choice in [] if verdict is None else verdict.choices:
        assert verdict is not None, "there are choices"
        parts = [
            _variant(verdict, choice),
            _price(choice),
            _sureness(verdict.of(choice.variant or "")),
        ]
        if choice.variant is not None and choice.undecided:
            parts.append(f"cheaper, undecided at this n: {_names(choice.undecided)}")
        found.append((_TITLES[choice.by], "; ".join(part for part in parts if part)))
    return found


def standings_table(document: ResultsDocument) -> Table | None:
    """Return the rating of every variant on the task that decides it; None without a verdict."""
    verdict = document.verdict
    if verdict is None or verdict.why is not None:
        return None
    rows = []
    for variant in variants_in_order(document):
        if (found := verdict.of(variant.name)) is None:
            continue
        difference = formats.MISSING if found.difference is None else f"{found.difference:+.1f} %"
        against = Cell(difference, () if found.why is None else (Note(found.why),))
        interval = formats.MISSING if found.low is None else _interval(found)
        cells = [Cell(found.standing), Cell(found.task), against, Cell(interval)]
        rows.append(Row(variant.name, [*cells, Cell(str(found.n))]))
    titles = (
        "variant",
        f"within {verdict.within:g} %",
        "task",
        "against full",
        "95 % interval",
        "n",
    )
    return Table(list(map(Column, titles)), rows)


def _variant(verdict: Verdict, choice: Choice) -> str:
    """Name the choice, or say why there is none."""
    if choice.variant is not None:
        return choice.variant
    if choice.undecided:
        return f"undecided at this n: {_names(choice.undecided)}"
    if any(each.standing == "within" for each in verdict.variants):
        return f"none (no variant within {verdict.within:g} % is cheaper than the full cache)"
    return "none"


def _names(variants: list[str]) -> str:
    more = f" and {len(variants) - _MOST} more" if len(variants) > _MOST else ""
    return f"{', '.join(variants[:_MOST])}{more}"


def _price(choice: Choice) -> str:
    """Say what the choice costs beside the full cache."""
    cost, full = choice.cost, choice.full
    if cost is None or not full:
        return ""
    if choice.by != "time":
        return f"{formats.size(cost)} of {formats.size(full)} ({formats.share(cost / full)})"
    told = f"{formats.plain(1 / cost)} tokens/s, {formats.times(full / cost)} as fast"
    if (speed := choice.speed) is None:
        return told
    noise = ", within the noise" if speed.low <= 1 else ""
    return f"{told} ({formats.times(speed.low)} to {formats.times(speed.high)}{noise})"


def _sureness(standing: Standing | None) -> str:
    """Say how sure it is that the choice is within bounds."""
    if standing is None or standing.difference is None:
        return ""
    found = (standing.difference, standing.low, standing.high)
    return score_in_words(standing.task, standing.n, *found)


def score_in_words(
    task: str, n: int, difference: float, low: float | None, high: float | None
) -> str:
    """Say a score against the full cache's, in percent of that, and how sure it is.

    >>> score_in_words("niah", 33, -1.26, -3.0, 0.5)
    'niah -1.3 % (-3.0 to +0.5, n=33)'
    """
    if low == high == 0:
        return (
            f"{task}: none of {n} samples differs (up to {formats.share(unseen(n))} could, unseen)"
        )
    interval = "no interval" if low is None else f"{low:+.1f} to {high:+.1f}"
    return f"{task} {difference:+.1f} % ({interval}, n={n})"


def _interval(standing: Standing) -> str:
    return f"{standing.low:+.1f} to {standing.high:+.1f}"


_CLAIM_COLUMNS = [
    *(Column(title, words=True) for title in ("variant", "than", "task", "budgets")),
    *(Column(title) for title in ("of", "difference", "95 % interval", "n")),
    Column("says", words=True),
]
_CLAIM_LOOKS: dict[str, Look] = {"holds": "better", "fails": "worse"}


def claim_in_words(found: ClaimVerdict) -> str:
    """Say the verdict, and in how many comparisons it is so.

    A comparison is one pair of policies on one task, over all its budgets.
    """
    counts: Counter[str] = Counter(row.verdict for row in found.compared)
    order = ("holds", "fails", "undecided")
    told = ", ".join(f"{name} in {counts[name]}" for name in order if counts[name])
    sizes = sorted({row.n for row in found.compared})
    n = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    verdict = f"{found.verdict} at this n" if found.verdict == "undecided" else found.verdict
    missed = sum(row.verdict != "holds" for row in found.controls)
    control = f"; {missed} of {len(found.controls)} controls do not hold" if missed else ""
    return f"{verdict} ({told} of {len(found.compared)}; n={n}{control})"


def claim_lines(document: ResultsDocument) -> list[str]:
    """Return the claim with its verdict and a line for each comparison; empty without a claim."""
    if document.claim is None:
        return []
    if document.claim_verdict is None:
        return [f"claim: {document.claim.says}: nothing of it was measured"]
    found = document.claim_verdict
    lines = [f"claim: {document.claim.says}: {claim_in_words(found)}"]
    return lines + [
        f"  {row.task}: {row.variant} - {row.than} {row_in_words(row)}" for row in found.rows
    ]


def row_in_words(row: ClaimRow) -> str:
    """Say a difference, its interval, and what follows for the claim."""
    said = f"{formats.signed(row.difference, row.best)}"
    interval = formats.interval(row.low, row.high, row.best)
    at = f" at {at_budgets(row)}" if row.budgets else ""
    return f"{said} {interval or 'without an interval'}{at}: {says(row)}"


def at_budgets(row: ClaimRow) -> str:
    """Name the budgets compared at: `64, 256`, or `64 more than at 256`."""
    named = ", ".join(row.budgets)
    return f"{named} more than at {', '.join(row.than_at)}" if row.than_at else named


def than_value(row: ClaimRow) -> str:
    """Write the other's score, or the difference at the other budgets."""
    return (formats.signed if row.than_at else formats.score)(row.than_value, row.best)


def says(row: ClaimRow) -> str:
    """Say the verdict on one comparison, and what would decide it."""
    bound = "" if row.margin is None else f" (claimed: at most {row.margin:g} % below)"
    bound += " (control)" if row.control else ""
    if row.deciding is not None:
        return f"undecided{bound}, about {row.deciding} samples would decide"
    return row.verdict + bound


def claim_table(found: ClaimVerdict) -> Table:
    """Return a row for each comparison."""
    return Table(_CLAIM_COLUMNS, list(map(_compared_row, found.rows)))


def _compared_row(row: ClaimRow) -> Row:
    interval = formats.interval(row.low, row.high, row.best) or formats.MISSING
    difference = formats.signed(row.difference, row.best)
    words = (row.than, row.task, at_budgets(row))
    numbers = (than_value(row), difference, interval, str(row.n))
    look = _CLAIM_LOOKS.get(row.verdict, "")
    return Row(row.variant, [*map(Cell, (*words, *numbers)), Cell(says(row), look=look)])


_AGAINST = {"base": "its base", "best": "the best of this budget", "asked": "as asked"}
_DIFFERENCE_COLUMNS = [
    *(Column(title, words=True) for title in ("variant", "task", "against", "which is")),
    *(Column(title) for title in ("difference", "95 % interval", "n")),
    Column("says", words=True),
]
_DIFFERENCE_LOOKS: dict[str, Look] = {"better": "better", "worse": "worse"}


def differences_in_words(document: ResultsDocument) -> list[tuple[str, str, str]]:
    """Return for each pair its task, its two variants, and the words that its interval allows."""
    return _in_words(document, [each for each in document.differences if not each.asked])


def asked_in_words(document: ResultsDocument) -> list[tuple[str, str, str]]:
    """Return the same for the pairs that were asked for, with their corrected p-values."""
    return _in_words(document, [each for each in document.differences if each.asked])


def asked_title(document: ResultsDocument) -> str:
    """Say how many comparisons were asked for, and how they are corrected."""
    found = [each.comparisons for each in document.differences if each.asked]
    number = f"{found[0]} comparison{'s' * (found[0] != 1)}"
    return f"compared as asked, p-values corrected for {number} (Holm)"


def _in_words(document: ResultsDocument, found: Sequence[Difference]) -> list[tuple[str, str, str]]:
    return [
        (each.task, f"{each.variant} - {each.against}", said(each, _best(document, each)))
        for each in found
    ]


def said(found: Difference, best: float | None) -> str:
    """Say a difference, its interval and how much of it is noise.

    Args:
        best: value of a perfect score.
    """
    told = formats.signed(found.difference, best)
    if found.low is None:
        return f"{told}, no interval: fewer than {LEAST_PAIRS} samples (n={found.n})"
    interval = formats.interval(found.low, found.high, best)
    return f"{told} {interval}: {standing_in_words(found)} (n={found.n})"


def standing_in_words(found: Difference) -> str:
    """Say what an interval allows to say, and how many samples would decide the rest."""
    if found.p_holm is not None:
        return f"{found.standing}, p = {p_value(found.p_holm)}"
    if found.low == found.high == 0:
        return f"no sample differs, up to {formats.share(unseen(found.n))} could, unseen"
    if found.deciding is None:
        return found.standing
    return f"{found.standing}, about {found.deciding} samples would decide"


def p_value(value: float) -> str:
    """Write a corrected p-value with three decimals.

    >>> p_value(0.0123), p_value(0.0004), p_value(1.0)
    ('0.012', '<0.001', '1')
    """
    if value < 0.001:
        return "<0.001"
    return "1" if value >= 0.9995 else f"{value:.3f}"


def differences_table(document: ResultsDocument, *, asked: bool | None = None) -> Table:
    """Return a row for each pair: the difference, its interval, what that says.

    Args:
        asked: only the pairs that were asked for, or only the others; None: all.
    """
    chosen = [each for each in document.differences if asked in (None, each.asked)]
    rows = [_difference_row(each, _best(document, each)) for each in chosen]
    return Table(_DIFFERENCE_COLUMNS, rows)


def _difference_row(found: Difference, best: float | None) -> Row:
    interval = formats.interval(found.low, found.high, best) or formats.MISSING
    words = (found.task, found.against, _AGAINST[found.because])
    numbers = (formats.signed(found.difference, best), interval, str(found.n))
    look = _DIFFERENCE_LOOKS.get(found.standing, "")
    says = Cell(standing_in_words(found), look=look)
    return Row(found.variant, [*map(Cell, (*words, *numbers)), says])


def _best(document: ResultsDocument, found: Difference) -> float | None:
    result = document.of(found.variant, found.task)
    return None if result is None else result.best


QUESTIONS = {  # by `TaskResult.question`
    "known": "the question is known while the context is compressed (query-aware)",
    "later": "the context is compressed before the question is known (query-agnostic)",
    "later, kept": "the context is compressed before the question is known, and the question is"
    " kept whole beside it (query-agnostic)",
}


def notes(document: ResultsDocument) -> list[str]:
    """Return one sentence per line, only those that the document needs."""
    if not document.results:
        return ["nothing was measured"]
    lines = [
        "↑ higher is better, ↓ lower is better; ±: standard error" + _delta(document),
        *_metrics(document),
        f"samples: {_samples(document)}",
        *_queries(document),
        *_chunks(document),
        *_one_token(document),
    ]
    lines += _untested(document)
    failed = sum(result.failed for result in document.results)
    if failed:
        lines.append(f"!k: k samples failed and are not in the score ({failed} in all)")
    if not document.complete:
        lines.append("the run is not complete: samples are missing")
    spent = spent_by_variant(document)
    lines += _on_host(spent)
    if spent:
        lines.append(
            "K/V: keys and values at the end of a sample, and their share of a full cache; held:"
            " their buffers and the policy's own numbers, 4.00x = a quarter of the full cache's;"
            " written: tokens of an answer; evicted in: the samples that lost any token;"
            " cost is the mean over the samples of all tasks, 1.05x = 1.05 times as fast"
        )
    return lines


def _on_host(spent: dict[str, Spent]) -> list[str]:
    """Say what lies in host memory, where anything does."""
    parts = [(name, each.host_bytes) for name, each in spent.items() if each.host_bytes]
    said = ", ".join(f"{name} {formats.size(size)}" for name, size in parts)
    return [f"evicted tokens in host memory, beside what is held: {said}"] if parts else []


def _untested(document: ResultsDocument) -> list[str]:
    """Explain the mark of scores whose samples lost nothing, where there are any."""
    variants = {each.name: each for each in document.variants}
    if all(
        is_tested(each, variants[each.variant])
        for each in document.results
        if each.variant in variants
    ):
        return []
    return [
        f"{UNTESTED} not a test of compression: the policy evicted a token in fewer than"
        f" {LEAST_EVICTED:.0%} of the samples"
    ]


def _one_token(document: ResultsDocument) -> list[str]:
    """Say of which tasks the prompt's own run gives most answers."""
    shares = {each.task: each.one_token for each in document.results if each.query_aware}
    notes = (one_token_note(task, share) for task, share in shares.items())
    return [note for note in notes if note is not None]


def _metrics(document: ResultsDocument) -> list[str]:
    """Say what the headline of each task measures."""
    names = dict.fromkeys(results_of(document, task)[0].metric for task in task_names(document))
    return [f"{name}: {title(name)}, {meaning(name)}" for name in names]


def _delta(document: ResultsDocument) -> str:
    if not full_variant(document):
        return ""
    return (
        "; +/-: difference to the full cache on the same samples [95 % interval], which is within"
        " the noise where that holds 0"
    )


def _samples(document: ResultsDocument) -> str:
    by_task = {}
    for task in task_names(document):
        counts = {result.n for result in document.results if result.task == task}
        low, high = min(counts), max(counts)
        by_task[task] = str(low) if low == high else f"{low}-{high}"
    if len(set(by_task.values())) == 1:
        return next(iter(by_task.values()))
    return ", ".join(f"{task} {count}" for task, count in by_task.items())


def _queries(document: ResultsDocument) -> list[str]:
    lines = []
    for question, words in QUESTIONS.items():
        tasks = [
            task
            for task in task_names(document)
            if any(r.task == task and r.question == question for r in document.results)
        ]
        if tasks:
            every = len(tasks) == len(task_names(document))
            lines.append(words + ("" if every else f": {', '.join(tasks)}"))
    return lines


def _chunks(document: ResultsDocument) -> list[str]:
    """Say where variants were fed a text in unequal chunks, which hold unequal context."""
    lines = []
    for task in task_names(document):
        chunks = {result.chunk for result in document.results if result.task == task}
        if len(chunks - {None}) > 1:
            lines.append(
                f"{task}: policies that cut a prompt were fed blocks, the others one token at a"
                " time; their differences are left blank: compare variants of the same `chunk` only"
            )
    return lines
