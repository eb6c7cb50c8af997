"""Say whether a run fits into the memory of a machine, and what would make it fit.

The machine need not be this one, and nothing is loaded: all follows from the configuration.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from kvtool.documents.memory import DeviceMemory
from kvtool.errors import UsageError
from kvtool.model_shape import has_key_biases
from kvtool.planning.bytes import Text
from kvtool.planning.estimate import estimate_memory
from kvtool.planning.held import largest
from kvtool.planning.parameters import BITS, Bits
from kvtool.planning.variants import Variant
from kvtool.policies.grammar import parse_policy
from kvtool.policies.policy import Policy
from kvtool.sizes import Budget, bytes_in_words

_CODECS = ("int8", "k8v4", "int4")


@dataclass(frozen=True)
class Needs:
    """What a run takes of a memory, in bytes.

    Attributes:
        weights: None where they are not known; then neither the total nor what is left is.
        kv: keys and values at the end, or their codes and scales.
        state: positions, numbers beside slots, and a reader's tables, at the end.
        working: all that lives at a time beside the weights: the cache while the prompt is read or
            answered, and what a layer computes with.
        memory: of the machine; None where it is not known.
    """

    weights: int | None
    kv: int
    state: int
    working: int
    memory: int | None = None

    @property
    def total(self) -> int | None:
        """The peak, weights included."""
        return None if self.weights is None else self.weights + self.working

    @property
    def reading(self) -> int:
        """What the peak takes beyond what is held at the end."""
        return max(0, self.working - self.kv - self.state)

    @property
    def left(self) -> int | None:
        """What the peak leaves of the memory; below 0 where it does not fit."""
        if self.total is None or self.memory is None:
            return None
        return self.memory - self.total

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits; None where that is not known."""
        return None if self.left is None else self.left >= 0

    def missing(self) -> int:
        """Count the bytes by which the run does not fit; 0 where it does, or is not known."""
        return 0 if self.left is None else max(0, -self.left)

    def rows(self) -> list[tuple[str, int | None]]:
        """Return names and bytes, the parts of the memory first."""
        rows: list[tuple[str, int | None]] = [
            ("weights", self.weights),
            ("keys and values", self.kv),
            ("policy state", self.state),
            ("reading the prompt, at its peak", self.reading),
            ("total", self.total),
        ]
        if self.memory is not None:
            rows += [("memory", self.memory), ("left", self.left)]
        return rows

    def verdict(self) -> str:
        """Say in words whether it fits, and by how much it does not."""
        if self.fits is None:
            return "unknown, the weights' size is not known" if self.weights is None else "unknown"
        if self.fits:
            return f"fits, {bytes_in_words(self.left or 0)} are left"
        return f"does not fit: {bytes_in_words(self.missing())} too much"


@dataclass(frozen=True)
class Run:
    """A run on a machine, known by its configuration.

    Attributes:
        config: a `PlainConfig` or a transformers configuration.
        dtype: in which the model runs; `auto`: the checkpoint's own.
        variant: policy, budget or plan, and how the prompt is read.
        text: lengths and sequences.
        weights: bytes of the weights by how they are stored: None as they are, or in fewer bits.
            What is not known is left out.
        memory: bytes of the machine's memory.
        device: `cpu` counts what a policy sets aside in host memory, too.
    """

    config: Any
    dtype: str
    variant: Variant
    text: Text
    weights: dict[Bits | None, int]
    memory: int | None = None
    device: str = "cuda"

    def needs(self, bits: Bits | None = None) -> Needs:
        """Estimate what the run takes.

        Args:
            bits: of the linear layers' weights.

        Raises:
            UsageError: a budget that is too small for the policy; heads that its codec cannot
                store.
        """
        nothing = DeviceMemory(device=self.device, free_bytes=None, weights_bytes=0)
        found = estimate_memory(self.config, self.dtype, self.variant, self.text, nothing)
        assert found.peak_bytes is not None, "there are no weights in it"
        weights = self.weights.get(bits)
        return Needs(weights, found.kv_bytes, found.state_bytes, found.peak_bytes, self.memory)


@dataclass(frozen=True)
class Remedy:
    """What would make a run fit.

    Attributes:
        flags: that change, such as `--quantize 4bit`.
        needs: what the run then takes.
    """

    flags: str
    needs: Needs


def remedies(run: Run, bits: Bits | None = None) -> list[Remedy]:
    """Find what would make a run fit: the fewest changes that do, and the largest budget.

    Tried are weights and cache in fewer bits, and to read the prompt in blocks. Where keys have
    biases, keys in 4 bits are named only if nothing else does.

    Args:
        bits: of the weights as they are asked for.
    """
    found: list[Remedy] = []
    fewest = False, 0
    biased = has_key_biases(run.config)
    tried = []
    for flags, changed, stored in _changes(run, bits):
        codec = changed.variant.policy.codec
        coarse = biased and codec is not None and codec.key_bits < 8
        tried.append(((coarse, len(flags)), flags, changed, stored))
    for effort, flags, changed, stored in sorted(tried, key=itemgetter(0)):
        if found and effort > fewest:
            break
        with_these = _needs(changed, stored)
        if with_these is not None and with_these.fits:
            found.append(Remedy(" ".join(flags), with_these))
            fewest = effort
    smaller = budget_that_fits(run, bits)
    if smaller is not None:
        flag, changed = f"-b {smaller}", _with_budget(run, smaller)
        found.append(Remedy(flag, changed.needs(bits)))
    return found


def _changes(run: Run, bits: Bits | None) -> Iterator[tuple[list[str], Run, Bits | None]]:
    """Yield flags, the run with them, and the bits of its weights."""
    fewer = [each for each in BITS if bits is None and each in run.weights]
    planned = run.variant.plan is not None
    blocks = [] if run.variant.prefill != "full" else ["block"]
    for stored in (bits, *fewer):
        weights = [] if stored == bits else [f"--quantize {stored}"]
        for codec in (None, *([] if planned else _CODECS)):
            coded = run if codec is None else _with_codec(run, codec)
            if coded is None:
                continue
            cache = [] if codec is None else [f"-p {shlex.quote(str(coded.variant.policy))}"]
            for prefill in (None, *blocks):
                flags = weights + cache + ([] if prefill is None else ["--prefill block"])
                if flags:
                    yield flags, _in_blocks(coded, prefill), stored


def _in_blocks(run: Run, prefill: str | None) -> Run:
    return run if prefill is None else replace(run, variant=replace(run.variant, prefill=prefill))


def _with_codec(run: Run, codec: str) -> Run | None:
    """Return the run with a cache in fewer bits; None where its policy cannot take them."""
    if run.variant.policy.codec is not None:
        return None
    try:
        policy = parse_policy(f"{run.variant.policy}+{codec}", imports=False)
    except UsageError:
        return None
    return replace(run, variant=replace(run.variant, policy=policy))


def _needs(run: Run, bits: Bits | None) -> Needs | None:
    try:
        return run.needs(bits)
    except UsageError:
        return None


def _with_budget(run: Run, tokens: int) -> Run:
    return replace(run, variant=replace(run.variant, budget=Budget(tokens=tokens), plan=None))


def budget_that_fits(
    run: Run, bits: Bits | None = None, *, memory: int | None = None
) -> int | None:
    """Return the largest budget in tokens with which a run fits, the whole prompt at most.

    Args:
        bits: of the weights.
        memory: bytes to fit into; None: all of the machine's.

    Returns:
        None where no budget does, or none changes what is held: nothing is evicted, or the budget
        is what a step reads.
    """
    policy = run.variant.policy
    if not policy.takes_budget or policy.stores_all:
        return None
    run = run if memory is None else replace(run, memory=memory)

    def fits(tokens: int) -> bool:
        found = _needs(_with_budget(run, tokens), bits)
        return found is not None and bool(found.fits)

    least = least_budget(policy, run.text.prompt)
    return None if least is None else largest(fits, least, run.text.prompt)


def least_budget(policy: Policy, prompt: int) -> int | None:
    """Return the smallest budget that a policy takes, None where it is above the prompt."""
    low, high = 1, prompt
    while low < high:
        middle = (low + high) // 2
        if _takes(policy, middle):
            high = middle
        else:
            low = middle + 1
    return low if _takes(policy, low) else None


def _takes(policy: Policy, tokens: int) -> bool:
    try:
        policy.check_budget(tokens)
    except UsageError:
        return False
    return True


def table(needs: Needs) -> list[str]:
    """Write the rows of a run's needs, names at the left and sizes at the right."""
    rows = [(name, _size(count)) for name, count in needs.rows()]
    wide = max(len(name) for name, _ in rows)
    right = max(len(size) for _, size in rows)
    return [f"{name:<{wide}}  {size:>{right}}" for name, size in rows]


def _size(count: int | None) -> str:
    if count is None:
        return "unknown"
    return f"-{bytes_in_words(-count)}" if count < 0 else bytes_in_words(count)


def advice(needs: Needs, found: Sequence[Remedy]) -> str:
    """Say that a run does not fit, by how much, and what would."""
    if not found:
        return f"{needs.verdict()}; no flag makes it fit"
    ways = "; ".join(f"{each.flags} ({bytes_in_words(each.needs.total or 0)})" for each in found)
    return f"{needs.verdict()}; what would: {ways}"
