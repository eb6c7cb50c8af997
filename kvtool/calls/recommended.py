"""The best variant of a run for a given memory: results in, what to run and why in words out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.calls.plan_settings import PlanSettings
from kvtool.documents.files import expand
from kvtool.documents.results import ResultsDocument
from kvtool.errors import UsageError
from kvtool.model_shape import DTYPE_BYTES
from kvtool.models.folder import REFERENCE
from kvtool.planning.recommend import Evidence, Recommendation, against_full
from kvtool.report.words import score_in_words
from kvtool.sizes import DEFAULT_NEW_TOKENS, bytes_in_words

if TYPE_CHECKING:
    from kvtool.documents.plan import PlanDocument
    from kvtool.watcher import Watcher

_RESULTS = "results.json"
_MOST = 5  # variants that are named


def read_run(given: Any) -> ResultsDocument:
    """Return results: as a document, its data, a run's folder or its file, `-` for stdin.

    Raises:
        UsageError: none there, or no results.
    """
    if isinstance(given, ResultsDocument):
        return given
    if isinstance(given, Mapping) or str(given) == "-":
        from kvtool.documents.source import read_as

        return read_as(given, ResultsDocument, "--recommend", command="--recommend")
    if not isinstance(given, (str, Path)):
        raise UsageError(f"recommend takes a run's folder or results, got {type(given).__name__}")
    from kvtool.evaluation.run.index import read_results_file

    place = expand(given)
    path = place / _RESULTS if place.is_dir() else place
    if not path.is_file():
        what = f"folder `{given}` holds no run (no {_RESULTS})" if place.is_dir() else None
        raise UsageError(
            f"--recommend: {what or f'no folder or file `{given}`'}",
            hint="the folder that kvtool eval -o names",
        )
    return read_results_file(path)


def for_results(settings: PlanSettings, results: ResultsDocument, watcher: Watcher) -> PlanSettings:
    """Return settings that name the model of the results and the tokens of an answer, if they do
    not.

    Raises:
        UsageError: a target that is no memory; something that the results are to choose.
    """
    if settings.target is None or settings.target.bytes is None:
        raise UsageError("--recommend chooses what fits into a memory", hint="--bytes 2GiB")
    chosen = ("policy", "allocator", "min_tokens")
    given = [f"--{name.replace('_', '-')}" for name in chosen if getattr(settings, name)]
    if given:
        raise UsageError(f"--recommend chooses by what was measured; leave out {', '.join(given)}")
    found: dict[str, Any] = {}
    if settings.model is None and settings.profile is None and results.model.id != REFERENCE:
        watcher.note(f"model: {results.model.id}, that of the results (change: --model)")
        name = results.model.id
        name = str(expand(name)) if name.startswith("~") else name  # as runs write a user's folder
        found = {"model": name, "revision": results.model.revision}
    new = settings.max_new_tokens
    new = DEFAULT_NEW_TOKENS if new is None else new
    return replace(settings, **found, max_new_tokens=new)


def reasons(
    found: Recommendation, results: ResultsDocument, document: PlanDocument, size: int
) -> list[str]:
    """Say what is recommended, and what evidence that rests on.

    Args:
        document: the plan that was made.
        size: bytes that were asked for.
    """
    evidence, held = found.evidence, document.planned_bytes or 0
    holds = f"{bytes_in_words(held)} of {bytes_in_words(size)}"
    lines = [f"recommended: {evidence.policy}, {_budget(evidence, document)}; it holds {holds}"]
    if not evidence.tasks:
        lines.append("evidence: everything fits, and no variant is better beyond the noise")
    else:
        tasks = ", ".join(
            score_in_words(each.task, each.paired.n if each.paired else 0, *against_full(each))
            for each in evidence.tasks
        )
        stands = _standing(evidence.variant.name, results)
        lines.append(f"evidence: {evidence.variant.name} against the full cache: {tasks}{stands}")
        lines.append(
            f"measured with {float(evidence.share):.1%} of prompts of {evidence.prompt:.0f} tokens "
            f"(mean), which is taken as the same share of {document.target.prompt_tokens}"
        )
    if results.model.config_hash != document.model.config_hash:
        lines.append(
            f"note: measured on model `{results.model.id}`, and the plan is for "
            f"`{document.model.id}`"
        )
    if not results.complete:
        lines.append("note: the run is not complete: samples are missing")
    if found.too_large:
        more = f" and {len(found.too_large) - _MOST} more" if len(found.too_large) > _MOST else ""
        lines.append(f"too large here: {', '.join(found.too_large[:_MOST])}{more}")
    return [*lines, *(f"left out: {each}" for each in found.left_out)]


def _standing(variant: str, results: ResultsDocument) -> str:
    """Say whether the verdict has a variant within its bound."""
    verdict = results.verdict
    found = None if verdict is None else verdict.of(variant)
    if verdict is None or found is None:
        return ""
    unsure = "undecided whether within" if found.standing == "undecided" else found.standing
    return f"; {unsure} {verdict.within:g} %"


def _budget(evidence: Evidence, document: PlanDocument) -> str:
    """Say what the policy is given."""
    if not evidence.policy.takes_budget:
        return "the whole prompt"
    prompt = document.target.prompt_tokens
    if evidence.policy.two_stages and document.rocketkv is not None:
        pairs = document.rocketkv.token_budget
        return f"{pairs} pairs read per token ({pairs / prompt:.1%} of the prompt)"
    tokens = [document.layers.tokens[i] for i in document.free_layers]
    mean = sum(tokens) / len(tokens)
    what = "pairs read per token" if evidence.policy.budget_is_traffic else "tokens"
    return f"{mean:.0f} {what} per layer and KV head ({mean / prompt:.1%} of the prompt)"


def command(found: Recommendation, settings: PlanSettings, plan: PlanDocument, path: str) -> str:
    """Spell the command that runs a plan.

    Args:
        path: of the plan's file.
    """
    prefill, dtype = found.evidence.variant.prefill, plan.model.dtype
    given = {
        "--dtype": dtype if dtype in DTYPE_BYTES else None,
        "--device": settings.device,
        "--device-map": settings.device_map,
        "--prefill": prefill if prefill != "full" and found.evidence.tasks else None,
        "-n": max(1, plan.target.max_new_tokens),
    }
    return settings.command(["kvtool", "generate", path], given)
