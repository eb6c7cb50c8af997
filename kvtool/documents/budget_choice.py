"""Budgets in a recipe: one or several, in tokens, shares of the prompt or bytes, or a plan."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from kvtool.documents.document import TokenCount
from kvtool.documents.shapes import BY_SHAPE, MAPPING, MOST, SHORT, RecipeSection, counted, listed
from kvtool.errors import UsageError, quote
from kvtool.sizes import Budget


def _canonical(value: Any) -> int | str:
    budget = Budget.parse(value)
    return str(budget) if budget.tokens is None else budget.tokens


def _ratio(value: Any) -> str:
    budget = Budget.parse(value)
    if budget.tokens == 1:
        budget = Budget(ratio=Fraction(1))
    if budget.ratio is None:
        raise UsageError(f"{quote(value)} is not a share of the prompt", hint="use `20%` or `0.2`")
    return str(budget)


def _bytes(value: Any) -> str:
    whole = isinstance(value, int) and not isinstance(value, bool)
    budget = Budget(bytes=value) if whole else Budget.parse(value)
    if budget.bytes is None:
        raise UsageError(f"{quote(value)} is not a number of bytes", hint="use `64MiB`")
    return str(budget)


def _plan(value: Any) -> Any:
    if value is not None and (not isinstance(value, (str, dict)) or not value):
        raise ValueError("must be the path of a plan, or a plan")
    return value


NotEmpty = Field(min_length=1, max_length=MOST)
Listed = BeforeValidator(listed)
Tokens = Annotated[TokenCount, BeforeValidator(counted)]
Ratio = Annotated[str, BeforeValidator(_ratio)]
Bytes = Annotated[str, BeforeValidator(_bytes)]
AnyBudget = Annotated[int | str, BeforeValidator(_canonical)]


class BudgetMapping(RecipeSection):
    """Budgets of one kind: exactly one of the keys."""

    tokens: Annotated[list[Tokens], NotEmpty, Listed] | None = None
    ratio: Annotated[list[Ratio], NotEmpty, Listed] | None = None
    bytes: Annotated[list[Bytes], NotEmpty, Listed] | None = None
    plan: Annotated[Any, BeforeValidator(_plan)] = None

    @model_validator(mode="after")
    def _one(self) -> BudgetMapping:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none of them"
            raise ValueError(f"must be one of tokens, ratio, bytes and plan, got {got}")
        return self

    @model_serializer(mode="wrap")
    def _given(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in serialize(self).items() if value is not None}


BudgetChoice = Annotated[
    Annotated[list[AnyBudget], NotEmpty, Listed, Tag(SHORT)]
    | Annotated[BudgetMapping, Tag(MAPPING)],
    BY_SHAPE,
]


def budgets_of(choice: BudgetChoice | None) -> list[Budget]:
    """Return each budget; a plan is none."""
    if choice is None:
        return []
    values: Sequence[int | str]
    if isinstance(choice, BudgetMapping):
        values = choice.tokens or choice.ratio or choice.bytes or []
    else:
        values = choice
    return [Budget.parse(value) for value in values]
