"""`-p auto`: the first way that a plan would list for this prompt in the memory that is there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvtool.documents.memory import DeviceMemory
from kvtool.documents.plan import Way
from kvtool.errors import UsageError
from kvtool.model_shape import FREE, has_key_biases, layer_kinds
from kvtool.planning.fit import Run
from kvtool.planning.lost_answers import NOISE, packaged
from kvtool.planning.ways import Asked, list_ways
from kvtool.policies.grammar import parse_policy
from kvtool.policies.policy import Policy
from kvtool.policies.scores.full import Full
from kvtool.sizes import Budget, bytes_in_words, says_default_block, spell_prefill
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from kvtool.calls.settings import CachedSettings

_NAMED = 3  # ways that do not fit and are named all the same

Choice = tuple[Policy, Budget | None, str]
"""A policy, its budget (None: it keeps everything), and how the prompt is read."""


def choose_way(
    settings: CachedSettings,
    run: Run,
    memory: DeviceMemory,
    asked: Asked,
    watcher: Watcher,
    *,
    turns: bool = False,
) -> Choice:
    """Return the way to run a prompt that is expected to lose the fewest answers, and say so.

    Args:
        run: of the prompt under any policy.
        asked: whether the question is in the prompt.
        turns: whether the prompt comes in several turns, of which some policies cut the first only.

    Raises:
        UsageError: nothing fits; the memory or the size of the weights is not known.
    """
    if memory.free_bytes is None or memory.weights_bytes is None:
        what = "free memory" if memory.free_bytes is None else "size of the weights"
        raise UsageError(f"-p auto: the {what} is not known", hint="--memory SIZE")
    given, bits = settings.prefill, settings.quantize
    run = replace(
        run,
        weights={bits: memory.weights_bytes},
        memory=memory.free_bytes,
        bits=bits,
        prefill=given if given is None or says_default_block(given) else spell_prefill(given),
    )
    if not any(kind in FREE for kind in layer_kinds(run.config.get_text_config(decoder=True))):
        watcher.note("auto: -p full; each layer keeps a window of its own")
        return Policy(Full()), None, spell_prefill(given or "full", device=run.device)
    losses = packaged(key_biases=has_key_biases(run.config))
    ways = list_ways(run, losses, lambda *_: "", asked)
    if turns:
        ways = [way for way in ways if parse_policy(way.policy).repetition is None]
    fitting = [way for way in ways if way.fits]
    if not fitting:
        nearest = sorted(ways, key=lambda way: way.excess)[:_NAMED]
        short = ", ".join(f"{_name(way)} by {bytes_in_words(way.excess)}" for way in nearest)
        raise UsageError(
            f"-p auto: nothing fits ({memory.there()}); too large are {short or 'all'}",
            hint="--quantize 4bit, --prefill block",
        )
    for word, way in zip(("auto", "second"), fitting, strict=False):
        watcher.note(f"{word}: {_name(way)} {_why(way, run.text.prompt, asked)}")
    watcher.note(f"memory: {memory.there()}; losses closer than {NOISE:.0%} count as equal")
    first = fitting[0]
    policy = parse_policy(first.policy, imports=False)
    tokens = first.reads or first.tokens
    budget = Budget(tokens=tokens) if policy.takes_budget else None
    read = settings.prefill or first.prefill
    return policy, budget, spell_prefill(read, device=run.device, own=policy.own_block)


def _name(way: Way) -> str:
    """Spell a way as options do."""
    policy = parse_policy(way.policy, imports=False)
    budget = f" -b {way.reads or way.tokens}" if policy.takes_budget else ""
    return f"-p {way.policy}{budget}"


def _why(way: Way, prompt: int, asked: Asked) -> str:
    """Say what a way keeps, holds and is expected to lose."""
    kept = "all" if way.tokens >= prompt else f"{way.tokens:,}"
    when = {"known": "in the prompt", "later": "asked later", "worse": "in the prompt or later"}
    return (
        f"keeps {kept} of {prompt:,} tokens in {bytes_in_words(way.bytes)}, and is expected to "
        f"lose {way.loss.of(asked):.0%} of the answers (question {when[asked]})"
    )
