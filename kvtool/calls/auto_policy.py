"""`-p auto`: the first way that a plan would list for a prompt in the memory that is there."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtool.calls.base_settings import at_least
from kvtool.documents.memory import DeviceMemory
from kvtool.documents.plan import PlanDocument, Way
from kvtool.errors import UsageError
from kvtool.model_shape import FREE, has_key_biases, layer_kinds, trained_length
from kvtool.planning.bytes import Text
from kvtool.planning.fit import Run
from kvtool.planning.lost_answers import NOISE, packaged
from kvtool.planning.variants import FULL_CACHE
from kvtool.planning.ways import Asked, list_ways, policy_of
from kvtool.policies.policy import Policy
from kvtool.policies.scores.full import Full
from kvtool.sizes import (
    AUTO,
    DEFAULT_NEW_TOKENS,
    Budget,
    bytes_in_words,
    parse_memory,
    says_default_block,
    spell_prefill,
)
from kvtool.watcher import Watcher

_NAMED = 3  # ways that do not fit and are named all the same


def choose_way(
    run: Run,
    memory: DeviceMemory | None,
    watcher: Watcher,
    *,
    later: bool | None,
    prefill: str | None = None,
    turns: bool = False,
) -> tuple[Policy, Budget | None, str]:
    """Return the way to run a prompt that is expected to lose the fewest answers, and say so.

    Args:
        run: of the prompt under any policy; of no token: of the longest that the model can read.
        memory: that the run has; None: the bytes of its cache are bounded.
        later: whether questions come after the prompt was compressed; None: that is open.
        prefill: how the prompt is read, where that is given.
        turns: whether the prompt comes in several turns, of which some policies cut the first only.

    Returns:
        The policy, its budget (None: it keeps everything), and how the prompt is read.

    Raises:
        UsageError: nothing fits; the memory, the weights' size or the longest prompt is not known.
    """
    text, device = run.text, run.device
    prompt = text.prompt or (trained_length(run.config) or 0) - text.new
    if prompt < 1:
        raise UsageError("-p auto needs the length of a prompt", hint="--longest-prompt 8K")
    run = replace(run, text=replace(text, prompt=prompt))
    hint, there = "fewer --rows, a shorter --longest-prompt", bytes_in_words(run.size or 0)
    there += f" for {text.sequences} x ({prompt:,} + {text.new:,}) tokens"
    if memory is not None:
        hint, there = "--quantize 4bit, --prefill block", memory.there()
        free, weights = memory.known("-p auto")
        run = replace(run, memory=free, weights={run.bits: weights})
    if prefill is not None:
        ours = says_default_block(prefill)
        run = replace(run, prefill="block" if ours else spell_prefill(prefill))
    if not any(kind in FREE for kind in layer_kinds(run.config.get_text_config(decoder=True))):
        watcher.note("auto: -p full; each layer keeps a window of its own")
        return Policy(Full()), None, spell_prefill(prefill or "full", device=device)
    asked: Asked = "worse" if later is None else "later" if later else "known"
    ways = list_ways(run, packaged(key_biases=has_key_biases(run.config)), lambda *_: "", asked)
    if turns:
        ways = [way for way in ways if policy_of(way)[0].repetition is None]
    fitting = [way for way in ways if way.fits]
    if not fitting:
        nearest = sorted(ways, key=lambda way: way.excess)[:_NAMED]
        short = ", ".join(f"{_name(way)} by {bytes_in_words(way.excess)}" for way in nearest)
        raise UsageError(
            f"-p auto: nothing fits ({there}); too large are {short or 'all'}", hint=hint
        )
    for word, way in zip(("auto", "second"), fitting, strict=False):
        watcher.note(f"{word}: {_name(way)} {_why(way, prompt, asked)}")
    watcher.note(f"memory: {there}; losses closer than {NOISE:.0%} count as equal")
    policy, budget = policy_of(fitting[0])
    run = replace(run, block=fitting[0].block)
    return policy, budget, run.spell(policy, prefill or fitting[0].prefill)


def _name(way: Way) -> str:
    """Spell a way as options do."""
    budget = policy_of(way)[1]
    return f"-p {way.policy}" + ("" if budget is None else f" -b {budget}")


def _why(way: Way, prompt: int, asked: Asked) -> str:
    """Say what a way keeps, holds and is expected to lose."""
    kept = "all" if way.tokens >= prompt else f"{way.tokens:,}"
    when = {"known": "in the prompt", "later": "asked later", "worse": "in the prompt or later"}
    return (
        f"keeps {kept} of {prompt:,} tokens in {bytes_in_words(way.bytes)}, and is expected to "
        f"lose {way.loss.of(asked):.0%} of the answers (question {when[asked]})"
    )


def compressed(
    model: Any,
    policy: Policy | str,
    budget: Budget | str | int | float | None = None,
    *,
    prefill: str | None = None,
    plan: PlanDocument | dict[str, Any] | str | Path | None = None,
    memory: int | str | None = None,
    longest_prompt: int | str | None = None,
    later: bool = False,
    watcher: Watcher | None = None,
) -> AbstractContextManager[Any]:
    """Give each `generate` in a block a compressed cache; see `cache.entry.build.compressed`.

    Args:
        policy: `auto` chooses the way that loses the fewest answers; the further settings are its.
        budget, prefill, plan: as `build_cache` takes them.
        memory: what has to fit, weights included (`600MiB`); None: what is free.
        longest_prompt: tokens; None: what the model was trained for.
        later: whether questions come after the prompt was compressed.
        watcher: gets what was chosen.

    Raises:
        UsageError: nothing fits; settings that do not go together; as `build.compressed`.
    """
    from kvtool.cache.entry.build import compressed
    from kvtool.models.attached import ModelSource
    from kvtool.models.load import Loaded

    if not isinstance(policy, str) or policy.strip().lower() != AUTO:
        if later or (memory, longest_prompt) != (None, None):
            raise UsageError("memory, longest_prompt and later go with the policy auto")
        return compressed(model, policy, budget, prefill=prefill or "full", plan=plan)
    if budget is not None or plan is not None:
        raise UsageError("the policy auto chooses the budget, too", hint="memory=SIZE bounds it")
    source = ModelSource(None, loaded=Loaded(model, None, "", None, ""))
    named = f"{memory}B" if isinstance(memory, int) else memory
    size = None if named is None else parse_memory(named, "memory")
    there = source.device_memory(model.config, source.dtype, "", memory=size)
    longest = 0 if longest_prompt is None else at_least(1, longest_prompt, "longest_prompt")
    text = Text(longest, DEFAULT_NEW_TOKENS)
    run = Run(model.config, source.dtype, FULL_CACHE, text, device=there.device)
    watcher = watcher or Watcher()
    chosen = choose_way(run, there, watcher, later=later, prefill=prefill, turns=True)
    return compressed(model, *chosen[:2], prefill=chosen[2])
