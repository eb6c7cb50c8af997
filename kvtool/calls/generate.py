"""Text generated under a KV budget in one call: settings checked, model loaded, prompt answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvtool.calls.fitting import estimate_run, with_budget
from kvtool.calls.from_python import UNSAID, Unsaid, from_python, takes
from kvtool.calls.needle import NEEDLE, answer_prefix, note_needle, write_needle
from kvtool.calls.request import (
    Request,
    choose_policy,
    configuration,
    read_prefill,
    resumed_policy,
    typed_prompt,
)
from kvtool.calls.resolve import resolve_settings
from kvtool.calls.settings import GenerationSettings
from kvtool.documents.messages import Turns, UserTurn, read_turns
from kvtool.errors import UsageError
from kvtool.policies.policy import Policy
from kvtool.policies.scores.full import Full
from kvtool.processes import check_alone, joined
from kvtool.transformers_versions import check_transformers
from kvtool.watcher import Listener, Watcher

if TYPE_CHECKING:
    from kvtool.calls.conversation import Generated
    from kvtool.documents.generation import GenerationDocument
    from kvtool.documents.plan import PlanDocument
    from kvtool.sizes import Budget


@takes(GenerationSettings)
def generate(
    model: Any = None,
    prompt: str | None = None,
    policy: Policy | str | Unsaid = UNSAID,
    budget: Budget | str | int | float | None = None,
    *,
    tokenizer: Any = None,
    on_text: Callable[[str], object] | None = None,
    watcher: Watcher | None = None,
    **settings: Any,
) -> GenerationDocument:
    """Generate text under a KV-cache budget.

    A loaded model runs afterwards the attention that it ran before.

    Args:
        model: a folder, a hub ID or a loaded model (then with its `tokenizer`); None is the
            bundled reference model.
        prompt: None for none, where there are `turns` or a `cache`, else for a built-in one.
        policy, budget: as for `kvtool.build_cache`; without a policy everything is kept.
        plan: a plan or a recipe as a document, its data or its file.
        prompt_file: a file that comes before `prompt` in the same message.
        cache: to go on from, a file or what `kvtool.compress` has returned; inside
            `with cache.rollback():` it stays as it is, for further questions.
        turns: of a conversation, their file or a list of what such a file holds.
        on_text: called with pieces of text as they come; every answer of `turns` ends in a line
            end.
        watcher: takes notes and progress; None: no caller does.

    `settings` are those of `GenerationSettings`; each is what the option of `kvtool generate` with
    its name is.

    Returns:
        What `kvtool generate -f json` prints.

    Raises:
        UsageError: settings that are wrong or do not go together.
        KvtoolError: a model or a cache that cannot be read or used.
    """
    asked = from_python(
        GenerationSettings,
        "generate",
        model,
        tokenizer,
        prompt=prompt,
        policy=policy,
        budget=budget,
        **settings,
    )
    watcher = Watcher() if watcher is None else watcher
    listener = Listener(on_text)
    if on_text is not None and asked.turns is not None:
        listener = Listener(on_text, lambda answer: on_text("\n"))
    resolved = resolve_settings(asked, "kvtool generate")
    generated = prepare_generation(*resolved, watcher).run(watcher, listener)
    generated.finish(watcher)
    return generated.document


@dataclass(frozen=True)
class GenerationRun:
    """A generation that is all checked, as far as that goes without the model.

    Attributes:
        turns: of a conversation; None: one prompt is answered.
    """

    settings: GenerationSettings
    request: Request
    turns: Turns | None

    def describe(self) -> dict[str, Any]:
        """Return what a dry run prints."""
        settings, turns = self.settings, self.turns
        more: dict[str, Any] = {
            "max_new_tokens": settings.new_tokens,
            "temperature": settings.temperature,
        }
        if turns is not None:
            more["turns"] = [_spell_turn(turn) for turn in turns.turns]
            more["system"] = turns.system or settings.system
        more |= {"cache": settings.cache}
        more["memory"] = estimate_run(settings, self.request, settings.new_tokens, turns)
        return configuration(settings, self.request) | more

    def run(self, watcher: Watcher, listener: Listener) -> Generated:
        """Load the model and generate."""
        settings, source = self.settings, self.settings.source()
        with joined():
            watcher.note_any(source.note())
            with source.attached(note=watcher.note, progress=watcher.shows_progress) as loaded:
                from kvtool.calls.conversation import generated  # a device is refused by now

                return generated(settings, self.request, self.turns, loaded, watcher, listener)


def prepare_generation(
    settings: GenerationSettings, plan: PlanDocument | None, watcher: Watcher
) -> GenerationRun:
    """Check everything that can be checked before the model is loaded.

    Args:
        settings, plan: resolved, by which a bad recipe is refused before this file is imported.

    Raises:
        UsageError, KvtoolError: as `generate`.
    """
    check_transformers()
    _check_processes(settings)
    settings.check_output()
    settings.source().check(config_only=settings.dry_run)
    turns = None if settings.turns is None else _read_turns(settings, settings.turns)
    request = _request(settings, plan, watcher)
    later = settings.later or turns is not None or settings.save is not None
    request = with_budget(settings, request, watcher, settings.new_tokens, turns, later=later)
    return GenerationRun(settings, request, turns)


def _read_turns(settings: GenerationSettings, given: str | Turns) -> Turns:
    """Return the turns that are given or that `--turns` names, fit for the other settings."""
    turns = read_turns(given) if isinstance(given, str) else given
    others = {
        "--system gives one, too": settings.system is not None,
        "--cache holds a text": settings.cache is not None,
        "--chat-template is off": settings.template == "off",
    }
    why = next((why for why, given in others.items() if given), None)
    if turns.system is not None and why is not None:
        raise UsageError(f"--turns gives a system message, and {why}")
    before = (settings.cache, settings.prompt, settings.prompt_file)
    if not turns.turns[0].text and all(each is None for each in before):
        raise UsageError("--turns begins with an answer, and there is no prompt that it answers")
    return turns


def _spell_turn(turn: UserTurn) -> Any:
    """Write a turn in a dry run."""
    return turn.text if turn.answer is None else {"user": turn.text, "assistant": turn.answer}


def _check_processes(settings: GenerationSettings) -> None:
    """Refuse several processes that would do the same, or would share a file."""
    if not settings.tensor_parallel:
        if settings.loaded is None:
            check_alone("generate")
        return
    for name in ("show", "save", "cache"):
        if getattr(settings, name) is not None:
            raise UsageError(f"--tensor-parallel excludes --{name}: each process has its own heads")


def _request(settings: GenerationSettings, plan: PlanDocument | None, watcher: Watcher) -> Request:
    prompt, source = typed_prompt(settings)
    if settings.cache is not None:
        if plan is not None:
            raise UsageError(
                "a plan and --cache exclude each other: a saved cache goes on by what it was made "
                "with",
                hint="leave out one of them",
            )
        policy, budget = resumed_policy(settings, settings.cache)
        return Request(prompt, source, policy, budget, read_prefill(settings, policy))
    policy, budget = choose_policy(settings, plan, watcher)
    prefill = read_prefill(settings, policy)
    if not settings.wants_needle:
        return Request(prompt, source, policy, budget, prefill, plan)
    prompt, code = write_needle()
    note_needle(code, watcher)
    return Request(prompt, NEEDLE, policy, budget, prefill, plan, answer_prefix(prompt))


# ---- two policies on the same prompt, beside the full cache


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
        source, shows = settings.source(), watcher.shows_progress
        watcher.note_any(source.note())
        texts, full_answer = [], None
        with source.attached(note=watcher.note, progress=shows) as loaded:
            from kvtool.calls.conversation import show_texts

            for i, run in enumerate(self.runs):
                own = replace(run, settings=replace(run.settings, loaded=loaded))
                found = own.run(watcher if i == 1 else Watcher(), listener)
                found.request.note_bytes(found.document.cache, watcher)
                if i == 0:
                    full_answer = found.document.text.strip()
                else:
                    texts.append(found.kept)
                yield found.document
                if listener.has_enough:
                    break
        if texts:
            show_texts(settings, texts, watcher, full_answer=full_answer)


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
    if settings.show is None or len(policies) > 2:
        raise UsageError(
            f"`generate` runs one policy, or two with --show, got {len(policies)}: "
            f"{', '.join(policies)}",
            hint="--show kept.html sets two side by side; `kvtool eval` compares scores",
        )
    for flag in ("save", "cache", "turns"):
        if getattr(settings, flag) is not None:
            raise UsageError(f"--{flag} goes with one policy, not with {' and '.join(policies)}")
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
