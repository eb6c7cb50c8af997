"""List the ways to run a model in a given memory, in the order of the answers that they cost.

A way is everything in fewer bits, some tokens in fewer bits, some tokens, or everything read
sparsely. Its bytes are those that a run holds, its peak is estimated as for a dry run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from kvtool.documents.plan import KINDS, Peaks, Prefill, Way, WayKind, WayLoss
from kvtool.errors import UsageError
from kvtool.identity import config_hash
from kvtool.model_shape import LayerShape, has_key_biases, stores_latents
from kvtool.planning.budgets import even_budgets
from kvtool.planning.bytes import check_dims
from kvtool.planning.fit import PREFILLS, Run
from kvtool.planning.lost_answers import NOISE, Loss, Losses
from kvtool.policies.grammar import parse_policy
from kvtool.policies.policy import Policy
from kvtool.sizes import Budget, parse_prefill

NEARLY = 0.98
"""Share of the prompt from which on policies differ by less than the noise.

By the package's table no policy that a plan offers loses more than 2.4 % of the answers there.
"""

READERS = ("quest", "rocketkv")
CODECS = ("int8", "fp8", "k8v4", "int4")

_BESIDE = ("int8", "k8v4", "int4")  # beside eviction: fp8 takes the bytes of int8
_SMALLER = (512, 256)  # tokens of blocks, of which `kvzip` scores no fewer alone

Asked = Literal["known", "later", "worse"]
"""When the question comes: in the prompt, after its compression, or whichever loses more."""

Spell = Callable[[Policy, int | None, str], str]
"""Writes the command that runs a policy with a budget in tokens, and reads a prompt so."""


def list_ways(run: Run, losses: Losses, spell: Spell, asked: Asked = "worse") -> list[Way]:
    """Return what fits in the order of the expected loss, and behind it what does not fit.

    The loss of a way is that of a question that is known or one that is asked later, as `asked`
    says, or the larger one.
    Losses whose difference is within the noise count as equal: then what keeps more tokens comes
    first, then what keeps them in more bits. Of the ways that fit and keep nearly all tokens in the
    same bits, only the best is listed, and none where all fit in these bits. Where keys have
    biases, keys in 4 bits come last: of their step, or of all if another model was measured.
    """
    maker = _Maker(run, losses, spell, asked)
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


def _fitted(make: Callable[..., Way | None], maker: _Maker, *given: str | None) -> Way | None:
    """Make a way, in smaller blocks where it does not fit in the usual ones, and they are ours."""
    way, run = make(maker, *given), maker.run
    if way is None or way.fits or run.prefill not in (None, "block"):
        return way
    usual = parse_prefill(run.spell(policy_of(way)[0], "block")) or 0
    smaller = (replace(run, block=block) for block in _SMALLER if block < usual)
    others = (make(replace(maker, run=each), *given) for each in smaller)
    return next((each for each in others if each is not None and each.fits), way)


def _ways(maker: _Maker) -> Iterator[Way]:
    whole = [_fitted(_Maker.whole, maker, codec) for codec in (None, *CODECS)]
    yield from filter(None, whole)
    for base in sorted(maker.losses.offered, key=maker.lost_near_all):
        ways = [_fitted(_Maker.some, maker, base, codec) for codec in (None, *_BESIDE)]
        plain, eight, *four = ways
        yield from filter(None, (plain, eight))
        yield from sorted(filter(None, four), key=maker.order)[:1]
    for reader in READERS:
        yield from filter(None, [_fitted(_Maker.sparse, maker, reader)])


@dataclass(frozen=True)
class _Maker:
    """Makes the ways of one place."""

    run: Run
    losses: Losses
    spell: Spell
    asked: Asked = "worse"

    def order(self, way: Way) -> tuple[bool, bool, int, bool, float, int, int]:
        """Return what sorts ways."""
        config = self.run.config
        coarse = way.key_bits < 8 and has_key_biases(config)
        unknown = coarse and self.losses.model != config_hash(config)
        noise, bits = int(way.loss.of(self.asked) / NOISE), way.key_bits + way.value_bits
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
        return self._way(policy, "bits", None, self.run.text.prompt, loss)

    def some(self, base: str, codec: str | None) -> Way | None:
        """Return the way that keeps as many tokens as fit; None where all do."""
        policy, beside = self._policy(base, codec), self.losses.of_codec(codec)
        prompt = self.run.text.prompt
        if policy is None or beside is None or policy.budget_is_traffic:
            return None
        most = self.run.most_tokens(policy)
        tokens = policy.min_budget if most is None else most
        loss = self.losses.at(base, tokens / prompt)
        if loss is None or tokens >= prompt:
            return None
        kind: WayKind = "eviction" if policy.codec is None else "bits and eviction"
        return self._way(policy, kind, tokens, tokens, loss.plus(beside))

    def sparse(self, reader: str) -> Way | None:
        """Return the way that reads part of what it holds."""
        policy, prompt = parse_policy(reader), self.run.text.prompt
        if policy.stores_all:
            share = self.losses.least_share(reader)
            pairs = None if share is None else ceil(share * prompt)
        else:
            pairs = self.run.most_pairs(policy)
        loss = None if pairs is None else self.losses.at(reader, pairs / prompt)
        if pairs is None or loss is None or not policy.min_budget <= pairs < prompt:
            return None
        kept = even_budgets(policy, pairs, self.run.layers, self.run.text)[0].tokens
        return self._way(policy, "reading", pairs, min(kept, prompt), loss)

    def _policy(self, base: str, codec: str | None) -> Policy | None:
        """Return a policy with a codec; None where the two, or the model, do not go together."""
        try:
            policy = parse_policy(base if codec is None else f"{base}+{codec}", imports=False)
            check_dims(policy, self.run.layers)
        except UsageError:
            return None
        return None if policy.moments is not None and stores_latents(self.run.config) else policy

    def _way(self, policy: Policy, kind: WayKind, budget: int | None, kept: int, loss: Loss) -> Way:
        run, prompt = self.run, self.run.text.prompt
        found = run.forecast(policy, prompt if budget is None else budget)
        read = run.best_prefill(policy, budget)
        prefill: Prefill = "full" if read == "full" else "block"
        peaks = {each: run.peak(policy, budget, each) for each in PREFILLS}
        peaks[prefill] = run.peak(policy, budget, read)
        needed = found.storage if budget is None else run.held(policy, budget)
        excess = 0 if run.size is None else needed - run.size
        if run.memory is not None:
            excess = max(excess, peaks[prefill] - run.memory)
        key_bits, value_bits = _bits(policy, run.layers)
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
            block=run.block if prefill == "block" else None,
            loss=WayLoss(known=loss.known, later=loss.later),
            fits=excess <= 0,
            excess=max(0, excess),
            command=self.spell(policy, budget, run.spell(policy, read) if run.block else prefill),
        )


def policy_of(way: Way) -> tuple[Policy, Budget | None]:
    """Return the policy of a way, and its budget; None: it keeps everything."""
    policy = parse_policy(way.policy, imports=False)
    tokens = way.reads or way.tokens
    return policy, Budget(tokens=tokens) if policy.takes_budget else None


def _bits(policy: Policy, layers: list[LayerShape | None]) -> tuple[int, int]:
    """Return the bits of a channel of keys and of values."""
    if policy.codec is None:
        itemsize = next(layer.itemsize for layer in layers if layer is not None)
        return 8 * itemsize, 8 * itemsize
    keys, values = policy.codec.sides()
    return keys.code_bits, values.code_bits
