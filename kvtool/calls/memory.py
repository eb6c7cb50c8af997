"""Estimate what a call takes of the device's memory, before any weights are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtool.calls.request import Request
from kvtool.calls.settings import GenerationSettings, PromptSettings
from kvtool.documents.memory import RunMemory
from kvtool.errors import KvtoolError
from kvtool.models.placement import device_memory, resolve_device, resolve_dtype

if TYPE_CHECKING:
    from kvtool.documents.turns import Turns


def estimate_run(
    settings: PromptSettings, request: Request, new: int, turns: Turns | None = None
) -> RunMemory | None:
    """Forecast the memory of a call from the model's configuration and its tokenizer.

    The turns of a conversation are counted as one prompt, with the longest answers between them.

    Args:
        new: tokens that are generated at most, in each turn.

    Returns:
        None where a tokenizer or a model of the hub cannot be read; a run reports the reason.

    Raises:
        UsageError: a budget that is too small for this prompt.
        KvtoolError: a folder's configuration that cannot be read.
    """
    from kvtool.planning.bytes import Text
    from kvtool.planning.estimate import estimate_memory
    from kvtool.planning.variants import Variant

    device = resolve_device(settings.device or "auto", settings.device_map)
    dtype = resolve_dtype(settings.dtype or "auto", device)
    source = settings.source()
    try:
        tokenizer, config = source.tokenizer()
        prompt = _prompt_tokens(settings, request, tokenizer, turns, closed=new > 0)
    except KvtoolError:
        if source.is_folder:
            source.config()
        return None
    spread = bool(settings.device_map or settings.tensor_parallel)
    memory = device_memory(
        config,
        dtype,
        device,
        source.where,
        spread=spread,
        bits=settings.quantize,
        name=source.name,
    )
    if turns is not None:
        prompt += new * (sum(turn.answer is None for turn in turns.turns) - 1)
    text = Text(prompt, new, 1, config.get_text_config(decoder=True).vocab_size)
    variant = Variant(request.policy, request.budget, request.prefill, request.plan)
    return RunMemory.of(memory, estimate_memory(config, dtype, variant, text, memory))


def _prompt_tokens(
    settings: PromptSettings,
    request: Request,
    tokenizer: Any,
    turns: Turns | None,
    *,
    closed: bool,
) -> int:
    """Count what is fed before the last answer, with what the chat template sets around it.

    Args:
        closed: whether the message ends with the prompt.
    """
    from kvtool.models.chat import continued_ids, make_frame

    system = settings.system
    said: list[str] = []
    if turns is not None:
        system = turns.system or system
    frame = make_frame(tokenizer, settings.template, chat=True, system=system)
    if request.prompt is not None:
        said.append(frame.message(request.prompt))
    for turn in [] if turns is None else turns.turns:
        given = "" if turn.answer is None else frame.given + frame.message(turn.answer)
        said.append(frame.message(turn.text) + (given or frame.closing))
    text = (frame.next or "\n").join(said)
    text += frame.closing if closed and turns is None and said else ""
    path = settings.cache_path if isinstance(settings, GenerationSettings) else None
    if path is None:
        ids = tokenizer(frame.opening + text, add_special_tokens=frame.special)["input_ids"]
        return len(ids)
    from kvtool.cache.files.format import read_metadata

    return int(read_metadata(path)["tokens_seen"]) + len(continued_ids(tokenizer, text))
