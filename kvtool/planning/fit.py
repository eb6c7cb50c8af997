"""Say whether a run fits into a memory, which budget does, and what else would make it fit.

The machine need not be this one, and nothing is loaded: all follows from the configuration.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

from kvtool.documents.memory import DeviceMemory
from kvtool.documents.plan import Prefill
from kvtool.errors import UsageError
from kvtool.model_shape import LayerShape, has_key_biases, layer_shapes
from kvtool.planning.budgets import even_budgets, tokens_for_bytes
from kvtool.planning.bytes import Forecast, Text, forecast
from kvtool.planning.estimate import estimate_memory, reading_of
from kvtool.planning.parameters import BITS, Bits
from kvtool.planning.search import largest_that_fits
from kvtool.planning.variants import Variant
from kvtool.policies.grammar import parse_policy
from kvtool.policies.policy import Policy
from kvtool.sizes import DEFAULT_TOKENS, LONG_PROMPT, Budget, bytes_in_words, spell_prefill

PREFILLS: tuple[Prefill, ...] = ("block", "full")

_CODECS = (None, "int8", "k8v4", "int4")
_FINE, _COARSE = 2**10, 2**20  # bytes that a small and a large budget are rounded down to
_LARGE = 64 * _COARSE


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
        """What the peak leaves of the memory, below 0 where it does not fit; None: not known."""
        known = self.total is not None and self.memory is not None
        return (self.memory or 0) - (self.total or 0) if known else None

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits; None where that is not known."""
        return None if self.left is None else self.left >= 0

    def verdict(self) -> str:
        """Say in words whether it fits, and by how much it does not."""
        if self.left is None:
            return "unknown, the weights' size is not known" if self.weights is None else "unknown"
        if self.left >= 0:
            return f"fits, {bytes_in_words(self.left)} are left"
        return f"does not fit: {bytes_in_words(-self.left)} too much"

    def table(self) -> list[str]:
        """Write what it takes, names at the left and sizes at the right."""
        rows: list[tuple[str, int | None]] = [
            ("weights", self.weights),
            ("keys and values", self.kv),
            ("policy state", self.state),
            ("reading the prompt, at its peak", self.reading),
            ("total", self.total),
        ]
        if self.memory is not None:
            rows += [("memory", self.memory), ("left", self.left)]
        sizes = [
            "unknown" if size is None else f"{'-' * (size < 0)}{bytes_in_words(abs(size))}"
            for _, size in rows
        ]
        wide, right = max(len(name) for name, _ in rows), max(map(len, sizes))
        pairs = zip(rows, sizes, strict=True)
        return [f"{name:<{wide}}  {size:>{right}}" for (name, _), size in pairs]


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
        memory: bytes of the machine's memory; None: not known.
        device: `cpu` counts what a policy sets aside in host memory, too, and the device gives the
            tokens of a block; "": not known.
        bits: in which the linear layers' weights are stored.
        size: bytes that the cache may take; None: what the memory leaves.
        prefill: how the prompt is read, where that is given; None: as its length asks for.
        block: tokens of a `block`, where they are not those of the policy or the device.
    """

    config: Any
    dtype: str
    variant: Variant
    text: Text
    weights: dict[Bits | None, int] = field(default_factory=dict)
    memory: int | None = None
    device: str = "cuda"
    bits: Bits | None = None
    size: int | None = None
    prefill: str | None = None
    block: int | None = None

    @cached_property
    def layers(self) -> list[LayerShape | None]:
        """What each layer stores of a token."""
        return layer_shapes(self.config, self.dtype)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights; 0 where no memory is given."""
        return 0 if self.memory is None else self.weights[self.bits]

    def needs(self) -> Needs:
        """Estimate what the run takes.

        Raises:
            UsageError: a budget that is too small for the policy; heads that its codec cannot
                store.
        """
        nothing = DeviceMemory(device=self.device, free_bytes=None, weights_bytes=0)
        found = estimate_memory(self.config, self.dtype, self.variant, self.text, nothing)
        weights, working = self.weights.get(self.bits), found.peak_bytes or 0
        return Needs(weights, found.kv_bytes, found.state_bytes, working, self.memory)

    def under(self, budget: Budget | None) -> Run:
        """Return the run under another budget."""
        return replace(self, variant=replace(self.variant, budget=budget, plan=None))

    def of(self, policy: Policy, tokens: int | None, prefill: str) -> Run:
        """Return the run of another policy, with a budget in every layer.

        Args:
            tokens: None where the policy keeps everything.
            prefill: `full` or `block`.
        """
        budget = None if tokens is None or not policy.takes_budget else Budget(tokens=tokens)
        return replace(self, variant=Variant(policy, budget, self.spell(policy, prefill)))

    def spell(self, policy: Policy, prefill: str) -> str:
        """Write `full` or `block:M`, whose M is the run's, the policy's or the device's."""
        own = self.block or policy.own_block
        return spell_prefill(prefill, device=self.device, own=own)

    def forecast(self, policy: Policy, tokens: int) -> Forecast:
        """Forecast what a policy holds and reads with a budget in every layer."""
        budgets = even_budgets(policy, tokens, self.layers, self.text)
        return forecast(policy, self.layers, budgets, self.text)

    def peak(self, policy: Policy, tokens: int | None, prefill: str) -> int:
        """Estimate the most that lives at a time, weights included."""
        return self.weights_bytes + self.of(policy, tokens, prefill).needs().working

    def held(self, policy: Policy, tokens: int) -> int:
        """Forecast the most that a cache holds: at the end, or of a prompt that is repeated."""
        storage = self.forecast(policy, tokens).storage
        if policy.repetition is None:
            return storage
        read = self.of(policy, tokens, self.best_prefill(policy, tokens))
        return max(storage, reading_of(read.config, read.dtype, read.variant, read.text))

    def best_prefill(self, policy: Policy, tokens: int | None) -> str:
        """Return the way to read a prompt that takes less: in blocks a long one."""
        if self.prefill is not None:
            return self.prefill
        if self.text.prompt >= LONG_PROMPT:
            return "block"
        return min(PREFILLS, key=lambda prefill: self.peak(policy, tokens, prefill))

    def least_peak(self, policy: Policy, tokens: int | None) -> int:
        """Estimate the most that lives at a time where a prompt is read so."""
        return self.peak(policy, tokens, self.best_prefill(policy, tokens))

    def most_tokens(self, policy: Policy) -> int | None:
        """Return the largest budget that fits, the prompt at most; None where none does."""
        found: int | None = self.text.prompt
        for cost, limit in (
            (lambda tokens: self.held(policy, tokens), self.size),
            (lambda tokens: self.least_peak(policy, tokens), self.memory),
        ):
            if limit is not None and found is not None:
                least = min(policy.min_budget, found)
                found = largest_that_fits(cost, limit, least, found, steady=True)
        return found

    def most_pairs(self, policy: Policy) -> int | None:
        """Return the most pairs that a policy of two stages reads where its storage fits."""
        size = self.size
        if self.memory is not None:  # what lives beside the cache hardly depends on its size
            held = self.forecast(policy, DEFAULT_TOKENS).storage
            left = self.memory - self.least_peak(policy, DEFAULT_TOKENS) + held
            size = left if size is None else min(size, left)
        try:
            return tokens_for_bytes(policy, self.layers, self.text, max(1, size or 0))
        except UsageError:
            return None

    def most(self, policy: Policy) -> int | None:
        """Return the largest budget with which a policy fits; None where none does.

        That of a policy that stores everything is what a step reads, and the default.
        """
        if policy.stores_all or not policy.takes_budget:
            prompt = self.text.prompt
            tokens = min(DEFAULT_TOKENS, prompt) if policy.takes_budget else prompt
            fits = self.memory is None or self.least_peak(policy, tokens) <= self.memory
            return tokens if fits else None
        return self.most_pairs(policy) if policy.two_stages else self.most_tokens(policy)

    def most_as_it_is_read(self) -> int | None:
        """Return the largest budget in tokens with which the run itself fits.

        Returns:
            None where no budget does, or none changes what is held: nothing is evicted, or the
            budget is what a step reads.
        """
        policy, prompt = self.variant.policy, self.text.prompt
        if not policy.takes_budget or policy.stores_all or policy.min_budget > prompt:
            return None

        def excess(tokens: int) -> float:
            try:
                left = self.under(Budget(tokens=tokens)).needs().left
            except UsageError:
                return math.inf
            return math.inf if left is None else -left

        return largest_that_fits(excess, 0, policy.min_budget, prompt)


def remedies(run: Run) -> list[tuple[str, Needs]]:
    """Find what would make a run fit: the fewest changes that do, and the largest budget.

    Tried are weights and cache in fewer bits, and to read the prompt in blocks, small ones, too.
    Where keys have biases, keys in 4 bits are named only if nothing else does.

    Returns:
        The flags of each, such as `--quantize 4bit`, and what the run then takes.
    """
    found: list[tuple[str, Needs]] = []
    fewest = False, 0
    biased, own = has_key_biases(run.config), run.variant.policy.own_block

    def effort(change: tuple[list[str], Run]) -> tuple[bool, int]:
        codec = change[1].variant.policy.codec
        return biased and codec is not None and codec.key_bits < 8, len(change[0])

    for flags, changed in sorted(_changes(run), key=effort):
        if found and effort((flags, changed)) > fewest:
            break
        try:
            needs = changed.needs()
        except UsageError:
            continue
        words = " ".join(flags)
        larger = words.replace(
            spell_prefill("block", own=own), "block"
        )  # blocks, where small ones are
        if needs.fits and (larger == words or larger not in dict(found)):
            found.append((words, needs))
            fewest = effort((flags, changed))
    smaller = run.most_as_it_is_read()
    if smaller is not None:
        found.append((f"-b {smaller}", run.under(Budget(tokens=smaller)).needs()))
    return found


def _changes(run: Run) -> Iterator[tuple[list[str], Run]]:
    """Yield flags, and the run with them."""
    variant = run.variant
    fewer = [each for each in BITS if run.bits is None and each in run.weights]
    codecs = _CODECS if variant.plan is None and variant.policy.codec is None else (None,)
    prefills = {variant.prefill: variant.prefill}  # by what is typed
    if variant.prefill == "full":
        own, small = variant.policy.own_block, spell_prefill("block", own=variant.policy.own_block)
        prefills["block"] = spell_prefill("block", device=run.device, own=own)
        if prefills["block"] != small:  # where blocks are large
            prefills[small] = small
    for bits, codec, prefill in product((run.bits, *fewer), codecs, prefills):
        policy = variant.policy
        flags = [] if bits == run.bits else [f"--quantize {bits}"]
        if codec is not None:
            try:
                policy = parse_policy(f"{policy}+{codec}", imports=False)
            except UsageError:
                continue
            flags.append(f"-p {shlex.quote(str(policy))}")
        flags += [] if prefill == variant.prefill else [f"--prefill {prefill}"]
        if flags:
            changed = replace(variant, policy=policy, prefill=prefills[prefill])
            yield flags, replace(run, variant=changed, bits=bits)


def advice(needs: Needs, found: Sequence[tuple[str, Needs]]) -> str:
    """Say that a run does not fit, by how much, and what would."""
    if not found:
        return f"{needs.verdict()}; no flag makes it fit"
    would = "; ".join(f"{flags} ({bytes_in_words(then.total or 0)})" for flags, then in found)
    return f"{needs.verdict()}; what would: {would}"


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
    there, weights = memory.known(f"-b {asked}")
    free, share = there - weights, asked.share or 0
    if int(free * share) < _FINE:
        raise UsageError(
            f"-b {asked}: nothing is left; {memory.there()}", hint="--quantize 4bit, another device"
        )

    def excess(run: Run, units: int) -> int:
        """Return by how much bytes are above the share of what the peak then leaves."""
        try:
            reading = run.under(Budget(bytes=units * _FINE)).needs().reading
        except UsageError:  # too small for the policy
            return 0
        return math.ceil(units * _FINE - share * (free - reading))

    size = 0
    for run in runs:
        most = int(free * share) // _FINE
        units = largest_that_fits(partial(excess, run), 0, 1, most) or 1
        try:
            run.under(Budget(bytes=units * _FINE)).needs()
        except UsageError as error:
            raise UsageError(
                f"-b auto: weights and reading the prompt leave too little; {error.message}",
                hint="--prefill block, --quantize 4bit",
            ) from None
        size = min(size or units * _FINE, units * _FINE)
    unit = _COARSE if size >= _LARGE else _FINE
    return Budget(bytes=size // unit * unit)


def keeps_all(run: Run, budget: Budget) -> bool:
    """Say whether a budget in bytes holds the whole prompt of a run."""
    policy = run.variant.policy
    if policy.stores_all or budget.bytes is None:
        return True
    return tokens_for_bytes(policy, run.layers, run.text, budget.bytes) >= run.text.prompt


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
