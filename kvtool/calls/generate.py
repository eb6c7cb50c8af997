"""Text generated under a KV budget in one call: settings checked, model loaded, prompt answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvtool.calls.fitting import estimate_run, with_budget
from kvtool.calls.from_python import UNSAID, Unsaid, from_python, takes
from kvtool.calls.kept import show_kept
from kvtool.calls.needle import NEEDLE, answer_prefix, compare_needle, note_needle, write_needle
from kvtool.calls.request import (
    Request,
    choose_policy,
    configuration,
    open_cache,
    read_prefill,
    resumed_policy,
    typed_prompt,
)
from kvtool.calls.resolve import resolve_settings
from kvtool.calls.settings import GenerationSettings
from kvtool.documents.messages import Turns, UserTurn, read_turns
from kvtool.errors import UsageError
from kvtool.models.load import Loaded
from kvtool.processes import check_alone, joined
from kvtool.transformers_versions import check_transformers
from kvtool.watcher import Listener, Watcher

if TYPE_CHECKING:
    from kvtool.cache.whole.cache import KVCache
    from kvtool.documents.generation import GenerationDocument
    from kvtool.documents.plan import PlanDocument
    from kvtool.policies.policy import Policy
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
class Generated:
    """What was generated, and the cache at its end.

    Attributes:
        stopped: whether a caller has ended it before it was done.
    """

    document: GenerationDocument
    settings: GenerationSettings
    request: Request
    cache: KVCache
    loaded: Loaded
    stopped: bool

    def finish(self, watcher: Watcher) -> None:
        """Save and show the cache as asked for; say what bytes came to, and judge the needle."""
        self.request.note_bytes(self.document.cache, watcher)
        path = self.settings.save_path
        if path is not None:
            from kvtool.cache.files.save import save_cache

            save_cache(self.cache, path, model=self.loaded.model, model_name=self.loaded.name)
            watcher.note(f"saved {path}")
        last = self.document.turns[-1] if self.document.turns else self.document
        new, said = last.new_tokens, last.text.strip()
        show_kept(self.settings, self.loaded, self.cache, watcher, new_tokens=new, answer=said)
        alone = self.settings.loaded is None and not self.settings.tensor_parallel
        if self.request.source == NEEDLE and watcher.listens and alone and not self.stopped:
            shown = self.settings.show is not None
            compare_needle(self.request, self.document, self._answer_anew, watcher, shown=shown)

    def _answer_anew(self, request: Request) -> GenerationDocument:
        """Answer the prompt in another cache."""
        from kvtool.calls.conversation import answer

        settings = replace(self.settings, compare_full=False, compile=False)
        cache = request.new_cache(self.loaded.model)
        return answer(settings, request, self.loaded, cache, Watcher(), Listener())


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
                from kvtool.calls.conversation import answer, converse  # a device is refused by now

                cache = open_cache(settings, self.request, loaded)
                if self.turns is None:
                    document = answer(settings, self.request, loaded, cache, watcher, listener)
                else:
                    document = converse(
                        settings, self.request, self.turns, loaded, cache, watcher, listener
                    )
        return Generated(document, settings, self.request, cache, loaded, listener.has_enough)


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
    settings.check_paths()
    settings.source().check(config_only=settings.dry_run)
    turns = None if settings.turns is None else _read_turns(settings, settings.turns)
    request = _resolve(settings, plan, watcher)
    request = with_budget(settings, request, watcher, settings.new_tokens, turns)
    return GenerationRun(settings, request, turns)


def _read_turns(settings: GenerationSettings, given: str | Turns) -> Turns:
    """Return the turns that are given or that `--turns` names, fit for the other settings."""
    turns = read_turns(given) if isinstance(given, str) else given
    if turns.system is not None and settings.system is not None:
        raise UsageError("--system and --turns both give a system message; keep one")
    if turns.system is not None and (settings.cache is not None or settings.template == "off"):
        why = "--cache holds a text" if settings.cache is not None else "--chat-template is off"
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
    elif settings.show is not None:
        raise UsageError("--tensor-parallel excludes --show: each process has its own heads")
    elif settings.save is not None or settings.cache is not None:
        flag = "--save" if settings.save is not None else "--cache"
        raise UsageError(
            f"--tensor-parallel excludes {flag}: a cache file holds all KV heads, and each process "
            "has its own"
        )


def _resolve(settings: GenerationSettings, plan: PlanDocument | None, watcher: Watcher) -> Request:
    prompt, source = typed_prompt(settings)
    prefill = read_prefill(settings.prefill)
    if settings.cache is not None:
        if plan is not None:
            raise UsageError(
                "a plan and --cache exclude each other: a saved cache goes on by what it was made "
                "with",
                hint="leave out one of them",
            )
        policy, budget = resumed_policy(settings, settings.cache)
        return Request(prompt, source, policy, budget, prefill)
    policy, budget = choose_policy(settings, plan, watcher)
    if settings.wants_needle:
        (prompt, code), source = write_needle(), NEEDLE
        note_needle(code, watcher)
        prefix = answer_prefix(prompt)
        return Request(prompt, source, policy, budget, prefill, plan, prefix)
    return Request(prompt, source, policy, budget, prefill, plan)
