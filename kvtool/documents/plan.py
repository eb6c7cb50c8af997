"""What `kvtool plan-budget` decided: tokens per layer, RocketKV's sizes, and what it all takes."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from kvtool.documents.document import Document, Section
from kvtool.documents.profile import ModelShape
from kvtool.errors import UsageError
from kvtool.sizes import Budget

FREE = ("full_attention", "hybrid")
"""Kinds of layers whose budget is free, by transformers' names."""

SLIDING = ("sliding_attention", "hybrid_sliding")
"""Kinds of layers that keep their own window, whatever the budget."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Size of a number in the dtypes that a model can be loaded in."""


def _ratio(value: Any) -> Any:
    """Read a share of the prompt; write it as a number wherever that is exact."""
    budget = Budget(ratio=Fraction(1)) if value == 1 else Budget.parse(value)
    if budget.ratio is None:
        raise UsageError(f"`{value}` is not a share of the prompt", hint="use `20%` or `0.2`")
    number = float(budget.ratio)
    exact = number == 1 or Budget.parse(number).ratio == budget.ratio
    return number if exact else str(budget)


class Target(Section):
    """What the plan was made for: one of `ratio`, `tokens` and `bytes`, and the longest request.

    Attributes:
        ratio: share of the prompt that is kept.
        tokens: mean tokens per layer and KV head.
        bytes: of the keys and values of all layers and rows.
        context: tokens of the prompt and of those generated.
        max_new_tokens: how many of the context are generated.
        batch: rows.
    """

    ratio: Annotated[float | str, BeforeValidator(_ratio)] | None = None
    tokens: PositiveInt | None = None
    bytes: PositiveInt | None = None
    context: PositiveInt
    max_new_tokens: NonNegativeInt = 0
    batch: PositiveInt = 1

    @model_validator(mode="after")
    def _consistent(self) -> Target:
        given = [name for name in ("ratio", "tokens", "bytes") if getattr(self, name) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none of them"
            raise ValueError(f"must be one of ratio, tokens and bytes, got {got}")
        if self.max_new_tokens >= self.context:
            raise ValueError(
                f"`max_new_tokens` {self.max_new_tokens} leaves no prompt in a context of "
                f"{self.context}"
            )
        return self

    @model_serializer(mode="wrap")
    def _given(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in serialize(self).items() if value is not None}

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


class LayerPlan(Section):
    """Tokens per layer and KV head.

    Layers that slide over a window keep what that takes, and layers without attention nothing:
    both stand outside the target, without a fraction.

    Attributes:
        allocator: how the target was split.
        min_tokens: least of a layer whose budget is free.
        tokens: for a prompt of `target.prompt_tokens`; those of free layers sum to the target
            times their number.
        fractions: tokens as a share of that prompt.
    """

    allocator: str
    min_tokens: PositiveInt = 1
    tokens: list[NonNegativeInt]
    fractions: list[Annotated[FiniteFloat, Field(gt=0, le=1)] | None]


class Cost(Section):
    """A share of what a full cache stores, or reads per decode step.

    `exact` is counted from whole tokens, pages and channels, `paper` by the formula that RocketKV's
    table 1 prints.
    """

    exact: NonNegativeFloat
    paper: NonNegativeFloat


class RocketKVSection(Section):
    """The two stages of RocketKV for the target's context; see `kvtool.planning.rocketkv`."""

    context: PositiveInt
    token_budget: PositiveInt
    dense: bool = False
    compression_ratio: FiniteFloat
    split_factor: FiniteFloat
    stage1_tokens: PositiveInt
    prompt_tokens: PositiveInt
    page_size: PositiveInt
    head_dims: PositiveInt
    top_k: PositiveInt
    storage: Cost
    traffic: Cost


class Totals(Section):
    """What the layers hold together after the longest prompt.

    Attributes:
        tokens: summed over layers, windows included, per KV head.
        bytes: keys and values of all rows.
        share_of_full: bytes as a share of what a full cache would hold.
    """

    tokens: NonNegativeInt
    bytes: NonNegativeInt
    share_of_full: NonNegativeFloat


class PlanDocument(Document):
    """`plan.yaml`; `rocketkv` is left out where RocketKV cannot work."""

    kind: Literal["plan"] = "plan"
    model: ModelShape
    target: Target
    layers: LayerPlan
    rocketkv: RocketKVSection | None = None
    totals: Totals
    policy: str | None = None

    @property
    def free_layers(self) -> list[int]:
        """Indices of the layers whose budget is free."""
        return [i for i, fraction in enumerate(self.layers.fractions) if fraction is not None]

    @model_validator(mode="after")
    def _fits_its_model(self) -> PlanDocument:
        kinds = self.model.layer_types
        for name in ("tokens", "fractions"):
            count = len(getattr(self.layers, name))
            if not count == len(kinds) == self.model.layers:
                raise ValueError(
                    f"`layers.{name}` has {count} entries, but the model {self.model.layers} layers"
                )
        for i, kind in enumerate(kinds):
            if (kind in FREE) != (self.layers.fractions[i] is not None):
                what = "needs a fraction" if kind in FREE else "has no budget of its own to plan"
                raise ValueError(f"`layers.fractions.{i}`: a layer of kind `{kind}` {what}")
            least, tokens = self.layers.min_tokens, self.layers.tokens[i]
            if kind in FREE and tokens < least:
                raise ValueError(
                    f"`layers.tokens.{i}` is {tokens}, below `layers.min_tokens` {least}"
                )
        if not self.free_layers:
            raise ValueError("no layer has a budget to plan")
        return self
