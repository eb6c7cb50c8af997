"""The recipe: model, policies, budgets, benchmarks and gates of a run in one file.

A budget may be one or several, in tokens, shares of the prompt or bytes, or a plan. A policy is a
string such as `h2o(recent=8)+caote`, or a mapping with its parameters. Which policies there are is
known further up; here they are only spelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    StringConstraints,
    Tag,
    WrapValidator,
    model_validator,
)

from kvtool.documents.claim import Claim
from kvtool.documents.document import (
    BY_SHAPE,
    MAPPING,
    MOST,
    SHORT,
    Document,
    RecipeSection,
    SparseSection,
    TokenCount,
    check_one,
    counted,
    listed,
)
from kvtool.documents.settings import Asking, ModelFields, Name
from kvtool.documents.verdict import WITHIN, Loss
from kvtool.errors import UsageError, quote
from kvtool.sizes import LARGEST_SEED, Budget, check_temperature, says_default_block, spell_prefill


def _canonical(value: Any) -> int | str:
    budget = Budget.parse(value)
    return str(budget) if budget.tokens is None else budget.tokens


def _ratio(value: Any) -> str:
    budget = Budget.parse(value)
    if budget.tokens == 1:
        budget = Budget(ratio=Fraction(1))
    return _spell_if(budget.ratio, budget, f"{quote(value)} is not a share of the prompt (`20%`)")


def _bytes(value: Any) -> str:
    whole = isinstance(value, int) and not isinstance(value, bool)
    budget = Budget(bytes=value) if whole else Budget.parse(value)
    return _spell_if(budget.bytes, budget, f"{quote(value)} is not a number of bytes (`64MiB`)")


def _spell_if(there: object, budget: Budget, refusal: str) -> str:
    if there is None:
        raise UsageError(refusal)
    return str(budget)


NotEmpty = Field(min_length=1, max_length=MOST)
Listed = BeforeValidator(listed)
Tokens = Annotated[TokenCount, BeforeValidator(counted)]
Ratio = Annotated[str, BeforeValidator(_ratio)]
Bytes = Annotated[str, BeforeValidator(_bytes)]
AnyBudget = Annotated[int | str, BeforeValidator(_canonical)]


class BudgetMapping(RecipeSection, SparseSection):
    """Budgets of one kind: exactly one of the keys."""

    tokens: Annotated[list[Tokens], NotEmpty, Listed] | None = None
    ratio: Annotated[list[Ratio], NotEmpty, Listed] | None = None
    bytes: Annotated[list[Bytes], NotEmpty, Listed] | None = None
    plan: Annotated[str | dict[str, Any], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one(self) -> BudgetMapping:
        check_one(self, ("tokens", "ratio", "bytes", "plan"))
        return self


BudgetChoice = Annotated[
    Annotated[list[AnyBudget], NotEmpty, Listed, Tag(SHORT)]
    | Annotated[BudgetMapping, Tag(MAPPING)],
    BY_SHAPE,
]


Word = Annotated[str, StringConstraints(pattern=r"^[^(),=+\s]+$")]
"""A text without the syntax of policy strings."""


class PolicyMapping(RecipeSection):
    """A policy or a modifier by name; every further key is one of its parameters."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, bool | int | FiniteFloat | Word | None]

    name: Word

    def __str__(self) -> str:
        """Return the policy string."""
        given = [f"{key}={_spell(value)}" for key, value in self.__pydantic_extra__.items()]
        return self.name + (f"({','.join(given)})" if given else "")


def _spell(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


PolicyChoice = Annotated[
    Annotated[str, StringConstraints(strip_whitespace=True, min_length=1), Tag(SHORT)]
    | Annotated[PolicyMapping, Tag(MAPPING)],
    BY_SHAPE,
]


class _Named:
    id: Name | None = None


class ModelChoice(RecipeSection, ModelFields, _Named):  # type: ignore[misc]
    """Which model runs, and how; the bundled reference model if there is no `id`."""


class Generation(RecipeSection):
    """How answers are generated; null is the task's own."""

    max_new_tokens: TokenCount | None = None
    temperature: Annotated[NonNegativeFloat, AfterValidator(check_temperature)] = 0.0
    stop: Annotated[list[Name], Field(max_length=MOST), Listed] = Field(default_factory=list)


class TaskEntry(RecipeSection):
    """A task, a suite or a glob (`ruler/niah_*`); every further key is a setting of the task."""

    model_config = ConfigDict(extra="allow")

    task: Name

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that are given; the task's own class validates them."""
        return dict(self.__pydantic_extra__ or {})


class _Measured:
    tasks: Annotated[list[TaskEntry], Field(max_length=MOST), Listed] = Field(default_factory=list)
    baseline: bool = True
    limit: PositiveInt | None = None
    compare: Annotated[list[Name], Field(max_length=MOST), Listed] = Field(default_factory=list)


class Evaluation(RecipeSection, Asking, _Measured):  # type: ignore[misc]
    """What is measured, and how prompts are made; `query_aware: null` is the task's own.

    `within` is the bound of the verdict, in percent of the full cache's score, `guarantee` that of
    a guarantee, in percent of prompts, and `compare` names pairs of policies to compare
    (`mine,h2o`).
    """

    max_length: Tokens | None = None
    batch: PositiveInt | None = None
    within: Annotated[FiniteFloat, Field(gt=0, le=100)] = WITHIN
    guarantee: Loss | None = None


class Gate(RecipeSection):
    """A condition on the results of the tasks that a name or a glob stands for.

    `min` is the least headline score, `max_drop` the most by which it may stay behind the full
    cache's.
    """

    task: Name
    min: FiniteFloat | None = None
    max_drop: Annotated[FiniteFloat, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _one(self) -> Gate:
        check_one(self, ("min", "max_drop"))
        return self


def _pictures(value: Any) -> Any:
    if isinstance(value, bool):
        return ["png"] if value else []
    return listed(value)


class Output(RecipeSection):
    """The folder of the run, and what is written there; `plots: null` leaves it to the command."""

    dir: Name | None = None
    samples: bool = True
    plots: Annotated[list[Literal["png", "svg"]], BeforeValidator(_pictures)] | None = None


class PrefillMapping(RecipeSection):
    """How a prompt is fed, key by key."""

    mode: Literal["full", "block"]
    block: Tokens | None = None

    @model_validator(mode="after")
    def _consistent(self) -> PrefillMapping:
        if self.mode == "full" and self.block is not None:
            raise ValueError("mode `full` feeds the prompt at once; `block` is for mode `block`")
        return self

    def __str__(self) -> str:
        """Return the setting as the flag spells it."""
        return self.mode if self.block is None else f"block:{self.block}"


def _prefill(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return "block" if says_default_block(value) else spell_prefill(value)


PrefillChoice = Annotated[
    Annotated[str, BeforeValidator(_prefill), Tag(SHORT)] | Annotated[PrefillMapping, Tag(MAPPING)],
    BY_SHAPE,
]


def _spelled(value: Any, validate: Any) -> str:
    return str(validate(value))


class Recipe(Document):
    """A run. What is left out has the default of the command."""

    model_config = ConfigDict(strict=True)

    kind: Literal["recipe"] = "recipe"
    name: Name | None = None
    model: ModelChoice = Field(default_factory=ModelChoice)
    policy: Annotated[list[PolicyChoice], Field(min_length=1, max_length=MOST), Listed] | None = (
        None
    )
    modifiers: Annotated[list[PolicyChoice], Field(max_length=10), Listed] = Field(
        default_factory=list
    )
    budget: BudgetChoice | None = None
    allocator: Name | None = None
    prefill: Annotated[PrefillChoice, WrapValidator(_spelled)] | None = None
    generation: Generation = Field(default_factory=Generation)
    eval: Evaluation = Field(default_factory=Evaluation)
    gates: Annotated[list[Gate], Field(max_length=MOST)] = Field(default_factory=list)
    output: Output = Field(default_factory=Output)
    claim: Claim | None = None
    seed: Annotated[NonNegativeInt, Field(le=LARGEST_SEED)] = 0

    def at(self, key: str) -> Any:
        """Return the value at a place such as `model.dtype`."""
        value: Any = self
        for name in key.split("."):
            value = getattr(value, name)
        return value

    def policies(self) -> list[str]:
        """Return the policy strings, each with every modifier; empty if there is no policy."""
        rest = [str(modifier) for modifier in self.modifiers]
        return ["+".join([str(policy), *rest]) for policy in self.policy or []]

    def budgets(self) -> list[Budget]:
        """Return the budgets; empty without, and with a plan."""
        sizes: Sequence[int | str]
        if isinstance(self.budget, BudgetMapping):
            sizes = self.budget.tokens or self.budget.ratio or self.budget.bytes or []
        else:
            sizes = self.budget or []
        return [Budget.parse(size) for size in sizes]

    @property
    def plan(self) -> str | dict[str, Any] | None:
        """The plan that gives the budget, or its path."""
        return self.budget.plan if isinstance(self.budget, BudgetMapping) else None
