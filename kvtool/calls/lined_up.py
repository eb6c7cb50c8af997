"""Prompts in tokens, lined up for their rows: those that are answered already are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvtool.calls.conversation import begin
from kvtool.calls.prompt import encode, note_text
from kvtool.calls.request import Request
from kvtool.calls.settings import GenerationSettings
from kvtool.documents.answers import AnswerLine
from kvtool.documents.messages import Message
from kvtool.documents.prompts import AskedPrompt
from kvtool.errors import UsageError
from kvtool.evaluation.run.fingerprint import WAYS_OUT
from kvtool.models.load import Loaded
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from torch import Tensor

    from kvtool.generation import Conversation
    from kvtool.generation.serving import Waiting

_FREE_SHARE = 2  # of the free memory, rows take one part; what reads prompts needs some, too
_MOST_ROWS = 64  # where nobody has said how much memory: answers should not all come at the end


def room_for_rows(settings: GenerationSettings, model: Any) -> tuple[int | None, int | None]:
    """Return how many bytes rows in flight may take, and how many they may be; None: no bound."""
    from kvtool.models.placement import free_memory

    if settings.memory is not None:
        return settings.memory_bytes, None
    _, free = free_memory(str(model.device), spread=settings.device_map is not None)
    return None if free is None else free // _FREE_SHARE, _MOST_ROWS


def line_up(
    settings: GenerationSettings,
    request: Request,
    loaded: Loaded,
    prompts: Sequence[AskedPrompt],
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
    from kvtool.calls.fingerprints import answer_fingerprint, check_fingerprint
    from kvtool.generation.model_settings import end_tokens, ends_early
    from kvtool.generation.serving import Waiting

    cache, told = request.new_cache(loaded.model), False
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
                sizes[tokens, new] = _row_bytes(request, loaded, tokens, new)
            except UsageError as error:
                skip(index, error)
                continue
        if settings.skip_bad and memory is not None and sizes[tokens, new] > memory:
            skip(index, UsageError(f"it takes {sizes[tokens, new]} bytes of cache, of {memory}"))
            continue
        told = told or note_text(cache, loaded.model.config, tokens, new, watcher)
        waiting.append(Waiting(index, ids, new, sizes[tokens, new]))
    return waiting, bad


def _prompt_ids(
    settings: GenerationSettings,
    loaded: Loaded,
    talk: Conversation | None,
    asked: AskedPrompt,
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
    there: AnswerLine, asked: AskedPrompt, tokens: int, new: int, *, ended: bool
) -> None:
    """Refuse an answer that is there and cannot be one to a prompt.

    Args:
        tokens: of the prompt.
        new: of its answer at most.
        ended: whether the answer may have ended before it had so many.
    """
    told = f"the answer to prompt {there.index} that is there "
    if (there.id, there.prompt_tokens) != (asked.id, tokens):
        raise UsageError(f"{told}is one to another prompt", hint=WAYS_OUT)
    if there.new_tokens > new or (there.new_tokens < new and not ended):
        told += f"has {there.new_tokens} tokens, and {new} are asked for"
        raise UsageError(told, hint=WAYS_OUT)


def _row_bytes(request: Request, loaded: Loaded, tokens: int, new: int) -> int:
    """Forecast what the cache holds of a prompt and its answer, policy state included."""
    from kvtool.documents.memory import DeviceMemory
    from kvtool.evaluation.bench.estimate import estimate_memory
    from kvtool.evaluation.bench.variants import Variant
    from kvtool.planning.bytes import Text

    config = loaded.model.config
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    text = Text(tokens, new, 1, config.get_text_config(decoder=True).vocab_size)
    variant = Variant(request.policy, request.budget, request.prefill, request.plan)
    unknown = DeviceMemory(device="", free_bytes=None, weights_bytes=None)
    found = estimate_memory(config, dtype, variant, text, unknown)
    return found.kv_bytes + found.state_bytes
