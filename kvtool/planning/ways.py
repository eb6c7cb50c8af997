"""List the ways to run a model in a given memory, in the order of the answers that they cost.

A way is everything in fewer bits, some tokens in fewer bits, some tokens, or everything read
sparsely. Its bytes are those that a run holds, its peak is estimated as for a dry run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from kvtool.documents.ways import KINDS, Peaks, Prefill, Way, WayKind, WayLoss
from kvtool.errors import UsageError
from kvtool.identity import config_hash
from kvtool.model_shape import LayerShape, has_key_biases
from kvtool.planning.bytes import Forecast, Text, check_dims, forecast
from kvtool.planning.held import even_budgets, tokens_for_bytes
from kvtool.planning.losses import NOISE, Loss, Losses
from kvtool.planning.machine import Run
from kvtool.planning.parameters import Bits
from kvtool.planning.variants import Variant
from kvtool.policies.grammar import parse_policy
from kvtool.policies.policy import Policy
from kvtool.policies.scores.full import Full
from kvtool.sizes import DEFAULT_TOKENS, LONG_PROMPT, Budget

NEARLY = 0.98
"""Share of the prompt from which on policies differ by less than the noise.

By the package's table no policy that a plan offers loses more than 2.4 % of the answers there.
"""

READERS = ("quest", "rocketkv")
CODECS = ("int8", "fp8", "k8v4", "int4")

_BESIDE = ("int8", "k8v4", "int4")  # beside eviction: fp8 takes the bytes of int8
_PREFILLS: tuple[Prefill, ...] = ("block", "full")

Spell = Callable[[Policy, int | None, str], str]
"""Writes the command that runs a policy with a budget in tokens, and reads a prompt so."""


@dataclass(frozen=True)
class Room:
    """The memory that a run has, and what is run there.

    Attributes:
        config: a `PlainConfig` or a transformers configuration.
        dtype: of keys and values, by name.
        layers: what each layer stores.
        size: bytes for the cache; None: what the memory leaves.
        memory: bytes of the device; None: not asked for.
        weights: bytes of the weights by how they are stored, as for `Run`.
        bits: in which they are stored.
    """

    config: Any
    dtype: str
    layers: list[LayerShape | None]
    text: Text
    size: int | None = None
    memory: int | None = None
    weights: Mapping[Bits | None, int] = field(default_factory=dict)
    bits: Bits | None = None

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights; 0 where no memory is given."""
        return 0 if self.memory is None else self.weights[self.bits]

    def forecast(self, policy: Policy, tokens: int) -> Forecast:
        """Forecast what a policy holds and reads with a budget in every layer."""
        budgets = even_budgets(policy, tokens, self.layers, self.text)
        return forecast(policy, self.layers, budgets, self.text)

    def run(self, policy: Policy, tokens: int | None, prefill: str) -> Run:
        """Return a run with a budget in every layer.

        Args:
            tokens: None where the policy keeps everything.
            prefill: `full` or `block`.
        """
        budget = None if tokens is None or not policy.takes_budget else Budget(tokens=tokens)
        variant = Variant(policy, budget, prefill)
        return Run(self.config, self.dtype, variant, self.text, dict(self.weights), self.memory)

    def peak(self, policy: Policy, tokens: int | None, prefill: str) -> int:
        """Estimate the most that lives at a time, weights included."""
        return self.weights_bytes + self.run(policy, tokens, prefill).needs(self.bits).working

    def least_peak(self, policy: Policy, tokens: int | None) -> int:
        """Estimate the same for the way to read a prompt that takes less: in blocks a long one."""
        if self.text.prompt >= LONG_PROMPT:
            return self.peak(policy, tokens, "block")
        return min(self.peak(policy, tokens, prefill) for prefill in _PREFILLS)

    def most_tokens(self, policy: Policy) -> int | None:
        """Return the largest budget that fits, the prompt at most; None where none does.

        The whole prompt is asked about by itself: buffers that keep it grow while it is read in
        blocks, and take more than those of a token less.
        """
        found = self.text.prompt
        least = min(policy.min_budget, found)
        limits: list[tuple[Callable[[int], int], int | None]] = [
            (lambda tokens: self.forecast(policy, tokens).storage, self.size),
            (lambda tokens: self.least_peak(policy, tokens), self.memory),
        ]
        for cost, limit in limits:
            if limit is None or cost(found) <= limit:
                continue
            within = largest_within(cost, limit, least, found - 1) if least < found else None
            if within is None:
                return None
            found = within
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

    def budget(self, policy: Policy) -> int | None:
        """Return the largest budget with which a policy fits; None where none does.

        That of a policy that stores everything is what a step reads, and the default.
        """
        if policy.stores_all or not policy.takes_budget:
            prompt = self.text.prompt
            tokens = min(DEFAULT_TOKENS, prompt) if policy.takes_budget else prompt
            fits = self.memory is None or self.least_peak(policy, tokens) <= self.memory
            return tokens if fits else None
        return self.most_pairs(policy) if policy.two_stages else self.most_tokens(policy)


def list_ways(room: Room, losses: Losses, spell: Spell) -> list[Way]:
    """Return what fits in the order of the expected loss, and behind it what does not fit.

    The loss of a way is the larger one of a question that is known and one that is asked later.
    Losses whose difference is within the noise count as equal: then what keeps more tokens comes
    first, then what keeps them in more bits. Of the ways that fit and keep nearly all tokens in the
    same bits, only the best is listed, and none where all fit in these bits. Where keys have
    biases, keys in 4 bits come last: of their step, or of all if another model was measured.
    """
    maker = _Maker(room, losses, spell)
    return sorted(_once(list(_ways(maker))), key=maker.order)


def _once(ways: Sequence[Way]) -> list[Way]:
    """Leave out evictions of nearly nothing, but for the first in bits that do not fit all."""
    taken = {(way.key_bits, way.value_bits) for way in ways if way.fits and way.kind == "bits"}
    kept = []
    for way in ways:
        bits = way.key_bits, way.value_bits
        nearly = way.fits and "eviction" in way.kind and way.share >= NEARLY
        if not (nearly and bits in taken):
            kept.append(way)
        if nearly:
            taken.add(bits)
    return kept


def _ways(maker: _Maker) -> Iterator[Way]:
    whole = [maker.whole(codec) for codec in (None, *CODECS)]
    yield from filter(None, whole)
    for base in sorted(maker.losses.offered, key=maker.lost_near_all):
        ways = [maker.some(base, codec) for codec in (None, *_BESIDE)]
        plain, eight, *four = ways
        yield from filter(None, (plain, eight))
        yield from sorted(filter(None, four), key=maker.order)[:1]
    for reader in READERS:
        yield from filter(None, [maker.sparse(reader)])


@dataclass(frozen=True)
class _Maker:
    """Makes the ways of one place."""

    room: Room
    losses: Losses
    spell: Spell

    def order(self, way: Way) -> tuple[bool, bool, int, bool, float, int, int]:
        """Return what sorts ways."""
        config = self.room.config
        coarse = way.key_bits < 8 and has_key_biases(config)
        unknown = coarse and self.losses.model != config_hash(config)
        noise, bits = int(way.loss.worse / NOISE), way.key_bits + way.value_bits
        return not way.fits, unknown, noise, coarse, -way.share, KINDS.index(way.kind), -bits

    def lost_near_all(self, base: str) -> float:
        """Return what a policy loses where it keeps nearly everything."""
        loss = self.losses.at(base, NEARLY)
        return 1.0 if loss is None else loss.worse

    def whole(self, codec: str | None) -> Way | None:
        """Return the way that keeps all tokens in the bits of a codec."""
        policy, loss = self._policy("full", codec), self.losses.of_codec(codec)
        if policy is None or loss is None:
            return None
        return self._way(policy, "bits", None, self.room.text.prompt, loss)

    def some(self, base: str, codec: str | None) -> Way | None:
        """Return the way that keeps as many tokens as fit; None where all do."""
        policy, beside = self._policy(base, codec), self.losses.of_codec(codec)
        prompt = self.room.text.prompt
        if policy is None or beside is None or policy.budget_is_traffic:
            return None
        most = self.room.most_tokens(policy)
        tokens = policy.min_budget if most is None else most
        loss = self.losses.at(base, tokens / prompt)
        if loss is None or tokens >= prompt:
            return None
        kind: WayKind = "eviction" if policy.codec is None else "bits and eviction"
        return self._way(policy, kind, tokens, tokens, loss.plus(beside))

    def sparse(self, reader: str) -> Way | None:
        """Return the way that reads part of what it holds."""
        policy, prompt = parse_policy(reader), self.room.text.prompt
        if policy.stores_all:
            share = self.losses.least_share(reader)
            pairs = None if share is None else ceil(share * prompt)
        else:
            pairs = self.room.most_pairs(policy)
        loss = None if pairs is None else self.losses.at(reader, pairs / prompt)
        if pairs is None or loss is None or pairs >= prompt:
            return None
        kept = even_budgets(policy, pairs, self.room.layers, self.room.text)[0].tokens
        return self._way(policy, "reading", pairs, min(kept, prompt), loss)

    def _policy(self, base: str, codec: str | None) -> Policy | None:
        """Return a policy with a codec; None where the two, or the model, do not go together."""
        try:
            policy = parse_policy(base if codec is None else f"{base}+{codec}", imports=False)
            check_dims(policy, self.room.layers)
        except UsageError:
            return None
        return policy

    def _way(self, policy: Policy, kind: WayKind, budget: int | None, kept: int, loss: Loss) -> Way:
        room, prompt = self.room, self.room.text.prompt
        found = room.forecast(policy, prompt if budget is None else budget)
        peaks = {prefill: room.peak(policy, budget, prefill) for prefill in _PREFILLS}
        long = prompt >= LONG_PROMPT
        prefill = "block" if long else min(_PREFILLS, key=lambda each: peaks[each])
        needed = found.storage
        if policy.repetition is not None:  # holds all until its cut
            needed = room.forecast(replace(policy, score=Full()), prompt).storage
        excess = 0 if room.size is None else needed - room.size
        if room.memory is not None:
            excess = max(excess, peaks[prefill] - room.memory)
        key_bits, value_bits = _bits(policy, room.layers)
        return Way(
            policy=str(policy),
            kind=kind,
            tokens=kept,
            share=kept / prompt,
            key_bits=key_bits,
            value_bits=value_bits,
            reads=budget if kind == "reading" else None,
            bytes=found.storage,
            share_of_full=found.storage / found.full_storage,
            traffic=found.traffic,
            peak=Peaks(**peaks),
            prefill=prefill,
            loss=WayLoss(known=loss.known, later=loss.later),
            fits=excess <= 0,
            excess=max(0, excess),
            command=self.spell(policy, budget, prefill),
        )


def _bits(policy: Policy, layers: list[LayerShape | None]) -> tuple[int, int]:
    """Return the bits of a channel of keys and of values."""
    if policy.codec is None:
        itemsize = next(layer.itemsize for layer in layers if layer is not None)
        return 8 * itemsize, 8 * itemsize
    keys, values = policy.codec.sides()
    return keys.code_bits, values.code_bits


def largest_within(cost: Callable[[int], int], limit: int, least: int, most: int) -> int | None:
    """Return the largest number whose cost is within a limit; None: not even the least.

    Costs that grow steadily take few calls: the next number is where a line would meet the limit.

    Args:
        cost: grows with the number.
    """
    high = cost(most)
    if high <= limit:
        return most
    low = cost(least)
    if low > limit:
        return None
    while most - least > 1:
        middle = least + (limit - low) * (most - least) // max(1, high - low)
        middle = min(max(middle, least + 1), most - 1)
        for each in (middle, middle + 1, (least + most) // 2):
            if least < each < most:
                value = cost(each)
                if value <= limit:
                    least, low = each, value
                else:
                    most, high = each, value
    return least
