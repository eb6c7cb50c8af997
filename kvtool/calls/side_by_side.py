"""Two policies on the same prompt, beside the full cache: answers, costs, and what each kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvtool.calls.generate import GenerationRun, prepare_generation
from kvtool.calls.kept import lay_out, show_texts
from kvtool.calls.request import choose_policy
from kvtool.calls.settings import GenerationSettings
from kvtool.errors import UsageError
from kvtool.policies.policy import Policy
from kvtool.policies.scores.full import Full
from kvtool.watcher import Listener, Watcher

if TYPE_CHECKING:
    from kvtool.documents.generation import GenerationDocument
    from kvtool.documents.plan import PlanDocument
    from kvtool.report.kept.text import KeptText


@dataclass(frozen=True)
class SideBySide:
    """Runs of the same prompt, all checked: the full cache first, then each policy."""

    runs: tuple[GenerationRun, ...]

    def describe(self) -> list[dict[str, Any]]:
        """Return what a dry run prints."""
        return [run.describe() for run in self.runs]

    def run(self, watcher: Watcher, listener: Listener) -> Iterator[GenerationDocument]:
        """Load the model once, answer with each cache in turn, and show the kept texts."""
        settings = self.runs[-1].settings
        source = settings.source()
        watcher.note_any(source.note())
        texts: list[KeptText] = []
        answer: str | None = None
        shows = watcher.shows_progress
        with source.attached(note=watcher.note, progress=shows) as loaded:
            for i, run in enumerate(self.runs):
                own = replace(run, settings=replace(run.settings, loaded=loaded))
                generated = own.run(watcher if i == 1 else Watcher(), listener)
                document, cache = generated.document, generated.cache
                generated.request.note_bytes(document.cache, watcher)
                if i == 0:
                    answer = document.text.strip()
                else:
                    new, said = document.new_tokens, document.text.strip()
                    texts.append(lay_out(loaded, cache, new_tokens=new, answer=said))
                yield document
                if listener.has_enough:
                    break
        if texts:
            show_texts(settings, texts, watcher, full_answer=answer)


def prepare_side_by_side(
    settings: GenerationSettings,
    plan: PlanDocument | None,
    policies: Sequence[str],
    watcher: Watcher,
) -> SideBySide:
    """Check everything that can be checked before the model is loaded.

    Args:
        settings, plan: resolved, with the first of the policies.

    Raises:
        UsageError: more than two policies, or settings that mean one cache only.
        KvtoolError: as `generate`.
    """
    _check(settings, policies)
    first = prepare_generation(settings, plan, watcher)
    request, settled = first.request, first.settings
    chosen = replace(settled, policy=policies[1])
    policy, budget = choose_policy(chosen, request.plan, Watcher())
    second = replace(first, settings=chosen, request=replace(request, policy=policy, budget=budget))
    full = replace(
        first,
        settings=replace(settled, policy="full", budget=None, allocator=None, show=None),
        request=replace(request, policy=Policy(Full()), budget=None, plan=None),
    )
    return SideBySide((full, first, second))


def _check(settings: GenerationSettings, policies: Sequence[str]) -> None:
    both = " and ".join(policies)
    if settings.show is None:
        raise UsageError(
            f"`generate` runs one policy, got {len(policies)}: {', '.join(policies)}",
            hint="--show kept.html sets two side by side; `kvtool eval` compares scores",
        )
    if len(policies) > 2:
        raise UsageError(
            f"--show sets two policies side by side, got {len(policies)}",
            hint="`kvtool eval` compares any number",
        )
    for flag in ("save", "cache", "turns"):
        if getattr(settings, flag) is not None:
            raise UsageError(f"--{flag} goes with one policy, not with {both}")
