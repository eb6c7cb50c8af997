"""Say in words what a run found: its verdict, its claim, its differences, and notes on the numbers.

The verdict, the claim and the differences are tables of the page as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from kvtool.documents.claim import ClaimRow, ClaimVerdict
from kvtool.documents.results import ResultsDocument, TaskResult
from kvtool.documents.verdict import Bounded, Choice, Difference, Verdict
from kvtool.evaluation.costs import LEAST_EVICTED, UNTESTED, is_tested, spent_by_variant
from kvtool.evaluation.guarantee import needed_contexts
from kvtool.evaluation.samples.questions import one_token_note
from kvtool.evaluation.verdict import LEAST_PAIRS, unseen
from kvtool.report import formats
from kvtool.report.metrics import meaning, title
from kvtool.report.table import Cell, Column, Look, Note, Row, Table, row
from kvtool.report.variants import full_variant, labelled, results_of, task_names, variants_in_order

_MOST = 5  # undecided variants that are named
_TITLES = {"bytes": "bytes held", "traffic": "bytes read per token", "time": "time per token"}


def verdict_lines(document: ResultsDocument) -> list[str]:
    """Return the verdict line by line; empty where there is none to speak of."""
    document = labelled(document)
    if document.verdict is None:
        return []
    if document.verdict.why is not None:
        return [f"no verdict: {document.verdict.why}"]
    choices = [f"  by {title}: {said}" for title, said in choices_in_words(document)]
    return [f"verdict: the cheapest {rule(document)}", *choices, *guarantee_lines(document)]


def guarantee_lines(document: ResultsDocument) -> list[str]:
    """Return which budgets have the guarantee, line by line; empty where none was asked for."""
    verdict = document.verdict
    if verdict is None or (found := verdict.guarantee) is None:
        return []
    what = "prompts like these lose an answer that the full cache gives"
    if not all(each.counted for each in found.chain):
        what = "a perfect score is lost, in the mean over contexts like these"
    lines = [f"guarantee: with 95 % confidence at most {found.loss:g} % of {what}"]
    policies, least = {each.name: each.policy for each in document.variants}, []
    for policy, group in groupby(found.chain, lambda each: policies[each.variant]):
        walk = list(group)
        passed, failed = ([each for each in walk if each.passed is has] for has in (True, False))
        least += [each.variant for each in passed[-1:]]
        said = [*map(_lost, passed[-1:]), *(f"not {_lost(each)}" for each in failed[:1])]
        lines.append(f"  {policy}: {'; '.join(said)}")
    named = next((each.variant for each in verdict.choices if each.by == "bytes"), None)
    if named not in least and (named or least):
        lines.append(f"  the verdict by bytes held differs: {named or 'none'}")
    if not least:
        needed = needed_contexts(found.loss / 100, found.level)
        lines.append(f"  none passed; it takes {needed} contexts if none is lost, else more")
    return [*lines, "  holds for prompts drawn as these were, and for budgets fixed before the run"]


def _lost(each: Bounded) -> str:
    """Say what a variant lost, and without the guarantee how much it may lose."""
    lost = f"{each.lost:g} of" if each.counted else f"{100 * each.lost / (each.n or 1):.3g} % over"
    said = each.why or f"{lost} {each.n}" + ("" if each.passed else f", at most {each.bound:.3g} %")
    return f"{each.variant} ({each.task}: {said})"


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
    if (verdict := document.verdict) is None:
        return []
    found = []
    for choice in verdict.choices:
        parts = [_chosen(verdict, choice), _price(choice)]
        standing = verdict.of(choice.variant or "")
        if standing is not None and standing.difference is not None:
            score = (standing.difference, standing.low, standing.high)
            parts.append(score_in_words(standing.task, standing.n, *score))
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
        difference = "–" if found.difference is None else f"{found.difference:+.1f} %"
        against = Cell(difference, () if found.why is None else (Note(found.why),))
        interval = "–" if found.low is None else f"{found.low:+.1f} to {found.high:+.1f}"
        said = (found.standing, found.task, against, interval, str(found.n))
        rows.append(row(variant.name, *said))
    bound = f"within {verdict.within:g} %"
    titles = ("variant", bound, "task", "against full", "95 % interval", "n")
    return Table(list(map(Column, titles)), rows)


def _chosen(verdict: Verdict, choice: Choice) -> str:
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


def score_in_words(
    task: str, n: int, difference: float, low: float | None, high: float | None
) -> str:
    """Say a score against the full cache's, in percent of that, and how sure it is.

    >>> score_in_words("niah", 33, -1.26, -3.0, 0.5)
    'niah -1.3 % (-3.0 to +0.5, n=33)'
    """
    if low == high == 0:
        could = formats.share(unseen(n))
        return f"{task}: none of {n} samples differs (up to {could} could, unseen)"
    interval = "no interval" if low is None else f"{low:+.1f} to {high:+.1f}"
    return f"{task} {difference:+.1f} % ({interval}, n={n})"


_LOOKS: dict[str, Look] = {
    "holds": "better",
    "fails": "worse",
    "better": "better",
    "worse": "worse",
}


def _judged(titles: Sequence[str], rows: list[Row]) -> Table:
    """Return a table of comparisons: words, numbers, and what they say."""
    *words, last = (Column(title, words=True, folds=True) for title in (*titles, "says"))
    return Table([*words, *map(Column, ("difference", "95 % interval", "n")), last], rows)


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


def claim_line(document: ResultsDocument) -> str | None:
    """Return the claim with its verdict; None without a claim."""
    if document.claim is None:
        return None
    found = document.claim_verdict
    judged = "nothing of it was measured" if found is None else claim_in_words(found)
    return f"{document.claim.says}: {judged}"


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
    rows = [
        row(
            *(each.variant, Cell(each.than, (Note(than_value(each)),)), each.task),
            *(at_budgets(each), *_numbers(each, each.best)),
            Cell(says(each), look=_LOOKS.get(each.verdict, "")),
        )
        for each in found.rows
    ]
    return _judged(("variant", "than", "task", "budgets"), rows)


def _numbers(found: ClaimRow | Difference, best: float | None) -> tuple[str, str, str]:
    """Write a difference, its interval and its samples."""
    interval = formats.interval(found.low, found.high, best) or formats.MISSING
    return formats.signed(found.difference, best), interval, str(found.n)


_AGAINST = {"base": "its base", "best": "the best of this budget", "asked": "as asked"}


def asked_title(document: ResultsDocument) -> str:
    """Say how many comparisons were asked for, and how they are corrected."""
    found = [each.comparisons for each in document.differences if each.asked]
    number = f"{found[0]} comparison{'s' * (found[0] != 1)}"
    return f"compared as asked, p-values corrected for {number} (Holm)"


def standing_in_words(found: Difference) -> str:
    """Say what an interval allows to say, and how many samples would decide the rest."""
    if found.low is None:
        return f"no interval: fewer than {LEAST_PAIRS} samples"
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
    rows = []
    for each in document.differences:
        if asked in (None, each.asked):
            result = document.of(each.variant, each.task)
            says = Cell(standing_in_words(each), look=_LOOKS.get(each.standing, ""))
            against = Cell(each.against, (Note(_AGAINST[each.because]),))
            numbers = _numbers(each, result.best if result else None)
            rows.append(row(each.variant, each.task, against, *numbers, says))
    return _judged(("variant", "task", "against"), rows)


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
    delta = (
        "; +/-: difference to the full cache on the same samples [95 % interval], which is within"
        " the noise where that holds 0"
    )
    tasks = {task: results_of(document, task) for task in task_names(document)}
    metrics = dict.fromkeys(results[0].metric for results in tasks.values())
    lines = [
        "↑ higher is better, ↓ lower is better; ±: standard error"
        + (delta if full_variant(document) else ""),
        *(f"{name}: {title(name)}, {meaning(name)}" for name in metrics),
        f"samples: {_samples(tasks)}",
        *_queries(tasks),
        *_chunks(tasks),
    ]
    known = {each.task: each.one_token for each in document.results if each.query_aware}
    lines += filter(None, (one_token_note(task, share) for task, share in known.items()))
    variants = {each.name: each for each in document.variants}
    if not all(is_tested(each, variants[each.variant]) for each in document.results):
        lines.append(
            f"{UNTESTED} not a test of compression: the policy evicted a token in fewer than"
            f" {LEAST_EVICTED:.0%} of the samples"
        )
    if failed := sum(result.failed for result in document.results):
        lines.append(f"!k: k samples failed and are not in the score ({failed} in all)")
    if not document.complete:
        lines.append("the run is not complete: samples are missing")
    spent = spent_by_variant(document)
    hosts = [(name, each.host_bytes) for name, each in spent.items() if each.host_bytes]
    if hosts:
        said = ", ".join(f"{name} {formats.size(size)}" for name, size in hosts)
        lines.append(f"evicted tokens in host memory, beside what is held: {said}")
    rows = max((each.cost.batch or 1 for each in document.results if each.cost), default=1)
    if rows > 1:
        lines.append(
            f"up to {rows} answers were decoded in one batch; these have no tokens/s (--batch 1"
            " measures them)"
        )
    if spent:
        lines.append(
            "K/V: keys and values at the end of a sample, and their share of a full cache; held:"
            " their buffers and the policy's own numbers, 4.00x = a quarter of the full cache's;"
            " written: tokens of an answer; evicted in: the samples that lost any token;"
            " cost is the mean over the samples of all tasks, 1.05x = 1.05 times as fast"
        )
    return lines


_ByTask = Mapping[str, Sequence[TaskResult]]


def _samples(tasks: _ByTask) -> str:
    said = {}
    for task, results in tasks.items():
        counts = sorted({result.n for result in results})
        said[task] = "-".join(map(str, (counts[:1] + counts[1:][-1:])))
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    return ", ".join(f"{task} {count}" for task, count in said.items())


def _queries(tasks: _ByTask) -> list[str]:
    lines = []
    for question, words in QUESTIONS.items():
        named = [name for name, each in tasks.items() if question in {r.question for r in each}]
        if named:
            lines.append(words + ("" if len(named) == len(tasks) else f": {', '.join(named)}"))
    return lines


def _chunks(tasks: _ByTask) -> list[str]:
    """Say where variants were fed a text in unequal chunks, which hold unequal context."""
    return [
        f"{task}: policies that cut a prompt were fed blocks, the others one token at a time; their"
        " differences are left blank: compare variants of the same `chunk` only"
        for task, results in tasks.items()
        if len({result.chunk for result in results} - {None}) > 1
    ]
