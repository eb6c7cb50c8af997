"""Answer many prompts with a loaded model, as many at a time as a memory holds.

Prompts are turned into tokens first; those that are answered already are left out. Each answer has
a fingerprint of what it depends on, so that none is taken for another one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from kvtool.cache.whole.batching import why_apart
from kvtool.calls.base_settings import ModelSettings
from kvtool.calls.conversation import begin, encode, note_text
from kvtool.calls.request import Request, room_for_rows
from kvtool.calls.settings import GenerationSettings
from kvtool.documents.messages import Message
from kvtool.documents.prompts import AnswerLine, PromptEntry
from kvtool.documents.settings import settings_of
from kvtool.errors import UsageError
from kvtool.evaluation.run.fingerprint import (
    WAYS_OUT,
    Fingerprint,
    code_digests,
    difference,
    digest,
    model_digest,
)
from kvtool.generation import Conversation
from kvtool.generation.model_settings import end_tokens, ends_early
from kvtool.generation.serving import Drawing, Served, Waiting, serve
from kvtool.models.load import Loaded
from kvtool.watcher import Watcher

_IN_TOKENS = frozenset({"prompts", "system", "max_new_tokens"})
_OF_MODEL = frozenset({each.name for each in fields(ModelSettings)}) - {"seed"}
_IN_REQUEST = frozenset({"policy", "budget", "allocator", "prefill"})
_LAID_OUT = frozenset({"recipe", "set", "unset"})  # in the others
_REFUSED = frozenset({"prompt", "prompt_file", "turns", "cache", "save", "show", "compare_full"})
_NO_MATTER = frozenset({"memory", "compile", "graphs", "skip_bad", "tensor_parallel"})
_MARKED = frozenset(each.name for each in settings_of(GenerationSettings) if not each.flag.counts)
ELSEWHERE = _IN_TOKENS | _OF_MODEL | _IN_REQUEST | _LAID_OUT | _REFUSED | _NO_MATTER | _MARKED
"""Settings that the fingerprint has from elsewhere, or that no answer depends on."""
_ONE_PROMPT = frozenset({"prompt", "source"})  # of a request


def shared_fingerprint(
    settings: GenerationSettings, request: Request, loaded: Loaded
) -> Fingerprint:
    """Return the fingerprint of all answers, but for their prompts."""
    settled = {"settings": settings_digest(settings, request), "model": model_digest(loaded)}
    return settled | code_digests(request.policy)


def settings_digest(settings: GenerationSettings, request: Request) -> str:
    """Hash every setting that is not in `ELSEWHERE`, one that is added later included."""
    own = {each.name for each in fields(settings)} - ELSEWHERE
    asked = {each.name for each in fields(request)} - _ONE_PROMPT - {"plan"}
    values: dict[str, Any] = {name: getattr(settings, name) for name in own}
    values |= {f"request.{name}": str(getattr(request, name)) for name in asked}
    plan = request.plan
    return digest(values | {"plan": None if plan is None else plan.to_data()})


def answer_fingerprint(
    shared: Mapping[str, str], settings: GenerationSettings, index: int, ids: Tensor, new: int
) -> Fingerprint:
    """Return the fingerprint of one answer.

    Args:
        shared: that of all answers.
        index: of the prompt, which its draws depend on.
        ids: (1, n) int64.
        new: tokens of the answer at most.
    """
    drawn = index if settings.temperature else None
    return {"prompt": digest([ids.tolist(), new, drawn]), **shared}


def answer_all(
    settings: GenerationSettings,
    request: Request,
    prompts: Sequence[PromptEntry],
    answered: Mapping[int, AnswerLine],
    loaded: Loaded,
    watcher: Watcher,
    stop_when: Callable[[], bool] | None = None,
) -> Iterator[AnswerLine]:
    """Yield answers as they end; arguments and errors as `PromptsRun.run`."""
    model, tokenizer = loaded.model, loaded.tokenizer
    why = why_apart(request.policy, recurrent=request.new_cache(model).recurrent)
    if why is not None:
        watcher.note(f"prompts are answered one by one: {why}")
    memory, most_sequences = room_for_rows(settings.memory_bytes, model)
    shared = shared_fingerprint(settings, request, loaded)
    waiting, bad = line_up(settings, request, loaded, prompts, answered, watcher, memory, shared)
    yield from bad
    fingerprints = {
        each.index: answer_fingerprint(shared, settings, each.index, each.ids, each.max_new_tokens)
        for each in waiting
    }
    served, count = Served(), 0
    answers = serve(
        model,
        tokenizer,
        lambda: request.new_cache(model),
        waiting,
        memory=memory,
        most_sequences=most_sequences if why is None else 1,
        drawing=Drawing(settings.temperature or 0.0, settings.seed or 0, settings.stop),
        served=served,
        stop_when=stop_when,
        graphs=settings.graphs,
    )
    with watcher.progress(len(waiting)) as advance:
        for found in answers:
            advance("prompts answered")
            count += 1
            yield AnswerLine(
                index=found.index,
                id=prompts[found.index].id,
                text=tokenizer.decode(found.token_ids, skip_special_tokens=True),
                token_ids=found.token_ids,
                prompt_tokens=found.prompt_tokens,
                new_tokens=len(found.token_ids),
                fingerprint=fingerprints[found.index],
            )
    watcher.note(served.in_words(count))


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
            now = answer_fingerprint(shared or {}, settings, index, ids, new)
            there = answered[index]
            why = _why_not(there, asked, tokens, new, ended=ended)
            why = why or difference(there.fingerprint, now) or ""
            if why:
                message = f"the answer to prompt {index} that is there {why}"
                raise UsageError(message, hint=WAYS_OUT)
            continue
        if (tokens, new) not in sizes:
            try:
                request.check_length(tokens, Watcher())
                sizes[tokens, new] = request.row_bytes(loaded, tokens, new)
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


def _why_not(there: AnswerLine, asked: PromptEntry, tokens: int, new: int, *, ended: bool) -> str:
    """Say why an answer that is there cannot be one to a prompt; empty: it can."""
    if (there.id, there.prompt_tokens) != (asked.id, tokens):
        return "is one to another prompt"
    if there.new_tokens > new or (there.new_tokens < new and not ended):
        return f"has {there.new_tokens} tokens, and {new} are asked for"
    return ""
