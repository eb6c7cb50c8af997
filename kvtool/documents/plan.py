"""The plan that `kvtool plan-budget` makes: tokens per layer, RocketKV's sizes, and totals.

A run obeys the decisions in it. Numbers that follow from these are for the reader: a run computes
them again and never reads them.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    BeforeValidator,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from kvtool.documents.document import (
    PER_HEAD,
    Section,
    Share,
    ShownDocument,
    SparseSection,
    TokenCount,
    Unit,
    check_one,
)
from kvtool.documents.memory import ModelShape
from kvtool.documents.tree import Keys
from kvtool.errors import UsageError
from kvtool.model_shape import FREE
from kvtool.sizes import MOST_BYTES, MOST_TOKENS, Budget

if TYPE_CHECKING:
    from pydantic_core import InitErrorDetails


def disagreement(keys: Keys, given: Any, message: str) -> ValidationError:
    """Return what a validator of a whole document raises to point at one value in it.

    Args:
        keys: the way to the value.
        given: the value.
    """
    error: InitErrorDetails = {
        "type": "value_error",
        "loc": keys,
        "input": given,
        "ctx": {"error": ValueError(message)},
    }
    return ValidationError.from_exception_data("document", [error])


def compression_ratio(context: int, token_budget: int) -> float:
    """Return c = S / t, at least 1."""
    return max(1.0, context / token_budget)


def stage1_tokens(context: int, token_budget: int, split_factor: float, max_new_tokens: int) -> int:
    """Return C, the tokens that stage 1 leaves, the generated ones included: S / c^r.

    >>> stage1_tokens(32768, 512, 0.56, 128)
    3191
    """
    ratio = compression_ratio(context, token_budget)
    return max(int(context / ratio**split_factor), min(2 * max_new_tokens, context))


def _ratio(value: Any) -> Any:
    """Read a share of the prompt; write it as a number wherever that is exact."""
    budget = Budget(ratio=Fraction(1)) if value == 1 else Budget.parse(value)
    if budget.ratio is None:
        raise UsageError(f"`{value}` is not a share of the prompt", hint="use `20%` or `0.2`")
    exact = (number := float(budget.ratio)) == 1 or Budget.parse(number).ratio == budget.ratio
    return number if exact else str(budget)


_NO_STAGE1 = "needs `stage1_tokens`, or `split_factor`, which gives it"


class Target(SparseSection):
    """What the plan was made for: one of `ratio`, `tokens` and `bytes`, and the longest request.

    Attributes:
        ratio: share of the prompt that is kept.
        tokens: mean tokens per layer and KV head.
        bytes: memory held in all layers and rows, the policy's own numbers included.
        context: tokens of the prompt and of those generated.
        max_new_tokens: how many of the context are generated.
        batch: rows.
    """

    ratio: Annotated[float | str, BeforeValidator(_ratio)] | None = None
    tokens: TokenCount | None = None
    bytes: Annotated[PositiveInt, Field(le=MOST_BYTES)] | None = None
    context: TokenCount
    max_new_tokens: NonNegativeInt = 0
    batch: PositiveInt = 1

    @model_validator(mode="after")
    def _consistent(self) -> Target:
        check_one(self, ("ratio", "tokens", "bytes"))
        if self.max_new_tokens >= self.context:
            raise ValueError(
                f"`max_new_tokens` {self.max_new_tokens} leaves no prompt in a context of "
                f"{self.context}"
            )
        return self

    @property
    def budget(self) -> Budget:
        """The target as a size."""
        if self.ratio is not None:
            return Budget(ratio=Fraction(1)) if self.ratio == 1 else Budget.parse(self.ratio)
        return Budget(tokens=self.tokens, bytes=self.bytes)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return self.context - self.max_new_tokens


_Heads = Annotated[list[TokenCount], Field(min_length=1)]
_PER_HEAD_OF_LAYER = Unit("a list per layer, a number per KV head")


class LayerPlan(SparseSection):
    """Tokens per layer and KV head.

    Sliding-window layers keep their window, and layers without attention keep nothing. The target
    counts neither, and neither has a fraction.

    Where the plan has `totals`, `tokens` are those of the target together. A plan that was edited
    goes without them: then `tokens` are used unchanged, and their sum is the target.

    Attributes:
        allocator: how the target was split; a note.
        min_tokens: least of a layer whose budget is free.
        tokens: for a prompt of `target.prompt_tokens`; those of free layers sum to the target
            times their number.
        fractions: tokens as a share of that prompt; a note.
        heads: tokens of each KV head of the layers whose budget is free, where heads have budgets
            of their own; their mean is the layer's.
    """

    optional: ClassVar = ("heads",)

    allocator: str = "uniform"
    min_tokens: TokenCount = 1
    tokens: Annotated[list[Annotated[NonNegativeInt, Field(le=MOST_TOKENS)]], PER_HEAD]
    fractions: Annotated[list[Share | None] | None, Unit("of the prompt, per layer")] = None
    heads: Annotated[list[_Heads | None] | None, _PER_HEAD_OF_LAYER] = None


class Cost(Section):
    """A share of what a full cache stores, or reads per decode step.

    `exact` is counted from whole tokens, pages and channels, `paper` by the formula that RocketKV's
    table 1 prints.
    """

    exact: NonNegativeFloat
    paper: NonNegativeFloat


class RocketKVSection(Section):
    """The two stages of RocketKV for the target's context; see `kvtool.planning.rocketkv_stages`.

    A run obeys `token_budget`, `stage1_tokens`, `page_size`, `head_dims` and `top_k`.
    `split_factor` gives `stage1_tokens` where that is left out. All other numbers follow from these
    and are notes for the reader.
    """

    context: TokenCount
    token_budget: TokenCount
    dense: bool = False
    compression_ratio: FiniteFloat | None = None
    split_factor: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    stage1_tokens: TokenCount | None = None
    prompt_tokens: TokenCount | None = None
    page_size: TokenCount
    head_dims: PositiveInt
    top_k: TokenCount
    storage: Cost | None = None
    traffic: Cost | None = None

    def stage1(self, max_new_tokens: int) -> int:
        """Return C: the plan's own, else the one of the split factor."""
        if self.stage1_tokens is not None:
            return self.stage1_tokens
        if self.split_factor is None:
            raise UsageError(_NO_STAGE1)
        return stage1_tokens(self.context, self.token_budget, self.split_factor, max_new_tokens)


class Amount(Section):
    """Bytes, and the share of what a full cache of the model's dtype takes, or reads."""

    bytes: NonNegativeInt
    share_of_full: NonNegativeFloat


class Totals(SparseSection):
    """What all layers and rows hold together, the policy's own numbers included.

    Attributes:
        tokens: stored of the longest prompt, summed over layers, windows included, per KV head.
        bytes: most that is held from the end of the prompt to the last planned token.
        share_of_full: bytes as a share of the keys and values of a full cache.
        storage: the same two.
        traffic: of the last planned token.
        reading: bytes that the cache takes while a prompt is read, where a policy keeps all of it
            until the cut.

    Where no policy is named, `bytes` and `share_of_full` are the keys and values of the tokens.
    `storage` and `traffic` are then those of a policy that stores these and keeps no numbers of its
    own. For one that reads these, they are in the `rocketkv` section.
    """

    tokens: NonNegativeInt
    bytes: NonNegativeInt
    share_of_full: NonNegativeFloat
    storage: Amount | None = None
    traffic: Amount | None = None
    reading: NonNegativeInt | None = None


class PredictedLoss(Section):
    """What the answer is expected to lose, by a profile's `answer_loss`, in nats per token.

    A note: the plan does not hold the profile, so a run neither compares nor uses it.

    Attributes:
        equal: with equal budgets.
        planned: with those of this plan.
        standard_error: of the difference, over the samples of the profile.
    """

    equal: NonNegativeFloat
    planned: NonNegativeFloat
    standard_error: NonNegativeFloat


Prefill = Literal["block", "full"]

WayKind = Literal["bits", "bits and eviction", "eviction", "reading"]
"""Everything in fewer bits, some tokens in fewer bits, some tokens, or all read sparsely."""

KINDS: tuple[WayKind, ...] = get_args(WayKind)


class Peaks(Section):
    """Bytes that live at a time, estimated: with a prompt that is read in blocks, or at once."""

    block: NonNegativeInt
    full: NonNegativeInt


class WayLoss(Section):
    """The share of the full cache's right answers that is expected to be lost.

    Attributes:
        known: where the question is in the prompt; None: not measured.
        later: where it is asked after the prompt was compressed; None: not measured.
    """

    known: NonNegativeFloat | None = None
    later: NonNegativeFloat | None = None

    @property
    def worse(self) -> float:
        """The larger of the two."""
        return max(self.known or 0.0, self.later or 0.0)

    def of(self, asked: str) -> float:
        """Return the loss of a question that is `known` or asked `later`, else the larger one."""
        found: float | None = getattr(self, asked)
        return self.worse if found is None else found


class Way(SparseSection):
    """One way to run the plan's model.

    Attributes:
        tokens: kept of the prompt, per layer and KV head.
        share: of the prompt that is kept.
        key_bits, value_bits: of a channel.
        reads: pairs that a step reads per layer and KV head, where that is the budget.
        bytes: held, the policy's own numbers included.
        share_of_full: bytes as a share of the keys and values of a full cache.
        traffic: bytes that a token reads.
        peak: with `--memory` the weights are part of it.
        prefill: how the command reads the prompt, which has the smaller peak.
        block: tokens of its blocks, where the usual ones do not fit.
        excess: bytes by which it does not fit.
        command: runs it; without a prompt of its own.
    """

    policy: str
    kind: WayKind
    tokens: TokenCount
    share: NonNegativeFloat
    key_bits: PositiveInt
    value_bits: PositiveInt
    reads: PositiveInt | None = None
    bytes: NonNegativeInt
    share_of_full: NonNegativeFloat
    traffic: NonNegativeInt
    peak: Peaks
    prefill: Prefill
    loss: WayLoss
    block: PositiveInt | None = None
    fits: bool
    excess: NonNegativeInt = 0
    command: str

    @property
    def peak_bytes(self) -> int:
        """The peak of the command."""
        return self.peak.block if self.prefill == "block" else self.peak.full


class Device(Section):
    """A device that a plan is for: its memory, and the weights in it, in bytes."""

    memory: PositiveInt
    weights: NonNegativeInt


class PlanDocument(ShownDocument):
    """`plan.yaml`; `rocketkv` is left out where RocketKV cannot work, `totals` where edited.

    Attributes:
        device: the device that the plan was made for, where one was named.
        ways: to run the model in the target's bytes or the device's memory, in the order of the
            answers that they cost, and behind them those that do not fit. No run reads them.
        ways_source: what the order rests on.
    """

    kind: Literal["plan"] = "plan"
    model: ModelShape
    target: Target
    layers: LayerPlan
    rocketkv: RocketKVSection | None = None
    totals: Totals | None = None
    policy: str | None = None
    device: Device | None = None
    ways: list[Way] | None = None
    ways_source: str | None = None
    predicted_loss: PredictedLoss | None = None

    @property
    def free_layers(self) -> list[int]:
        """Indices of the layers whose budget is free."""
        return [i for i, kind in enumerate(self.model.layer_types) if kind in FREE]

    @property
    def smallest_budget(self) -> int:
        """Tokens of the layer, or of the KV head, that has fewest."""
        heads = self.layers.heads
        if heads is None:
            return min(self.layers.tokens[i] for i in self.free_layers)
        return min(min(own) for own in heads if own)

    @property
    def planned_bytes(self) -> int | None:
        """Bytes that are held by its totals, None where it has none."""
        return self.totals.storage.bytes if self.totals and self.totals.storage else None

    @property
    def edited(self) -> bool:
        """Whether the tokens of the layers are used unchanged, whatever the target."""
        return self.totals is None

    @model_validator(mode="after")
    def _fits_its_model(self) -> PlanDocument:
        layers, kinds = self.layers, self.model.layer_types
        for name, values in (("tokens", layers.tokens), ("heads", layers.heads)):
            if values is not None and not len(values) == len(kinds) == self.model.layers:
                raise ValueError(
                    f"`layers.{name}` has {len(values)} entries, but the model {self.model.layers} "
                    "layers"
                )
        if not self.free_layers:
            raise ValueError("no layer has a budget to plan")
        for i in self.free_layers:
            if layers.tokens[i] < layers.min_tokens:
                raise ValueError(
                    f"`layers.tokens.{i}` is {layers.tokens[i]}, below `layers.min_tokens` "
                    f"{layers.min_tokens}"
                )
        return self

    @model_validator(mode="after")
    def _heads_fit_their_layers(self) -> PlanDocument:
        least = self.layers.min_tokens
        for i, own in enumerate(self.layers.heads or []):
            if (i in self.free_layers) != (own is not None):
                kind = self.model.layer_types[i]
                what = "needs tokens" if own is None else "has no budget of its own to plan"
                raise ValueError(f"`layers.heads.{i}`: a layer of kind `{kind}` {what}")
            if own is None:
                continue
            mean = self.layers.tokens[i]
            if sum(own) != mean * len(own):
                message = (
                    f"{sum(own)} tokens in {len(own)} KV heads do not agree with "
                    f"`layers.tokens.{i}`, {mean} in each on average; make them "
                    f"{mean * len(own)} together"
                )
                raise disagreement(("layers", "heads", i), own, message)
            if min(own) < least:
                message = f"a KV head has {min(own)} tokens, below `layers.min_tokens` {least}"
                raise disagreement(("layers", "heads", i), own, message)
        return self

    @model_validator(mode="after")
    def _tokens_are_those_of_the_target(self) -> PlanDocument:
        budget, n = self.target.budget, self.target.prompt_tokens
        if self.edited or budget.bytes is not None:
            return self
        planned, count = sum(self.layers.tokens[i] for i in self.free_layers), len(self.free_layers)
        mean = budget.for_prompt(n)
        if planned != min(mean, n) * count:
            message = (
                f"they are {planned} together in layers whose budget is free, and the target is "
                f"{mean} in each of {count}; without `totals` the tokens stand as they are"
            )
            raise disagreement(("layers", "tokens"), self.layers.tokens, message)
        return self

    @model_validator(mode="after")
    def _stages_are_in_range(self) -> PlanDocument:
        section, new = self.rocketkv, self.target.max_new_tokens
        if section is None:
            return self
        context, split = section.context, section.split_factor
        if context != self.target.context:
            message = f"{context} does not agree with `target.context`, {self.target.context}"
            raise disagreement(("rocketkv", "context"), context, message)
        if section.stage1_tokens is None and split is None:
            raise disagreement(("rocketkv",), None, _NO_STAGE1)
        stage1 = section.stage1(new)
        right = (
            stage1 if split is None else stage1_tokens(context, section.token_budget, split, new)
        )
        why = f"stage 1 leaves {stage1} of {context} tokens, {new} of them new"
        if stage1 != right:
            why = f"{stage1} does not agree with `split_factor`, which makes it {right}"
        if stage1 != right or not new < stage1 <= context:
            raise disagreement(("rocketkv", "stage1_tokens"), stage1, why)
        if section.head_dims > self.model.key_dim:
            message = f"{section.head_dims} is more than the {self.model.key_dim} of a head"
            raise disagreement(("rocketkv", "head_dims"), section.head_dims, message)
        return self
