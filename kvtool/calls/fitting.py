"""Ask what fits before weights load: the memory of a call, `-b auto`, and the ways of a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvtool.calls.auto_policy import choose_way
from kvtool.calls.base_settings import DeviceSettings
from kvtool.documents.memory import DeviceMemory, RunMemory, UnknownMemory
from kvtool.documents.plan import Device, PlanDocument, Way
from kvtool.errors import KvtoolError, UsageError
from kvtool.model_shape import has_key_biases
from kvtool.models.placement import (
    resolve_dtype,
    weight_bytes,
)
from kvtool.models.quantised import check_plain
from kvtool.planning.bytes import Text
from kvtool.planning.estimate import estimate_memory
from kvtool.planning.fit import Run, advice, choose_bytes, chosen_note, remedies
from kvtool.planning.lost_answers import Losses, packaged
from kvtool.planning.make_plan import PlannableLayers
from kvtool.planning.parameters import BITS, Bits, weights_bytes
from kvtool.planning.variants import FULL_CACHE, Variant
from kvtool.planning.ways import list_ways, policy_of
from kvtool.policies.grammar import parse_policy
from kvtool.policies.policy import Policy
from kvtool.sizes import Budget, bytes_in_words, spell_prefill
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from kvtool.calls.plan_settings import PlanSettings
    from kvtool.calls.request import Request
    from kvtool.calls.serve_settings import ServeSettings
    from kvtool.calls.settings import PromptSettings
    from kvtool.documents.memory import ModelShape
    from kvtool.documents.messages import Turns
    from kvtool.model_shape import LayerShape

_CHARACTERS = 4  # of English in a token, about


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
    run = _run_of(settings, request, new, turns)
    return run if isinstance(run, UnknownMemory) else _estimate(settings, run)


def estimate_text(settings: DeviceSettings, prompt: int, new: int) -> RunMemory:
    """Forecast the memory of a text that is read and continued with a full cache.

    Args:
        prompt, new: tokens.

    Raises:
        KvtoolError: a configuration that cannot be read.
    """
    return _estimate(settings, _run_of_text(settings, Text(prompt, new)), only_weights=True)


def _run_of_text(settings: DeviceSettings, text: Text) -> Run:
    """Return the run of a text with a full cache, for which the model's configuration is enough."""
    device = settings.planned_device
    dtype, config = resolve_dtype(settings.dtype or "auto", device), settings.source().config()
    return Run(config, dtype, FULL_CACHE, text, device=device)


def with_budget(
    settings: PromptSettings,
    request: Request,
    watcher: Watcher,
    new: int,
    turns: Turns | None = None,
    *,
    later: bool = False,
) -> Request:
    """Return a request whose policy, or budget, is what fits where it was `auto`, and say which.

    Args:
        new: tokens that are generated at most, in each turn.
        later: whether questions come after the prompt was compressed.

    Raises:
        UsageError: nothing is left of the memory, or what is there is not known.
        KvtoolError: a model that cannot be read.
    """
    shared = request.budget is not None and request.budget.share is not None
    if not (shared or settings.chooses):
        return request
    run = _run_of(settings, request, new, turns)
    if isinstance(run, UnknownMemory):
        guesses = settings.chooses and settings.dry_run and settings.source().is_folder
        if not (guesses and turns is None and request.prompt):
            settings.source().tokenizer()  # says why the model cannot be read
            raise UsageError("auto needs the model's configuration and tokenizer")
        watcher.note(f"prompt: {_CHARACTERS} characters count as a token; no tokenizer is here")
        run = _run_of_text(settings, Text(len(request.prompt) // _CHARACTERS + 1, new))
    memory = _memory_of(settings, run)
    if settings.chooses:
        policy, budget, read = choose_way(
            run, memory, watcher, later=later, prefill=settings.prefill, turns=turns is not None
        )
        return replace(request, policy=policy, budget=budget, prefill=read)
    assert request.budget is not None
    budget = choose_bytes([run], request.budget, memory)
    watcher.note(chosen_note(budget, request.budget, memory, [run]))
    return replace(request, budget=budget)


def for_requests(settings: ServeSettings, request: Request, watcher: Watcher) -> Request:
    """Return a request whose policy holds as many of a server's requests as are to run at a time.

    Raises:
        UsageError: they do not fit; the longest prompt or the memory is not known.
    """
    new, size = settings.longest_answer_tokens or settings.new_tokens, settings.memory_bytes
    run = _run_of_text(settings, Text(settings.longest or 0, new, settings.rows or 1))
    if size is None:
        free, weights = _memory_of(settings, run).known("-p auto")
        size = max(0, free - weights) // 2  # as `room_beside` counts once they are loaded
    policy, budget, read = choose_way(
        replace(run, size=size), None, watcher, later=None, prefill=settings.prefill, turns=True
    )
    return replace(request, policy=policy, budget=budget, prefill=read)


def _run_of(
    settings: PromptSettings, request: Request, new: int, turns: Turns | None
) -> Run | UnknownMemory:
    """Return what is known of a call before its weights; its memory and weights are not yet."""
    from kvtool.models.folder import Unreachable

    device, source = settings.planned_device, settings.source()
    dtype = resolve_dtype(settings.dtype or "auto", device)
    if source.loaded is not None:
        dtype = source.dtype
    try:
        tokenizer, config = source.tokenizer()
        prompt, later = _prompt_tokens(settings, request, tokenizer, turns, closed=new > 0)
    except KvtoolError as error:
        if source.is_folder:
            source.config()
        if isinstance(error, Unreachable):
            return UnknownMemory(error.message, error.hint)
        return UnknownMemory("the model's configuration or tokenizer cannot be read")
    if turns is not None:
        between = new * (sum(turn.answer is None for turn in turns.turns) - 1)
        prompt, later = prompt + between, later + between
    text = Text(prompt, new, 1, config.get_text_config(decoder=True).vocab_size, later)
    variant = Variant(request.policy, request.budget, request.prefill, request.plan)
    return Run(config, dtype, variant, text, device=device)


def _memory_of(settings: DeviceSettings, run: Run) -> DeviceMemory:
    """Return the memory of the device that a call is for, and what its weights take of it."""
    return settings.source().device_memory(
        run.config,
        run.dtype,
        run.device,
        spread=bool(settings.device_map or getattr(settings, "tensor_parallel", False)),
        bits=settings.quantize,
        memory=settings.memory_there,
    )


def _estimate(settings: DeviceSettings, run: Run, *, only_weights: bool = False) -> RunMemory:
    """Estimate a run; of a memory that was named, say how it is split up and what would fit."""
    memory = _memory_of(settings, run)
    cache = estimate_memory(run.config, run.dtype, run.variant, run.text, memory)
    found = RunMemory.of(memory, cache)
    if settings.memory_there is None:
        return found
    bits, where, weights = settings.quantize, settings.source().where, memory.weights_bytes
    known = {} if weights is None else {bits: weights}
    for each in BITS if bits is None and weights is not None else ():
        fewer = weight_bytes(run.config, run.dtype, where, bits=each)
        known |= {} if fewer is None else {each: fewer}
    run = replace(run, weights=known, memory=memory.free_bytes, bits=bits)
    needs = run.needs()
    said = needs.verdict()
    if needs.fits is False:
        ways = remedies(run)
        if only_weights:
            ways = [each for each in ways if each[0] in ("--quantize 8bit", "--quantize 4bit")]
        said = advice(needs, ways)
    return found.model_copy(update={"plan": [*needs.table(), f"memory: {said}"]})


def _prompt_tokens(
    settings: PromptSettings,
    request: Request,
    tokenizer: Any,
    turns: Turns | None,
    *,
    closed: bool,
) -> tuple[int, int]:
    """Count what is fed before the last answer, template included, and of it the later turns."""
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
    path = getattr(settings, "cache_path", None)
    if path is None:
        opened = [frame.opening + each for each in (text, *said[:1])]
        counts = [*map(len, tokenizer(opened, add_special_tokens=frame.special)["input_ids"])]
        return counts[0], 0 if turns is None else counts[0] - counts[1]
    from kvtool.cache.files.format import read_metadata

    later = len(continued_ids(tokenizer, text))  # than what was cut when the file was made
    return int(read_metadata(path)["tokens_seen"]) + later, later


@dataclass(frozen=True)
class PlannedRun:
    """A run that a plan is made for, in bytes for its cache or in the memory of a device.

    Attributes:
        losses: what the order of its ways rests on.
    """

    settings: PlanSettings
    run: Run
    losses: Losses

    def ways(self) -> list[Way]:
        """List the ways to run the model."""
        return list_ways(self.run, self.losses, self._spell)

    def listed(self, plan: PlanDocument, ways: list[Way] | None) -> PlanDocument:
        """Return a plan with its device and, unless they are None, the ways in it."""
        run = self.run
        more: dict[str, Any] = {}
        if ways is not None:
            more = {"ways": ways, "ways_source": self.losses.source}
        if run.memory is not None:
            more["device"] = Device(memory=run.memory, weights=run.weights_bytes)
        return plan.model_copy(update=more)

    def best(self, ways: list[Way]) -> tuple[Policy, Budget | None]:
        """Return the policy and budget of the first way; None: it keeps everything.

        Raises:
            UsageError: none fits.
        """
        if not ways or not ways[0].fits:
            raise self.refusal(parse_policy("keydiff"))
        return policy_of(ways[0])

    def budget(self, policy: Policy) -> Budget | None:
        """Return the largest budget of a policy on the device; None: it keeps everything.

        Raises:
            UsageError: it does not fit.
        """
        tokens = self.run.most(policy)
        if tokens is None:
            raise self.refusal(policy)
        return Budget(tokens=tokens) if policy.takes_budget else None

    def check(self, policy: Policy, tokens: int) -> None:
        """Refuse a budget that does not fit on the device.

        Raises:
            UsageError: it does not.
        """
        run = self.run
        if run.memory is not None and run.least_peak(policy, tokens) > run.memory:
            raise self.refusal(policy, tokens)

    def refusal(self, policy: Policy, tokens: int | None = None) -> UsageError:
        """Say by how much a policy does not fit on the device, and what would."""
        tokens = tokens or min(policy.min_budget, self.run.text.prompt)
        run = self.run.of(policy, tokens, "block")
        there = f"{bytes_in_words(run.weights_bytes)} of {bytes_in_words(run.memory or 0)}"
        said = advice(run.needs(), remedies(run))
        return UsageError(f"the weights take {there}, and `{policy}` {said}")

    def _spell(self, policy: Policy, tokens: int | None, prefill: str) -> str:
        settings = self.settings
        if not self.run.device:  # a block there may be another one than was counted with
            prefill = spell_prefill(prefill, own=policy.own_block)
        given = {
            "-m": settings.model,
            "--revision": settings.revision,
            "--dtype": settings.dtype,
            "--device": settings.device,
            "--device-map": settings.device_map,
            "--quantize": self.run.bits,
            "-p": str(policy),
            "-b": tokens,
            "--prefill": prefill if prefill != "full" else None,
            "-n": self.run.text.new or None,
        }
        return settings.command(["kvtool", "generate"], given)


def planned_run(
    settings: PlanSettings,
    model: ModelShape,
    layers: list[LayerShape | None],
    config: Any,
    text: Text,
    losses: Losses | None = None,
) -> PlannedRun:
    """Return the run that is planned for, where the settings say.

    Args:
        config: of the model.
        losses: what the order of its ways rests on; None: the package's own.

    Raises:
        UsageError: a memory is given, and the model's weights cannot be counted; a model without a
            layer whose budget is free.
    """
    PlannableLayers.of(model, text.prompt, layers)  # refuses a model without free layers
    size = None if settings.target is None else settings.target.bytes
    memory, dtype, bits = settings.device_memory, model.dtype or "auto", settings.quantize
    known: dict[Bits | None, int] = {}
    if memory is not None:
        if bits is not None:
            check_plain(model.id, config)
        known = _weights(settings, config, dtype)
        if bits not in known:
            raise UsageError(
                f"--memory: the weights of `{model.id}` cannot be counted from its configuration",
                hint="--bytes SIZE plans for the cache alone",
            )
    device = "" if settings.device in (None, "auto") else settings.device
    run = Run(config, dtype, FULL_CACHE, text, known, memory, device, bits=bits, size=size)
    return PlannedRun(settings, run, losses or packaged(key_biases=has_key_biases(config)))


def _weights(settings: PlanSettings, config: Any, dtype: str) -> dict[Bits | None, int]:
    """Return the bytes of the weights by how they are stored, as far as they can be counted."""
    found = {each: weights_bytes(config, dtype, each) for each in (None, *BITS)}
    if all(count is None for count in found.values()):  # no family that is known by its sizes
        where = settings.checkpoint() if settings.model is not None else {}
        given = {"name": settings.model, "device": settings.device}
        for each in found:
            found[each] = weight_bytes(config, dtype, where, bits=each, **given)
    return {each: count for each, count in found.items() if count is not None}
