"""Many prompts answered in one call: settings and prompts checked, before the model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.calls.from_python import UNSAID, Unsaid, from_python
from kvtool.calls.request import Request, choose_policy, configuration, read_prefill
from kvtool.calls.resolve import resolve_settings
from kvtool.calls.settings import GenerationSettings
from kvtool.documents.prompts import AnswerLine, PromptEntry, make_prompts, read_prompts
from kvtool.processes import check_alone
from kvtool.sizes import Budget
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from kvtool.documents.plan import PlanDocument
    from kvtool.policies.policy import Policy


@dataclass(frozen=True)
class PromptsRun:
    """Prompts to answer, all checked as far as that goes without the model."""

    settings: GenerationSettings
    request: Request
    prompts: list[PromptEntry]

    def describe(self) -> dict[str, Any]:
        """Return what a dry run prints."""
        from kvtool.cache.whole.batching import why_apart

        settings = self.settings
        return configuration(settings, self.request) | {
            "prompts": len(self.prompts),
            "max_new_tokens": settings.new_tokens,
            "temperature": settings.temperature,
            "memory_bytes": settings.memory_bytes,
            "one_by_one": why_apart(self.request.policy),
        }

    def run(
        self,
        watcher: Watcher,
        answered: Mapping[int, AnswerLine],
        stop_when: Callable[[], bool] | None = None,
    ) -> Iterator[AnswerLine]:
        """Load the model and answer what is not answered yet.

        Args:
            answered: what is, by the index of the prompt.

        Yields:
            Answers as they end.

        Raises:
            UsageError: an answer that is there is not one to this prompt.
        """
        source, shows = self.settings.source(), watcher.shows_progress
        watcher.note_any(source.note())
        with source.attached(note=watcher.note, progress=shows) as loaded:
            from kvtool.calls.answering import answer_all

            given = (self.settings, self.request, self.prompts, answered, loaded, watcher)
            yield from answer_all(*given, stop_when)


def prepare_prompts(
    settings: GenerationSettings, plan: PlanDocument | None, watcher: Watcher
) -> PromptsRun:
    """Check everything that can be checked before the model is loaded.

    Args:
        settings, plan: resolved, by which a bad recipe is refused before this file is imported.

    Raises:
        UsageError, KvtoolError: as `generate_many`.
    """
    if settings.loaded is None:
        check_alone("generate")
    settings.check_output()
    settings.source().check()
    asked = settings.prompts or []
    prompts = read_prompts(asked, keep_bad=settings.skip_bad) if isinstance(asked, str) else asked
    policy, budget = choose_policy(settings, plan, watcher)
    source = settings.prompts if isinstance(settings.prompts, str) else "a list"
    request = Request(None, source, policy, budget, read_prefill(settings, policy), plan)
    return PromptsRun(settings, request, prompts)


def generate_many(
    model: Any = None,
    prompts: Sequence[Any] | str | Path = (),
    policy: Policy | str | Unsaid = UNSAID,
    budget: Budget | str | int | float | None = None,
    *,
    tokenizer: Any = None,
    watcher: Watcher | None = None,
    **settings: Any,
) -> list[AnswerLine]:
    """Answer many prompts, as many at a time as a memory holds.

    Args:
        prompts: a file of JSON Lines, or a list of what its lines hold.
        memory: bytes of the rows in flight (`8GiB`); None: half of what is free, 64 rows at most.
        skip_bad: answer the others where a prompt cannot be answered; its line has an `error`.

    Every other argument is as for `kvtool.generate`; a prompt draws from `seed` + its index.

    Returns:
        The answers in the order of the prompts.

    Raises:
        UsageError: settings that are wrong or do not go together.
        KvtoolError: a model that cannot be used, a prompt that does not fit the memory.
    """
    if not isinstance(prompts, (str, Path)):
        prompts = make_prompts(list(prompts), keep_bad=settings.get("skip_bad", False))
    settings |= {"prompts": prompts, "policy": policy, "budget": budget}
    asked = from_python(GenerationSettings, "generate", model, tokenizer, **settings)
    watcher = Watcher() if watcher is None else watcher
    resolved = resolve_settings(asked, "kvtool generate")
    answers = prepare_prompts(*resolved, watcher).run(watcher, {})
    return sorted(answers, key=lambda answer: answer.index)
