"""Estimate what a call takes of the device's memory, before any weights are loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvtool.calls.base_settings import DeviceSettings
from kvtool.calls.request import Request, planned_device
from kvtool.calls.settings import GenerationSettings, PromptSettings
from kvtool.documents.memory import DeviceMemory, RunMemory, UnknownMemory
from kvtool.errors import KvtoolError
from kvtool.policies.policy import Policy
from kvtool.policies.scores.full import Full

if TYPE_CHECKING:
    from kvtool.documents.messages import Turns
    from kvtool.planning.machine import Run


def estimate_run(
    settings: PromptSettings, request: Request, new: int, turns: Turns | None = None
) -> RunMemory | UnknownMemory:
    """Forecast the memory of a call from the model's configuration and its tokenizer.

    The turns of a conversation are counted as one prompt, with the longest answers between them.

    Args:
        new: tokens that are generated at most, in each turn.

    Returns:
        What is unknown where a tokenizer or a model of the hub cannot be read.

    Raises:
        UsageError: a budget that is too small for this prompt.
        KvtoolError: a folder's configuration that cannot be read.
    """
    run = _plan_run(settings, request, new, turns)
    return run if isinstance(run, UnknownMemory) else _estimate(settings, run)


def estimate_text(settings: DeviceSettings, prompt: int, new: int) -> RunMemory:
    """Forecast the memory of a text that is read and continued with a full cache.

    Args:
        prompt, new: tokens.

    Raises:
        KvtoolError: a configuration that cannot be read.
    """
    from kvtool.models.placement import resolve_dtype
    from kvtool.planning.bytes import Text
    from kvtool.planning.machine import Run
    from kvtool.planning.variants import Variant

    device = planned_device(settings)
    dtype = resolve_dtype(settings.dtype or "auto", device)
    text = Text(prompt, new)
    run = Run(settings.source().config(), dtype, Variant(Policy(Full()), None), text, {})
    return _estimate(settings, replace(run, device=device), only_weights=True)


def _estimate(settings: DeviceSettings, run: Run, *, only_weights: bool = False) -> RunMemory:
    from kvtool.planning.estimate import estimate_memory

    memory = memory_of(settings, run)
    cache = estimate_memory(run.config, run.dtype, run.variant, run.text, memory)
    found = RunMemory.of(memory, cache)
    if settings.memory_there is None:
        return found
    return found.model_copy(update={"plan": _split_up(settings, run, memory, only_weights)})


def plan_run(
    settings: PromptSettings, request: Request, new: int, turns: Turns | None = None
) -> Run | None:
    """Return what is known of a call before its weights; arguments and errors as `estimate_run`.

    Its memory and weights are not known yet. None where `estimate_run` knows nothing.
    """
    run = _plan_run(settings, request, new, turns)
    return None if isinstance(run, UnknownMemory) else run


def _plan_run(
    settings: PromptSettings, request: Request, new: int, turns: Turns | None
) -> Run | UnknownMemory:
    from kvtool.models.folder import Unreachable
    from kvtool.models.placement import resolve_dtype
    from kvtool.planning.bytes import Text
    from kvtool.planning.machine import Run
    from kvtool.planning.variants import Variant

    device = planned_device(settings)
    dtype = resolve_dtype(settings.dtype or "auto", device)
    source = settings.source()
    if source.loaded is not None:
        dtype = source.dtype
    try:
        tokenizer, config = source.tokenizer()
        prompt = _prompt_tokens(settings, request, tokenizer, turns, closed=new > 0)
    except KvtoolError as error:
        if source.is_folder:
            source.config()
        if isinstance(error, Unreachable):
            return UnknownMemory(error.message, error.hint)
        return UnknownMemory("the model's configuration or tokenizer cannot be read")
    if turns is not None:
        prompt += new * (sum(turn.answer is None for turn in turns.turns) - 1)
    text = Text(prompt, new, 1, config.get_text_config(decoder=True).vocab_size)
    variant = Variant(request.policy, request.budget, request.prefill, request.plan)
    return Run(config, dtype, variant, text, {}, device=device)


def memory_of(settings: DeviceSettings, run: Run) -> DeviceMemory:
    """Return the memory of the device that a call is for, and what its weights take of it."""
    from kvtool.models.placement import device_memory, free_memory

    source = settings.source()
    if source.loaded is not None:  # whose weights are in what is not free
        place, free = free_memory(run.device)
        free = settings.memory_there or free
        return DeviceMemory(device=place, free_bytes=free, weights_bytes=0)
    return device_memory(
        run.config,
        run.dtype,
        run.device,
        source.where,
        spread=bool(settings.device_map or getattr(settings, "tensor_parallel", False)),
        bits=settings.quantize,
        name=source.name,
        memory=settings.memory_there,
    )


def _split_up(
    settings: DeviceSettings, run: Run, memory: DeviceMemory, only_weights: bool
) -> list[str]:
    """Say what a call takes of a named memory and, where it does not fit, what would.

    Args:
        only_weights: whether the call has no flags for its cache.
    """
    from kvtool.models.placement import weight_bytes
    from kvtool.planning.machine import advice, remedies, table
    from kvtool.planning.parameters import BITS

    bits, where = settings.quantize, settings.source().where
    weights = {bits: memory.weights_bytes}
    if bits is None and memory.weights_bytes is not None:
        weights |= {each: weight_bytes(run.config, run.dtype, where, bits=each) for each in BITS}
    known = {each: count for each, count in weights.items() if count is not None}
    run = replace(run, weights=known, memory=memory.free_bytes)
    needs = run.needs(bits)
    said = needs.verdict()
    if needs.fits is False:
        found = remedies(run, bits)
        if only_weights:
            found = [each for each in found if each.flags in ("--quantize 8bit", "--quantize 4bit")]
        said = advice(needs, found)
    return [*table(needs), f"memory: {said}"]


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
