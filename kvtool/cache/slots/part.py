"""The part of a feature: what it keeps beside the slots of a layer, and does in the layer's steps.

Reset, beams, files, bytes and going back are loops over a layer's parts, and a step calls the hooks
that a part defines. What a layer does in one way alone, a part does in its place: `AttendsTokens`,
`CutsByHead` and `CutsLater`. So a new feature is one class in `kvtool.cache.features`, and one line
in the table there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kvtool.maths.rotation import Rotation
from kvtool.policies.evicted.eviction import Eviction
from kvtool.policies.evidence import QueryCentres
from kvtool.policies.numbers import Count
from kvtool.policies.policy import Policy

if TYPE_CHECKING:
    from typing_extensions import Self


Correction = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""What becomes of an output. It takes some queries of a block, from a row on, or of a decoded
token, (batch, heads, rows, head_dim); their output over the slots, (batch, heads, rows, value_dim),
and its log-sum-exp, (batch, kv_heads, group, rows) float32; and the first row."""


@dataclass(frozen=True)
class LayerSite:
    """A layer that is being made, as features look at it.

    Attributes:
        policy: of the layer.
        index: of the layer in the model.
        rotation: by which the layer rotates keys and queries, where the policy asks; None: by none.
        projection: returns the weight of the attention's output projection, (hidden_size, heads *
            value_dim), where the policy asks; None: it does not, or no model is known.
        above: the layers of free budget before this one.
        centres: of the layer's queries, from a file; None: the prompt's own.
    """

    policy: Policy
    index: int
    rotation: Rotation | None = None
    projection: Callable[[], Tensor] | None = None
    above: Sequence[Any] = ()
    centres: QueryCentres | None = None


@dataclass(frozen=True)
class Lanes:
    """Some KV heads of some batch entries, which a layer holds apart from the others.

    Attributes:
        entries, heads: (lanes,) int64, the batch entry and the KV head of each.
        kv_heads: of a batch entry.
    """

    entries: Tensor
    heads: Tensor
    kv_heads: int

    def of_query_heads(self, numbers: Tensor) -> Tensor:
        """Pick what belongs to their query heads: (batch, heads, ..) to (lanes, group, ..)."""
        return numbers.unflatten(1, (self.kv_heads, -1))[self.entries, self.heads]


HOOKS = (
    "place",
    "correct",
    "take_block",
    "end_block",
    "note_token",
    "stationary",
    "allows_static",
    "show",
    "note_scores",
    "take_evicted",
    "take_decoded",
    "slot_left",
    "slots_left",
)
"""The methods of `Part` that a step runs, where a part defines them."""


class Part:
    """What one feature keeps beside the slots; empty until the feature has something to keep.

    In the hooks, `layer` is a `SlotLayer`, `call` a `kvtool.cache.steps.call.Call`, `block` a
    `kvtool.cache.steps.block.Block`, and `view` a `kvtool.policies.parts.SlotView`. A step runs
    only the hooks that a part defines; see `Parts`.

    Attributes:
        name: by which a layer knows it.
        joins_decode: whether it has a say while a decoded token is written and attended.
        joins_padded: whether layers that have it may evict together while a batch is padded.
        refusals: what it does not work with, and why; see `refusal`.
        hooks: those that it defines.
    """

    name: ClassVar[str]
    joins_decode: ClassVar[bool] = True
    joins_padded: ClassVar[bool] = True
    refusals: Mapping[str, str] = {}
    hooks: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        own = (hook for hook in HOOKS if getattr(cls, hook) is not getattr(Part, hook))
        cls.hooks = tuple(own)

    @classmethod
    def of(cls, layer: Any) -> Self | None:
        """Return the part of this kind that a layer has, None if it has none."""
        part: object = layer.parts.get(cls.name)
        return part if isinstance(part, cls) else None

    @classmethod
    def make(cls, site: LayerSite) -> Part | None:
        """Make the part of a layer; None where its policy does not have the feature."""
        return None

    # ---- what it keeps

    def begin(self, batch: int, kv_heads: int, device: torch.device) -> None:
        """Prepare for the first tokens."""

    def clear(self) -> None:
        """Forget the text."""

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        """Let everything follow the batch entries, by what is done to a tensor of theirs."""

    def for_heads(self, lanes: Lanes) -> Part | None:
        """Make the part of a layer that holds some of this one's heads; None: it has none."""
        return None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return 0

    # ---- files

    def tensors(self) -> dict[str, Tensor]:
        """Return what a file holds of it, by its names in the file."""
        return {}

    def check(self, file: Any, prefix: str, shape: Any, dtype: torch.dtype) -> None:
        """Refuse what a file holds in place of it.

        Args:
            file: a `kvtool.cache.files.checks.FileTensors`, of which it takes its tensors.
            prefix: of the layer's names in the file, with a dot behind it.
            shape: of the layer in the model.
            dtype: of the model.
        """

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Take back what `tensors` gave, from all tensors of the layer."""

    # ---- blocks of a prompt, and decoded tokens

    def place(self, layer: Any, call: Any, block: Any) -> Any:
        """Return the call with keys and queries where they are to be attended.

        Args:
            block: None: a token is decoded.
        """
        return call

    def correct(self, layer: Any, call: Any, block: Any) -> Correction | None:
        """Prepare for what is about to be attended.

        Args:
            block: None: a token is decoded.

        Returns:
            What corrects the output then; None: nothing.
        """
        return None

    def take_block(self, layer: Any, call: Any, block: Any) -> Any:
        """Take note of a block that has been attended, and not been stored.

        Returns:
            The block as it is to be stored and cut; None: it has been stored whole, and the prompt
            goes on.
        """
        return block

    def end_block(self) -> None:
        """Note that a block has been stored, and cut if it was over the budget."""

    def note_token(self, layer: Any, call: Any) -> None:
        """Take note of the query of a decoded token, which has just been counted."""

    def stationary(self) -> list[Tensor]:
        """Return the tensors that a static step reads or writes, where they are."""
        return []

    def allows_static(self, layer: Any) -> bool:
        """Return whether steps may be static."""
        return True

    # ---- what policies see, and evicted tokens

    def show(self, layer: Any, view: Any) -> Any:
        """Return a view of slots with what the policy sees of the part."""
        return view

    def note_scores(self, importance: Tensor, positions: Tensor, protected: Tensor | None) -> None:
        """Take note of the scores by which slots are cut, (batch, kv_heads, slots)."""

    def take_evicted(self, layer: Any, view: Any, eviction: Eviction) -> None:
        """Make something of the tokens evicted from a block and the slots before it.

        Args:
            view: the slots that they are evicted from.
        """

    def take_decoded(self, layers: Sequence[Any], positions: Tensor) -> None:
        """Make something of the slot to reuse of each of some layers, before it is written over.

        Args:
            layers: that have a part of this kind; this one is that of the first.
            positions: (layers * batch, kv_heads, 1) of evicted tokens.
        """

    def slot_left(self, state: dict[str, Tensor], positions: Tensor, evicted: Tensor) -> None:
        """Change the numbers beside slots, in place, as one of each head is to be reused.

        Args:
            positions: (batch, kv_heads, slots), in any order, -1 = empty.
            evicted: (batch, kv_heads) index of a slot; nothing leaves where it is empty.
        """

    def slots_left(self, state: dict[str, Tensor], positions: Tensor, chosen: Tensor) -> None:
        """Change the numbers beside the slots that stay, in place, as others leave.

        Args:
            state: the numbers beside those that stay.
            positions: (batch, kv_heads, slots) of all, in ascending position, -1 = empty.
            chosen: (batch, kv_heads, kept) indices of those that stay, in ascending position.
        """


class AttendsTokens(Part):
    """Attends decoded tokens in place of the layer, and chooses what is evicted from its sight."""

    def prepare(self, layer: Any, traffic: Any) -> None:
        """Prepare for decoded tokens, unless that was done since the last prompt.

        Args:
            traffic: the cache's `kvtool.cache.features.traffic.TrafficBudgets`; None: it has none.
        """

    def attend_token(self, layer: Any, call: Any) -> Tensor | None:
        """Return (batch, heads, 1, value_dim); None: the layer attends the token itself."""
        return None

    def select(self, positions: Tensor) -> None:
        """Note which tokens a score has chosen that evicts none.

        Args:
            positions: (batch, kv_heads, slots), -1 = empty.
        """

    def static_step(self, layer: Any, shared: dict[Any, Any]) -> AbstractContextManager[None]:
        """Put what a static step reads where it looks for it, and count what it has done.

        Args:
            shared: what such parts of all layers use together, by names of their own.
        """
        return nullcontext()


class CutsByHead(Part):
    """Splits the budget of the layer over its KV heads."""

    def split_heads(
        self, layer: Any, view: Any, importance: Tensor | None, protected: Tensor | None
    ) -> Tensor | None:
        """Return what each KV head may keep, (batch, kv_heads), as a layer is cut; None: the same.

        Args:
            view: the slots as the policy sees them.
            importance: by which they are cut. None: it is not known. A split that does not depend
                on it is returned, and each head then scored as if it had a cache to itself.
            protected: what stays in any case.
        """
        return None


class CutsLater(Part):
    """Stores a prompt whole, to be cut once all layers have seen it.

    Attributes:
        active: whether a prompt is stored whole now; it may come in several forwards.
        sums: (batch, kv_heads, group, slots) float32, what the slots have received so far of each
            query head, 0 in slots of padding; None before the first block.
    """

    active: bool
    sums: Tensor | None

    def add(self, sums: Tensor, queries: Count) -> None:
        """Add what the slots have received of a block, by the number of queries of each entry."""

    def wait(self, importance: Tensor, block: Count) -> None:
        """Keep the scores of a block until the cut, with the number of tokens of each entry."""


class Parts(dict[str, Part]):
    """The parts of a layer by name, and by what they do; found once, when the layer is made.

    Attributes:
        at: for each hook, the parts that define it.
        attends, by_head, later: the part that does this in place of the layer; None: there is none.
        kernel: whether a kernel may attend the decoded tokens of static steps; None: not known yet.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        super().__init__({part.name: part for part in parts})
        self.at: dict[str, tuple[Part, ...]] = dict.fromkeys(HOOKS, ())
        self.attends: AttendsTokens | None = None
        self.by_head: CutsByHead | None = None
        self.later: CutsLater | None = None
        self.kernel: bool | None = None
        for part in self.values():
            for hook in part.hooks:
                self.at[hook] += (part,)
            if isinstance(part, AttendsTokens):
                self.attends = part
            elif isinstance(part, CutsByHead):
                self.by_head = part
            elif isinstance(part, CutsLater):
                self.later = part

    def allow_kernel(self, allowed: bool | None) -> None:
        """Say whether a kernel may attend the decoded tokens of static steps."""
        self.kernel = allowed


REFUSALS = {
    "eager": "a model whose own eager attention runs: the whole error",
    "latents": "keys that are stored in another form than they are attended: what needs them",
    "shared": "layers that read the keys of another: what the policy does",
    "joined": "rows that join a running batch: why they cannot",
    "left_out": "rows without a decoded token: the whole error",
    "static": "steps that are recorded once: why they cannot be",
}
"""What features may refuse, and which part of the error they say."""


def refusal(features: Iterable[Any], what: str, policy: Policy, model: str = "") -> str | None:
    """Say why features refuse something; None: they do not.

    Args:
        what: one of `REFUSALS`.
        policy, model: what stands for `{policy}` and `{model}` in their words.
    """
    for feature in features:
        if what in feature.refusals:
            return str(feature.refusals[what]).format(policy=policy, model=model)
    return None


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the numbers in some tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


class CutSchedule(Part):
    """How many tokens a layer will have seen when it is cut next.

    When a layer is cut decides how many slots it reserves, which layers are grouped, and whether a
    token needs its weights. So the steps ask for this part by name.

    Attributes:
        spare: tokens above the budget at which a batch entry is cut.
        until: tokens, padding included, that the layer will have seen when one of them may be;
            None: not counted since the last prompt.
    """

    name = "cut_schedule"
    joins_decode = False
    joins_padded = False

    def __init__(self, spare: int) -> None:
        self.spare = spare
        self.until: int | None = None

    @classmethod
    def make(cls, site: LayerSite) -> CutSchedule | None:
        return None if site.policy.cuts is None else cls(site.policy.spare)

    def for_heads(self, lanes: Lanes) -> CutSchedule:  # whose cuts come at other times
        return CutSchedule(self.spare)

    def clear(self) -> None:
        self.until = None

    def end_block(self) -> None:
        self.clear()

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        self.until = None

    def left(self, seen: int) -> int:
        """Count the tokens until a cut, for a layer that has seen `seen`; 0 where it is unknown."""
        return 0 if self.until is None else max(0, self.until - seen)

    def count(self, held: int | Tensor, budget: int | Tensor, seen: int) -> None:
        """Count anew what entries or heads hold; a device sync where they differ."""
        left = budget + self.spare - held
        self.until = seen + max(0, int(left.min()) if isinstance(left, Tensor) else left)
