"""Answer many prompts in one call, as many at a time as a memory holds.

Prompts are turned into tokens first; those that are answered already are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.calls.fingerprints import (
    answer_fingerprint,
    check_fingerprint,
    shared_fingerprint,
)
from kvtool.calls.from_python import UNSAID, Unsaid, check_keywords, from_python
from kvtool.calls.request import (
    Request,
    choose_policy,
    configuration,
    encode,
    note_text,
    read_prefill,
)
from kvtool.calls.resolve import resolve_settings
from kvtool.calls.settings import GenerationSettings
from kvtool.documents.memory import DeviceMemory
from kvtool.documents.messages import Message
from kvtool.documents.prompts import AnswerLine, PromptEntry, make_prompts, read_prompts
from kvtool.documents.settings import MODEL_SETTINGS
from kvtool.errors import UsageError
from kvtool.evaluation.run.fingerprint import WAYS_OUT
from kvtool.models.load import Loaded
from kvtool.processes import check_alone
from kvtool.sizes import Budget
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from torch import Tensor

    from kvtool.documents.plan import PlanDocument
    from kvtool.generation import Conversation
    from kvtool.generation.serving import Served, Waiting
    from kvtool.policies.policy import Policy


_FREE_SHARE = 2  # of the free memory, rows take one part; what reads prompts needs some, too
_MOST_ROWS = 64  # where no caller has said how much memory: answers should not all come at the end


def room_for_rows(
    memory: int | None, device_map: str | None, model: Any
) -> tuple[int | None, int | None]:
    """Return how many bytes rows in flight may take, and how many they may be; None: no bound.

    Args:
        memory: what is said of the bytes; None: nothing.
        device_map: over which devices the model is spread; None: it is on one.
    """
    from kvtool.models.placement import free_memory

    if memory is not None:
        return memory, None
    _, free = free_memory(str(model.device), spread=device_map is not None)
    return None if free is None else free // _FREE_SHARE, _MOST_ROWS


def line_up(
    settings: GenerationSettings,
    request: Request,
    loaded: Loaded,
    prompts: Sequence[PromptEntry],
    answered: Mapping[int, AnswerLine],
    watcher: Watcher,
    memory: int | None,
    shared: Mapping[str, str] | None = None,
) -> tuple[list[Waiting], list[AnswerLine]]:
    """Turn prompts into tokens, and forecast the bytes of their rows.

    Args:
        answered: answers that are there, by the index of their prompts.
        memory: bytes of the rows in flight; None: no bound.
        shared: the fingerprint of all answers, but for their prompts; None: none is there.

    Returns:
        The prompts in tokens, and the lines of those that are skipped because they are bad.

    Raises:
        UsageError: a prompt without a token, or shorter than what the policy always keeps, unless
            bad ones are skipped; an answer that is there and cannot be one to its prompt.
    """
    from kvtool.calls.conversation import begin
    from kvtool.generation.model_settings import end_tokens, ends_early
    from kvtool.generation.serving import Waiting

    cache, noted = request.new_cache(loaded.model), False
    talk = begin(settings, loaded, cache, settings.system, watcher)
    for index in answered:
        if index >= len(prompts):
            raise UsageError(
                f"the answers hold one to prompt {index}, and there are {len(prompts)}",
                hint=WAYS_OUT,
            )
    waiting, ends, early = [], end_tokens(loaded.model), ends_early(loaded.model)
    bad: list[AnswerLine] = []
    sizes: dict[tuple[int, int], int] = {}

    def skip(index: int, error: UsageError) -> None:
        if not settings.skip_bad:
            raise UsageError(f"prompt {index}: {error.message}", hint=error.hint) from None
        bad.append(AnswerLine.of_bad(index, prompts[index], str(error)))
        watcher.note(f"prompt {index} is skipped: {error.message}")

    for index, asked in enumerate(prompts):
        try:
            ids = _prompt_ids(settings, loaded, talk, asked, f"prompt {index}")
        except UsageError as error:
            skip(index, error)
            continue
        tokens, new = ids.shape[1], asked.max_new_tokens or settings.new_tokens
        if index in answered:
            ended = bool(settings.stop) or early or answered[index].token_ids[-1] in ends
            _check_answer(answered[index], asked, tokens, new, ended=ended)
            now = answer_fingerprint(shared or {}, settings, index, ids, new)
            check_fingerprint(answered[index], now)
            continue
        if (tokens, new) not in sizes:
            try:
                request.check_length(tokens, Watcher())
                sizes[tokens, new] = row_bytes(request, loaded, tokens, new)
            except UsageError as error:
                skip(index, error)
                continue
        if settings.skip_bad and memory is not None and sizes[tokens, new] > memory:
            skip(index, UsageError(f"it takes {sizes[tokens, new]} bytes of cache, of {memory}"))
            continue
        noted = noted or note_text(cache, loaded.model.config, tokens, new, watcher)
        waiting.append(Waiting(index, ids, new, sizes[tokens, new]))
    return waiting, bad


def _prompt_ids(
    settings: GenerationSettings,
    loaded: Loaded,
    talk: Conversation | None,
    asked: PromptEntry,
    source: str,
) -> Tensor:
    """Return the tokens of a prompt: (1, n) int64. Without a template a line end parts messages."""
    if asked.bad is not None:
        raise UsageError(asked.bad)
    messages = asked.messages or (Message("user", asked.prompt or ""),)
    if messages[0].role == "system" and settings.system is not None:
        raise UsageError("the prompt and --system both give a system message; keep one")
    if talk is not None:
        return talk.prompt_ids(messages)
    if messages[0].role == "system":
        raise UsageError(
            "a system message needs a chat template, and there is none",
            hint="put its text at the beginning of the user's message",
        )
    text = "\n".join(each.content for each in messages)
    return encode(loaded, text, first=True, source=source)


def _check_answer(
    there: AnswerLine, asked: PromptEntry, tokens: int, new: int, *, ended: bool
) -> None:
    """Refuse an answer that is there and cannot be one to a prompt.

    Args:
        tokens: of the prompt.
        new: of its answer at most.
        ended: whether the answer may have ended before it had them.
    """
    message = f"the answer to prompt {there.index} that is there "
    if (there.id, there.prompt_tokens) != (asked.id, tokens):
        raise UsageError(f"{message}is one to another prompt", hint=WAYS_OUT)
    if there.new_tokens > new or (there.new_tokens < new and not ended):
        message += f"has {there.new_tokens} tokens, and {new} are asked for"
        raise UsageError(message, hint=WAYS_OUT)


def row_bytes(request: Request, loaded: Loaded, tokens: int, new: int) -> int:
    """Forecast what the cache holds of a prompt and its answer, policy state included."""
    from kvtool.planning.bytes import Text
    from kvtool.planning.estimate import estimate_memory
    from kvtool.planning.variants import Variant

    config = loaded.model.config
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    text = Text(tokens, new, 1, config.get_text_config(decoder=True).vocab_size)
    variant = Variant(request.policy, request.budget, request.prefill, request.plan)
    unknown = DeviceMemory(device="", free_bytes=None, weights_bytes=None)
    found = estimate_memory(config, dtype, variant, text, unknown)
    return found.kv_bytes + found.state_bytes


@dataclass(frozen=True)
class PromptsRun:
    """Prompts to answer, all checked as far as that goes without the model."""

    settings: GenerationSettings
    request: Request
    prompts: list[PromptEntry]

    @property
    def why_alone(self) -> str | None:
        """Say why prompts are answered one by one; None: they share a cache."""
        from kvtool.cache.whole.batching import why_apart

        return why_apart(self.request.policy)

    def describe(self) -> dict[str, Any]:
        """Return what a dry run prints."""
        settings = self.settings
        return configuration(settings, self.request) | {
            "prompts": len(self.prompts),
            "max_new_tokens": settings.new_tokens,
            "temperature": settings.temperature,
            "memory_bytes": settings.memory_bytes,
            "one_by_one": self.why_alone,
        }

    def run(
        self,
        watcher: Watcher,
        answered: Mapping[int, AnswerLine],
        *,
        served: Served | None = None,
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
        from kvtool.generation.serving import Drawing, serve

        settings, source = self.settings, self.settings.source()
        watcher.note_any(source.note())
        with source.attached(note=watcher.note, progress=watcher.shows_progress) as loaded:
            model, tokenizer = loaded.model, loaded.tokenizer
            cache = self.request.new_cache(model)
            why = self.why_alone
            if why is None and cache.recurrent:
                why = "the model has recurrent layers"
            if why is not None:
                watcher.note(f"prompts are answered one by one: {why}")
            memory, most_sequences = room_for_rows(
                settings.memory_bytes, settings.device_map, model
            )
            shared = shared_fingerprint(settings, self.request, loaded)
            waiting, bad = line_up(
                settings, self.request, loaded, self.prompts, answered, watcher, memory, shared
            )
            yield from bad
            fingerprints = {
                each.index: answer_fingerprint(
                    shared, settings, each.index, each.ids, each.max_new_tokens
                )
                for each in waiting
            }
            drawing = Drawing(settings.temperature or 0.0, settings.seed or 0, settings.stop)
            answers = serve(
                model,
                tokenizer,
                lambda: self.request.new_cache(model),
                waiting,
                memory=memory,
                most_sequences=most_sequences if why is None else 1,
                drawing=drawing,
                served=served,
                stop_when=stop_when,
            )
            with watcher.progress(len(waiting)) as advance:
                for found in answers:
                    advance("prompts answered")
                    yield AnswerLine(
                        index=found.index,
                        id=self.prompts[found.index].id,
                        text=tokenizer.decode(found.token_ids, skip_special_tokens=True),
                        token_ids=found.token_ids,
                        prompt_tokens=found.prompt_tokens,
                        new_tokens=len(found.token_ids),
                        fingerprint=fingerprints[found.index],
                    )


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
    settings.check_paths()
    settings.source().check()
    asked = settings.prompts or []
    prompts = read_prompts(asked, keep_bad=settings.skip_bad) if isinstance(asked, str) else asked
    policy, budget = choose_policy(settings, plan, watcher)
    source = settings.prompts if isinstance(settings.prompts, str) else "a list"
    request = Request(None, source, policy, budget, read_prefill(settings.prefill), plan)
    return PromptsRun(settings, request, prompts)


def generate_many(
    model: Any = None,
    prompts: Sequence[Any] | str | Path = (),
    policy: Policy | str | Unsaid = UNSAID,
    budget: Budget | str | int | float | None = None,
    *,
    tokenizer: Any = None,
    memory: str | int | None = None,
    max_new_tokens: int | str | None = None,
    plan: PlanDocument | Mapping[str, Any] | str | Path | None = None,
    prefill: str | None = None,
    system: str | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    skip_bad: bool = False,
    watcher: Watcher | None = None,
    **model_settings: Any,
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
    if isinstance(prompts, (str, Path)):
        given: str | list[PromptEntry] = str(prompts)
    else:
        given = make_prompts(list(prompts), keep_bad=skip_bad)
    check_keywords("generate", model_settings, MODEL_SETTINGS)
    settings = from_python(
        GenerationSettings,
        "generate",
        model,
        tokenizer,
        plan=plan,
        prompts=given,
        memory=f"{memory}B" if isinstance(memory, int) else memory,
        policy=policy,
        budget=budget,
        system=system,
        prefill=prefill,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        stop=stop,
        skip_bad=skip_bad,
        **model_settings,
    )
    watcher = Watcher() if watcher is None else watcher
    resolved = resolve_settings(settings, "kvtool generate")
    answers = prepare_prompts(*resolved, watcher).run(watcher, {})
    return sorted(answers, key=lambda answer: answer.index)
