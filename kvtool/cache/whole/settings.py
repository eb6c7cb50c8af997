"""Facts of a cache: its text, its model and the forward or prompt that is running over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.steps.call import Placement, Unstored
from kvtool.documents.messages import ChatHistory
from kvtool.documents.plan import PlanDocument
from kvtool.errors import KvtoolError
from kvtool.maths.rotation import Rotation
from kvtool.model_shape import LayerShape, layer_shapes
from kvtool.policies.evidence import QueryCentres
from kvtool.policies.numbers import ALL_HERE, KVHeads
from kvtool.policies.policy import Policy
from kvtool.sizes import Budget
from kvtool.transformers_versions import cache_argument, kv_sharing_layers


@dataclass(frozen=True)
class CacheSettings:
    """What a cache was made with.

    Attributes:
        config: of the text model.
        budget: None for policies that keep everything, and where none was given.
        block: tokens of a prompt that are read at once; None: all.
        kernel: what runs where weights are not asked for.
        plan: in place of a budget.
    """

    config: PreTrainedConfig
    policy: Policy
    budget: Budget | None
    block: int | None
    kernel: str
    plan: PlanDocument | None

    def __post_init__(self) -> None:
        _ = self.kv_sharing, self.renumbers  # now: torch.compile cannot trace a first time

    @cached_property
    def kv_sharing(self) -> frozenset[int]:
        """The layers whose keys and values later ones read."""
        return frozenset(kv_sharing_layers(self.config))

    @cached_property
    def shapes(self) -> list[LayerShape | None]:
        """What each layer stores, in all processes together."""
        return layer_shapes(self.config)

    @cached_property
    def renumbers(self) -> bool:
        """Whether keys are rotated by their places in the cache."""
        return self.policy.score.positions == "cache"

    def __deepcopy__(self, memo: dict) -> CacheSettings:
        return self  # never changed


def _nobody() -> None:
    return None


@dataclass(frozen=True)
class ModelLink:
    """The model that a cache was built for, and what its policy has asked of it.

    Attributes:
        model: returns it, None once it is gone.
        shards: how its heads are split over processes.
        head_ranks: (attention layers, kv_heads) integers, 0 for the head that most needs the whole
            text; None where heads are not ranked.
        rope: how its RoPE depends on the length of the text; None: it does not.
        hooks: show what enters its attention, as long as a cache holds them; None: not asked for.
        rotations: of keys and queries, by layer.
        centres: of queries, from a file, by layer.
        projections: return the weight of the output projection, (hidden_size, heads * value_dim),
            by layer.
    """

    model: Callable[[], PreTrainedModel | None] = _nobody
    shards: KVHeads = ALL_HERE
    head_ranks: Tensor | None = None
    rope: LengthRope | None = None
    hooks: object = None
    rotations: Mapping[int, Rotation | None] = field(default_factory=dict)
    centres: Mapping[int, QueryCentres] = field(default_factory=dict)
    projections: Mapping[int, Callable[[], Tensor]] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict) -> ModelLink:
        return self  # never changed


@dataclass(frozen=True)
class Text:
    """The text so far, where kvtool drove it or loaded it.

    Attributes:
        input_ids: (batch, n) all tokens; None where they are unknown.
        next_logits: (batch, vocab) after the last one, where all of them have been fed.
        chat: what it ends with, where it is a conversation in the words of a chat template.
        history: the messages of this conversation, where they are known.
        plain: whether plain forwards have fed any of it: what is padding among its tokens, and on
            which side, only their caller knows.
    """

    input_ids: Tensor | None = None
    next_logits: Tensor | None = None
    chat: Literal["open", "answer"] | None = None
    history: ChatHistory | None = None
    plain: bool = False


class FedTokens:
    """Ids of forwards that are not noted as text yet; joined on request.

    Attributes:
        start: tokens of the text that were noted before; None: it is not known what came before.
        parts: for each forward, how many tokens the cache had seen after it, and its own ids.
    """

    def __init__(self, start: int | None = 0) -> None:
        self.start = start
        self.parts: list[tuple[int, Tensor]] = []

    def pack(self) -> None:
        """Join the parts, so that what is held does not grow by a tensor a token."""
        end, ids = self._joined()
        self.parts[:] = [] if ids is None else [(end, ids)]

    def _joined(self) -> tuple[int, Tensor | None]:
        """How far the text is known, and the ids behind what was noted before, if there are any."""
        end = 0 if self.start is None else self.start
        ids: list[Tensor] = []
        for seen, part in self.parts if self.start is not None else []:
            if seen - part.shape[1] != end or (ids and len(part) != len(ids[0])):
                break
            ids.append(part)
            end = seen
        return end, torch.cat(ids, 1) if ids else None

    def behind(self, text: Tensor | None) -> tuple[int | None, Tensor | None]:
        """Return how much of the text is known, and it, (batch, n) on the host: a sync."""
        end, ids = self._joined()
        if ids is None:
            return self.start, text
        ids = ids.cpu()
        if not self.start:
            return end, ids
        if text is None or len(text) != len(ids):
            return None, None
        return end, torch.cat([text[:, : self.start].cpu(), ids], 1)


class ForwardState:
    """The running forward.

    Attributes:
        masked: whether batch entries may have padding in it, as its mask would say.
        own_mask: whether its mask says of each query, or anew, which tokens it sees.
        in_generate: whether a `generate` runs it, which adds a token a forward to its text.
        fed: ids of forwards since the text was noted.
        placement: where it has placed its tokens; None: by their place in the text.
        hidden: (batch, q_len, hidden_size), what enters the attention of the running layer; None:
            not asked for.
        unstored: who attends its tokens, which are not stored; None: they are.
        logits_asked: its `logits_to_keep`.
        in_prompt: whether it is a part of a prompt that was announced.
        prompt_lengths: tokens that each batch entry will have seen at the end of that prompt.
        last_block: whether it ends its prompt.
        rounds: whether tokens of a block see each other as they are stored, as decoded ones do.
        piece: tokens of that prompt that are read at a time, of what is cut at its end; None: all.
        rope: for which lengths of the text the factors of a RoPE were chosen.
    """

    def __init__(self) -> None:
        self.masked, self.own_mask, self.in_generate, self.rounds = True, False, False, False
        self.fed = FedTokens()
        self.rope = RopeChoice()
        self.placement: Placement | None = None
        self.hidden: Tensor | None = None
        self.unstored: Unstored | None = None
        self.logits_asked: int | Tensor = 0
        self.prompt_lengths: list[int] | None = None
        self.piece: int | None = None
        self.leave_prompt()

    def enter_prompt(self, lengths: list[int] | None) -> None:
        """Take the forwards that follow as blocks of a prompt."""
        self.in_prompt, self.prompt_lengths = True, lengths

    def leave_prompt(self) -> None:
        """Take the forwards that follow as prompts of their own, or as decoded tokens."""
        self.in_prompt, self.last_block = False, True
        self.prompt_lengths = self.piece = None

    def read_in_pieces(self, piece: int) -> None:
        """Read the prompt in pieces, and cut it at its end as if it had come at once."""
        self.piece = piece

    @property
    def goes_on(self) -> bool:
        """Whether it reads a piece of a prompt that is cut later."""
        return self.piece is not None and not self.last_block

    def note_text(self, tokens: int | None) -> None:
        """Say how many tokens of the text have been noted; None: it is not known."""
        self.fed = FedTokens(tokens)

    def say_last(self, last: bool) -> None:
        """Say whether the next forward ends its prompt."""
        self.last_block = last

    def check_placed(self, layer: SlotLayer) -> None:
        """Refuse a forward that has placed no tokens, over a layer that places them anew."""
        placed = self.placement
        if placed is None or (layer.seen_device is None and placed.seen != layer.seen):
            raise KvtoolError(
                f"`{layer.policy}` numbers tokens by their place in the cache, "
                "and this forward has not asked for it",
                hint="call kvtool.attach(model) first, "
                f"and pass the cache as {cache_argument()}=cache",
            )

    def begin(self, *, masked: bool, own_mask: bool) -> None:
        """Take note of a forward that begins."""
        self.masked, self.own_mask = masked, own_mask

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Say that `generate` runs the forwards inside, and notes its text at its end."""
        self.in_generate = True
        try:
            yield
        finally:
            self.in_generate = False

    @contextmanager
    def rounding(self) -> Iterator[None]:
        """Round the tokens of blocks inside before they are attended."""
        self.rounds = True
        try:
            yield
        finally:
            self.rounds = False

    def note_rope(self, rope: RopeChoice) -> None:
        """Note for which lengths of the text the factors of a RoPE were chosen."""
        self.rope = rope

    def place(self, placement: Placement | None) -> None:
        """Say where the running forward has placed its tokens."""
        self.placement = placement

    def show_hidden(self, hidden: Tensor | None) -> None:
        """Note what enters the attention of the layer that runs now."""
        self.hidden = None if hidden is None else hidden.detach()

    def store_nothing(self, attends: Unstored | None) -> None:
        """Say who attends the forwards that follow and are not stored; None: they are."""
        self.unstored = attends

    def ask_logits(self, wanted: int | Tensor) -> None:
        """Note which logits the caller has asked for."""
        self.logits_asked = wanted

    def answer_logits(self) -> int | Tensor:
        """Return which logits the caller has asked for, once."""
        wanted, self.logits_asked = self.logits_asked, 0
        return wanted


@dataclass(frozen=True)
class LengthRope:
    """How the factors of a model's RoPE depend on the length of the text.

    Attributes:
        thresholds: ascending; up to each of these lengths the same factors hold.
        grows: whether every length above the last threshold has factors of its own; else all of
            them share one set.
    """

    thresholds: tuple[int, ...]
    grows: bool

    def factors_for(self, length: int) -> int:
        """Return one length for all lengths with the factors of this one."""
        for threshold in self.thresholds:
            if length <= threshold:
                return threshold
        return length if self.grows else self.thresholds[-1] + 1

    def serve(self, factors: int, length: int) -> bool:
        """Return whether the factors of one length can read a text that has come to another."""
        longest = self.longest(factors)
        return longest is None or length <= longest

    def longest(self, factors: int) -> int | None:
        """Return the longest text that the factors of one length serve; None: any."""
        return factors if self.grows or factors in self.thresholds else None


@dataclass(frozen=True)
class RopeChoice:
    """What a cache knows of its factors.

    Attributes:
        chosen: for which lengths they were chosen; None: they have not been, or do not depend on
            the length.
        expected: tokens that the whole text will have at least, as far as is known.
        serves: tokens, with padding, up to which they are known to serve all batch entries.
    """

    chosen: RopeLengths | None = None
    expected: int = 0
    serves: int = 0


@dataclass(frozen=True)
class RopeLengths:
    """The lengths for which the factors of a cache were chosen.

    Attributes:
        lengths: one for each batch entry, or one for all, by `LengthRope.factors_for`.
    """

    lengths: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int]) -> RopeLengths:
        """Note one length for each batch entry, or a single one where all are equal."""
        return cls(tuple(lengths[:1] if len(set(lengths)) == 1 else lengths))

    def of_entries(self, batch: int) -> list[int]:
        """Return the length of each batch entry."""
        return list(self.lengths) * batch if len(self.lengths) == 1 else list(self.lengths)

    def reindexed(self, change: Callable[[Tensor], Tensor]) -> RopeLengths:
        """Follow the batch entries that transformers reorders, repeats or selects."""
        if len(self.lengths) == 1:
            return self
        return RopeLengths.of(change(torch.tensor(self.lengths)).tolist())
