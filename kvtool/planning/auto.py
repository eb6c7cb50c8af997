"""Choose the budget that a share of a device's free memory gives, before any weights load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from kvtool.documents.memory import DeviceMemory
from kvtool.errors import UsageError
from kvtool.model_shape import layer_shapes
from kvtool.planning.budgets import largest, tokens_for_bytes
from kvtool.planning.fit import Needs, Run
from kvtool.sizes import Budget

_FINE, _COARSE = 2**10, 2**20  # bytes that a small and a large budget are rounded down to
_LARGE = 64 * _COARSE


def choose_bytes(runs: Sequence[Run], asked: Budget, memory: DeviceMemory) -> Budget:
    """Return the bytes that the caches of runs may take, one run at a time.

    That is the share of what the weights, and reading the prompt at its peak, leave of the memory.
    Every run gets the same bytes, so that they compare.

    Args:
        asked: a budget of `auto`, with its share.

    Raises:
        UsageError: nothing is left; the memory or the weights are not known; bytes that are too
            small for a policy.
    """
    assert asked.share is not None, "the budget is `auto`"
    if memory.free_bytes is None or memory.weights_bytes is None:
        what = "free memory" if memory.free_bytes is None else "size of the weights"
        raise UsageError(
            f"-b {asked}: the {what} is not known", hint="--device-memory SIZE, or -b in bytes"
        )
    free = memory.free_bytes - memory.weights_bytes
    if int(free * asked.share) < _FINE:
        raise UsageError(
            f"-b {asked}: nothing is left; {memory.there()}", hint="--quantize 4bit, another device"
        )
    size = min(_of_run(run, asked.share, free) for run in runs)
    unit = _COARSE if size >= _LARGE else _FINE
    return Budget(bytes=size // unit * unit)


def _of_run(run: Run, share: Fraction, free: int) -> int:
    """Return the most bytes that are no more than the share of what the peak leaves.

    Raises:
        UsageError: even they are too small.
    """

    def fits(units: int) -> bool:
        try:
            needs = needs_with(run, Budget(bytes=units * _FINE))
        except UsageError:  # too small for the policy
            return True
        return units * _FINE <= share * (free - needs.reading)

    units = largest(fits, 1, int(free * share) // _FINE) or 1
    try:
        needs_with(run, Budget(bytes=units * _FINE))
    except UsageError as error:
        raise UsageError(
            f"-b auto: weights and reading the prompt leave too little; {error.message}",
            hint="--prefill block, --quantize 4bit",
        ) from None
    return units * _FINE


def needs_with(run: Run, budget: Budget) -> Needs:
    """Estimate what a run takes under another budget."""
    return replace(run, variant=replace(run.variant, budget=budget)).needs()


def keeps_all(run: Run, budget: Budget) -> bool:
    """Say whether a budget in bytes holds the whole prompt of a run."""
    policy, layers = run.variant.policy, layer_shapes(run.config, run.dtype)
    if policy.stores_all or budget.bytes is None:
        return True
    return tokens_for_bytes(policy, layers, run.text, budget.bytes) >= run.text.prompt


def chosen_note(budget: Budget, asked: Budget, memory: DeviceMemory, runs: Sequence[Run]) -> str:
    """Say which budget was chosen, of what, and whether it holds everything."""
    share = Budget(ratio=asked.share)
    told = (
        f"budget: {budget}, {share} of what weights and reading the prompt leave ({memory.there()})"
    )
    if not all(keeps_all(run, budget) for run in runs):
        return told
    longest = max(run.text.prompt for run in runs)
    return f"{told}; it holds the whole prompt of {longest} tokens, so nothing of it is evicted"
