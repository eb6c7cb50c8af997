"""Estimate what a cache will hold, policy state included, and what its last token will read.

The one place that estimates bytes of a cache. Everything follows from the parts of a policy: the
names of the numbers beside its slots, when it cuts, what it remembers of evicted tokens, and its
reader. The reader itself is asked for its tables, on tensors without content. The rule by which a
layer's buffers grow gives the rest. A token takes in a slot its key and value as they are stored,
its position and its numbers. "Held" is what a report calls `allocated_bytes` + `state_bytes`, at
its most from the end of the prompt to the last new token. Host memory and what exists only while
the prompt is read are not in it.

A buffer that is appended to grows by a quarter each time, so that appending copies O(1) per token.
A cache allocates by that rule, and a forecast counts by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import TYPE_CHECKING

from kvtool.model_shape import LayerShape
from kvtool.policies.codec.codec import RANGE_BYTES
from kvtool.policies.read.dry import step_bytes, table_bytes

if TYPE_CHECKING:
    from kvtool.policies.codec.codec import Codec
    from kvtool.policies.parts import Read
    from kvtool.policies.policy import Policy


NUMBER = 4
"""Bytes of a position, and of a number of a policy beside a slot."""

STEP = 16
"""Slots that a buffer grows by beyond its quarter."""


def grown(capacity: int, slots: int) -> int:
    """Count the slots of a full buffer once it has taken in enough to hold `slots`.

    >>> grown(0, 100), grown(100, 101), grown(100, 400)
    (100, 141, 400)
    """
    return max(slots, capacity + capacity // 4 + STEP) if capacity else slots


def stored_bytes(layer: LayerShape, codec: Codec | None) -> int:
    """Count the bytes of the key and value of one token in a slot of one KV head.

    Args:
        codec: how they are written down; None: in the model's dtype.
    """
    if codec is None:
        return layer.token_bytes
    of_keys, of_values = codec.sides()
    return of_keys.vector_bytes(layer.key_dim) + of_values.vector_bytes(layer.value_dim)


def range_bytes(layer: LayerShape, codec: Codec | None) -> int:
    """Count the bytes beside the slots of a layer that say where the channels of its keys lie."""
    if codec is None:
        return 0
    return layer.kv_heads * layer.key_dim * RANGE_BYTES


def slot_bytes(layer: LayerShape, numbers: int, codec: Codec | None) -> int:
    """Count the bytes of a slot of one KV head: key, value, position and numbers beside."""
    return stored_bytes(layer, codec) + NUMBER * (1 + numbers)


def kv_bytes(
    layers: Sequence[LayerShape | None], tokens: Sequence[int], codec: Codec | None = None
) -> int:
    """Count the bytes of one sequence's keys and values, with a number of tokens for each layer."""
    sizes = of_layers(layers, lambda layer: layer.kv_heads * stored_bytes(layer, codec))
    return sum(map(mul, sizes, tokens))


def of_layers(layers: Sequence[LayerShape | None], count: Callable[[LayerShape], int]) -> list[int]:
    """Count something of each layer, once for all that are one object; 0 for None.

    The layers of a model are mostly one object, and the ways of a plan count often.
    """
    different = {id(layer): layer for layer in layers}
    known = {key: 0 if layer is None else count(layer) for key, layer in different.items()}
    return [known[id(layer)] for layer in layers]


def free_of(layers: Sequence[LayerShape | None]) -> list[LayerShape]:
    """Return the layers whose budget is free: with attention, and without a window."""
    return [layer for layer in layers if layer is not None and layer.window is None]


def check_dims(policy: Policy | None, layers: Sequence[LayerShape | None]) -> None:
    """Refuse a policy whose codec cannot store the keys or values of a layer.

    Raises:
        UsageError: the first such size.
    """
    if policy is None or policy.codec is None:
        return
    of_keys, of_values = policy.codec.sides()
    for layer in layers:
        if layer is not None:
            of_keys.check_dim(layer.key_dim)
            of_values.check_dim(layer.value_dim)


_INDEX = 8  # bytes of the index of a slot


@dataclass(frozen=True)
class Text:
    """What will be fed.

    Attributes:
        prompt: tokens of the longest prompt.
        new: tokens generated after it.
        sequences: prompts at a time.
        vocabulary: numbers of the model's logits, for policies that keep those.
        later: of the prompt, tokens of later turns and of the answers between; a policy that has
            its prompt repeated cuts none of them.
    """

    prompt: int
    new: int = 0
    sequences: int = 1
    vocabulary: int | None = None
    later: int = 0

    def cut_by(self, policy: Policy) -> Text:
        """Return the text with what a policy appends counted as new, not as prompt."""
        if policy.repetition is None:
            return replace(self, later=0)
        return replace(self, prompt=self.prompt - self.later, new=self.new + self.later)

    @property
    def full(self) -> int:
        """Tokens of the prompt and of the answer."""
        return self.prompt + self.new

    @property
    def last(self) -> int:
        """Tokens that the last decoded token reads of a full cache."""
        return self.prompt + max(self.new, 1)


@dataclass(frozen=True)
class Reading:
    """What a step looks at in a layer: pairs of key and value, and the reader with its sizes."""

    pairs: int
    reader: Read


@dataclass(frozen=True)
class LayerBudget:
    """The budget of a layer whose budget is free.

    Attributes:
        tokens: that it may hold (and then appends to or not, as the policy does it), or that are
            left of the prompt.
        reading: what a step looks at; None: all.
    """

    tokens: int
    reading: Reading | None = None


@dataclass(frozen=True)
class Forecast:
    """Bytes of all layers and sequences.

    Attributes:
        storage: held at most, from the end of the prompt on.
        traffic: read by the last token.
        full_storage, full_traffic: keys and values of a full cache in the model's dtype.
        keys_values: the part of the storage that is buffers of keys and values, or of their codes
            and scales; the rest is the policy's own: positions, numbers beside slots, tables.
    """

    storage: int
    traffic: int
    full_storage: int
    full_traffic: int
    keys_values: int


def tokens_held(
    layers: Sequence[LayerShape | None], n: int, budget: int | None = None
) -> list[int]:
    """Count the tokens that each layer holds of `n`.

    Args:
        budget: of the layers without a window; None: all.
    """
    free = n if budget is None else min(n, budget)
    windows = [None if layer is None else layer.window for layer in layers]
    kept = [free if window is None else min(n, window) for window in windows]
    return [0 if layer is None else count for layer, count in zip(layers, kept, strict=True)]


def forecast(
    policy: Policy | None,
    layers: Sequence[LayerShape | None],
    budgets: Sequence[LayerBudget],
    text: Text,
) -> Forecast:
    """Forecast what a cache holds and reads.

    Args:
        policy: None for one that holds its budget and keeps no numbers beside the positions.
        layers: of the model in order, None for one without attention.
        budgets: of those without a window, in order.
    """
    free = free_of(layers)
    counts = [(0, 0, 0, 0)]
    if free and policy is not None and policy.score.layer_tokens == "same":
        counts = [(_shared(policy, free[0], budgets[0], text), 0, 0, 0)]
    by_place = policy is not None and policy.head_split is not None
    known: dict[tuple[LayerShape, LayerBudget | None, int | None], tuple[int, int, int, int]] = {}
    last: tuple[LayerShape, LayerBudget | None, tuple[int, int, int, int]] | None = None
    place = 0
    for index, layer in enumerate(layers):
        if layer is None:
            continue
        budget = None if layer.window is not None else _budget_of(policy, budgets[place], index)
        if last is None or layer is not last[0] or budget is not last[1] or by_place:
            same = layer, budget, place if by_place else None
            if same not in known:  # a reader is tried out for each, which takes long
                known[same] = _of_layer(policy, layer, budget, text, (place, len(free)))
            last = layer, budget, known[same]
        counts.append(last[2])
        place += budget is not None
    storage, traffic, full_traffic, kv = map(sum, zip(*counts, strict=True))
    full, sequences = kv_bytes(layers, tokens_held(layers, text.full)), text.sequences
    found = (storage, traffic, full, full_traffic, kv)
    return Forecast(*(count * sequences for count in found))


def _of_layer(
    policy: Policy | None,
    layer: LayerShape,
    budget: LayerBudget | None,
    text: Text,
    place: tuple[int, int],
) -> tuple[int, int, int, int]:
    """Count what one sequence holds and reads in a layer, what it reads in full, and its pairs."""
    codec = None if policy is None else policy.codec
    if budget is not None:
        slots, beside, read = _free(policy, layer, budget, text, place)
        numbers = 0 if policy is None else len(policy.statistics)
        full = text.last * layer.bytes
    else:
        window = layer.window or 0
        slots, beside = _slots(window, text) * layer.kv_heads, 0
        numbers = _rotated(policy)
        pairs = min(window + 1, text.last)
        read = pairs * layer.kv_heads * stored_bytes(layer, codec)
        full = pairs * layer.bytes
    held = slots * slot_bytes(layer, numbers, codec) + range_bytes(layer, codec) + beside
    return held, read, full, slots * stored_bytes(layer, codec)


def _budget_of(policy: Policy | None, budget: LayerBudget, index: int) -> LayerBudget:
    """Return a layer's budget, without a reading where its reader leaves the layer out."""
    skips = policy is not None and policy.reader is not None and index < policy.reader.skip_layers
    return replace(budget, reading=None) if skips else budget


def _free(
    policy: Policy | None,
    layer: LayerShape,
    budget: LayerBudget,
    text: Text,
    place: tuple[int, int],
) -> tuple[int, int, int]:
    """Count the slots of one sequence in a layer of free budget, and bytes beside and read."""
    if policy is None:
        slots = _slots(budget.tokens, text) * layer.kv_heads
        return slots, 0, min(budget.tokens + 1, text.last) * layer.bytes
    heads = [budget.tokens] * layer.kv_heads
    if policy.head_split is not None and text.prompt > budget.tokens:
        heads = policy.head_split.forecast(budget.tokens, text.prompt, layer.kv_heads, place)
    slots = sum(_held(policy, tokens, text) for tokens in heads)
    beside = 0 if policy.moments is None else policy.moments.held_bytes(layer)
    if policy.on_evict is not None:
        one_by_one = policy.when == "always" and policy.cuts is None
        evicts = one_by_one and text.new > 0 and text.full > budget.tokens
        beside += policy.on_evict.held_bytes(layer, evicts)
    if policy.newest_queries:
        beside += policy.newest_queries * (layer.heads * layer.key_dim * layer.itemsize + _INDEX)
    if budget.reading is None:
        read = sum(min(_read(policy, tokens, text), text.last) for tokens in heads)
        return slots, beside, read * stored_bytes(layer, policy.codec)
    if policy.select_only and budget.tokens < text.prompt:
        beside += budget.tokens * layer.kv_heads * NUMBER  # positions of what is chosen from
        beside += (budget.tokens + text.new) * layer.kv_heads * _INDEX
    tables, read = _reading(layer, budget.tokens, budget.reading, text)
    return slots, beside + tables, read


def _rotated(policy: Policy | None) -> int:
    return 0 if policy is None else int(policy.score.positions == "cache")


def _slots(budget: int, text: Text, spare: int = 1) -> int:
    """Return the slots of a head that holds its budget: `spare` more take in new tokens."""
    return budget + spare if text.prompt >= budget else min(text.full, budget + spare)


def _held(policy: Policy, tokens: int, text: Text) -> int:
    """Return the slots of a head when all has been fed."""
    if policy.when == "always":
        return _slots(tokens, text, policy.spare)
    stored = text.prompt if policy.when == "never" or policy.select_only else tokens
    return min(stored, text.prompt) + text.new


def _read(policy: Policy, tokens: int, text: Text) -> int:
    """Return the tokens of a head that the last decoded token reads, where it reads all."""
    if policy.cuts is not None:
        more = min(text.prompt, tokens) + max(text.new, 1) - tokens
        over = more if more <= policy.spare else (more - 1) % policy.spare + 1
        return tokens + over  # cut back to the budget each time that it has read the spare ones
    if policy.when == "always":
        return tokens + (policy.score.layer_tokens != "same")  # a slot more takes in the token
    stored = text.prompt if policy.when == "never" else tokens
    return min(stored, text.prompt) + max(text.new, 1)


def _shared(policy: Policy, layer: LayerShape, budget: LayerBudget, text: Text) -> int:
    """Return the numbers of a sequence that all layers share: surprisals, and the last logits."""
    slots = _held(policy, budget.tokens, text)
    return slots * NUMBER + (text.vocabulary or 0) * layer.itemsize


def _reading(layer: LayerShape, tokens: int, reading: Reading, text: Text) -> tuple[int, int]:
    """Return the bytes of a reader's tables, and what its step reads."""
    stored, reader = min(tokens, text.prompt), reading.reader
    last, end = stored + max(text.new, 1), stored + text.new
    tables = table_bytes(reader, layer, end) if end > reading.pairs else 0
    if last <= reading.pairs:
        return tables, last * layer.bytes
    return tables, step_bytes(reader, layer, last)
