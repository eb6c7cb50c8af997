"""Policies in a recipe: strings such as `h2o(recent=8)+caote`, or mappings with their parameters.

What policies there are is known further up; here they are only spelled.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Tag

from kvtool.documents.shapes import BY_SHAPE, MAPPING, SHORT, RecipeSection
from kvtool.documents.source import show

_SYNTAX = re.compile(r"[(),=+\s]")


def _policy(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f"must be a policy such as `h2o(recent=8)` or {{name: h2o, recent: 8}}, "
            f"got {show(value)}"
        )
    return value.strip()


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value or _SYNTAX.search(value):
        raise ValueError(
            f"must be one name, without parameters or modifiers, such as `h2o`, got {show(value)}"
        )
    return value


def _parameter(value: Any) -> Any:
    if isinstance(value, (dict, list)) or (
        isinstance(value, str) and (not value or _SYNTAX.search(value))
    ):
        raise ValueError(f"must be a number, a word, true, false or null, got {show(value)}")
    return value


class PolicyMapping(RecipeSection):
    """A policy or a modifier by name; every further key is one of its parameters."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(_parameter)]]

    name: Annotated[str, BeforeValidator(_name)]

    def __str__(self) -> str:
        """Return the policy string."""
        given = [f"{key}={_spell(value)}" for key, value in self.parameters.items()]
        return self.name + (f"({','.join(given)})" if given else "")

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters that are given."""
        return dict(self.__pydantic_extra__)


def _spell(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


PolicyChoice = Annotated[
    Annotated[str, BeforeValidator(_policy), Tag(SHORT)] | Annotated[PolicyMapping, Tag(MAPPING)],
    BY_SHAPE,
]
