"""The base of all documents: a kind, a schema version, no unknown keys.

Values of a recipe may be written in a short form or as a mapping.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from kvtool.errors import printable
from kvtool.sizes import MOST_BYTES, MOST_TOKENS, WIDTH, parse_count

_STEP = "  "


def dump_json(value: Any, margin: str = "") -> str:
    """Write dictionaries, lists and scalars, indented.

    >>> print(dump_json({"a": [1, None], "b": ["x"]}))
    {
      "a": [1, null],
      "b": [
        "x"
      ]
    }
    """
    inner = margin + _STEP
    if isinstance(value, dict) and value:
        lines = [f"{inner}{_scalar(key)}: {dump_json(each, inner)}" for key, each in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{margin}}}"
    if isinstance(value, list) and not all(
        each is None or isinstance(each, (int, float)) for each in value
    ):
        return "[\n" + ",\n".join(inner + dump_json(e, inner) for e in value) + f"\n{margin}]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    plain = printable(value) if isinstance(value, str) else value
    return json.dumps(plain, ensure_ascii=False)


TokenCount = Annotated[PositiveInt, Field(le=MOST_TOKENS)]
"""Tokens of a text, 1 or more."""

ByteCount = Annotated[NonNegativeInt, Field(le=MOST_BYTES)]
"""Bytes of memory."""

Share = Annotated[FiniteFloat, Field(gt=0, le=1)]
"""A share of something, and not nothing."""


WAS_ARM = Field(validation_alias=AliasChoices("variant", "arm"))
WERE_ARMS = Field(validation_alias=AliasChoices("variants", "arms"))
"""Keys of fields that older files have under another name."""


@dataclass(frozen=True)
class Unit:
    """What a field's numbers count, as a comment in YAML says it."""

    text: str


PER_HEAD, PER_LAYER = Unit("per layer and KV head"), Unit("per layer")


Kind = TypeVar("Kind", bound="Section")


class Section(BaseModel):
    """A part of a document; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    @classmethod
    def taken_from(cls: type[Kind], values: object) -> Kind:
        """Make the section of what an object has under the names of its fields."""
        return cls(**{name: getattr(values, name) for name in cls.model_fields})

    def units(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield the units of fields, with the keys that lead there."""
        for name, field in type(self).model_fields.items():
            yield from (((name,), each.text) for each in field.metadata if isinstance(each, Unit))
            value = getattr(self, name)
            if isinstance(value, Section):
                yield from (((name, *keys), text) for keys, text in value.units())


class SparseSection(Section):
    """A section that is written without null: in its `optional` fields, or in any if None."""

    optional: ClassVar[tuple[str, ...] | None] = None

    @model_serializer(mode="wrap")
    def _given(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = serialize(self)
        names = found if self.optional is None else self.optional
        return {key: each for key, each in found.items() if each is not None or key not in names}


class Document(Section):
    """A whole document; subclasses add a `kind`. Sections that were not measured are left out."""

    schema_version: Literal[1] = 1

    def to_data(self) -> dict[str, Any]:
        """Return plain dictionaries and lists, `kind` and `schema_version` first."""
        left_out = {
            name
            for name, field in type(self).model_fields.items()
            if getattr(self, name) is None and not field.is_required()
        }
        data = self.model_dump(mode="json", exclude=left_out)
        return {"kind": data.pop("kind"), "schema_version": data.pop("schema_version"), **data}

    def to_json(self) -> str:
        """Return the document as JSON, ending in a newline."""
        return dump_json(self.to_data()) + "\n"

    def to_yaml(self) -> str:
        """Return the document as YAML, in the same order, with units as comments."""
        from kvtool.documents.yaml_writer import dump_yaml

        return dump_yaml(self.to_data(), dict(self.units()))


def report(name: str) -> Any:
    """Import a module of `report` once something is shown: it imports the documents itself."""
    return import_module(f"kvtool.report.{name}")


class ShownDocument(Document):
    """A document that can be shown as text, as a data frame and in a notebook."""

    def table(self, width: int = WIDTH) -> str:
        """Return the table that a terminal of `width` characters shows, ending in a newline."""
        written: str = report("text").text(self, width)
        return written

    def to_pandas(self) -> Any:
        """Return the document's numbers as a data frame of pandas, if that is installed."""
        return report("view").frame(self)

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        return report("view").html(self)


SHORT, MAPPING = "<short>", "<mapping>"
MOST = 500  # policies, budgets, tasks or gates of a recipe


class RecipeSection(Section):
    """A part of a recipe: values are not converted, so that `yes` is no truth and "8" no number."""

    model_config = ConfigDict(strict=True)


def _shape(value: Any) -> str:
    return MAPPING if isinstance(value, (dict, BaseModel)) else SHORT


BY_SHAPE = Discriminator(_shape)
"""Distinguishes the members of a union that are tagged `SHORT` and `MAPPING`."""


def check_one(section: Section, names: tuple[str, ...]) -> None:
    """Refuse a section that has none of some keys, or several."""
    given = [name for name in names if getattr(section, name) is not None]
    if len(given) != 1:
        got = " and ".join(given) or "none of them"
        raise ValueError(f"must have one of {', '.join(names)}, got {got}")


def listed(value: Any) -> Any:
    """Let one value stand for a list of one."""
    return value if isinstance(value, (list, tuple)) or value is None else [value]


def counted(value: Any) -> Any:
    """Read `4K`; anything but text is left for the type to judge."""
    return parse_count(value) if isinstance(value, str) else value
