"""Make settings of what a Python call is given, each checked by the type of its field."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from kvtool.documents.settings import Setting, settings_of
from kvtool.errors import UsageError, quote
from kvtool.policies.grammar import parse_policy
from kvtool.sizes import Budget

if TYPE_CHECKING:
    from kvtool.calls.settings import PromptSettings
    from kvtool.policies.policy import Policy


class Unsaid(Enum):
    """Nothing said of a policy, where None is a mistake."""

    UNSAID = "unsaid"

    def __repr__(self) -> str:
        return "..."


UNSAID = Unsaid.UNSAID
Settings = TypeVar("Settings", bound="PromptSettings")
Call = TypeVar("Call", bound=Callable[..., Any])


def takes(kind: type, leave_out: Sequence[str] = ()) -> Callable[[Call], Call]:
    """Show the settings of a kind as keywords of a call, beside those that it names itself."""

    def mark(call: Call) -> Call:
        signature = inspect.signature(call)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        more = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=() if each.default == [] else each.default,
                annotation=each.type,
            )
            for name, each in keywords_of(kind, leave_out).items()
            if name not in signature.parameters
        ]
        typed: Any = call
        typed.__signature__ = signature.replace(parameters=[*own, *more])
        return call

    return mark


def keywords_of(kind: type, leave_out: Sequence[str] = ()) -> dict[str, Setting]:
    """Return the settings that a Python call takes, by keyword."""
    found = {each.flag.python or each.name: each for each in settings_of(kind)}
    return {
        name: each
        for name, each in found.items()
        if each.flag.python is not None and name not in leave_out
    }


def check_keywords(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a keyword that a call does not take.

    Raises:
        TypeError: there is one.
    """
    unknown = {*given} - {*known}
    if unknown:
        raise TypeError(f"{call}() got an unexpected keyword argument {min(unknown)!r}")


def from_python(
    kind: type[Settings], call: str, model: Any, tokenizer: Any, **given: Any
) -> Settings:
    """Return what a call is asked to do, in the form in which a command is asked.

    Args:
        kind: of settings.
        call: its name.
        model: a name, a path or a loaded model (then with its tokenizer).
        given: the other settings by keyword.

    Raises:
        TypeError: a keyword that there is not.
        UsageError: a value of a type that means nothing here.
    """
    own = ("prompts", "memory", "skip_bad")  # of `generate_many`
    known = keywords_of(kind)
    check_keywords(call, given, [*known, *own])
    from kvtool.models.attached import ModelSource

    source = ModelSource.of(model, tokenizer)
    values = {known[key].name if key in known else key: value for key, value in given.items()}
    if values.get("show") == "-":
        raise UsageError(
            "show='-' is for the command line", hint="print(cache.show()) of kvtool.compress"
        )
    return kind(model=source.name, loaded=source.loaded, **checked(kind, values))


def checked(settings: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as a command would have them, each of the type that it is declared with.

    Raises:
        UsageError: the first that is not.
    """
    from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

    from kvtool.documents.source import first_mistake

    values = {name: _READ.get(name, _plain)(value) for name, value in given.items()}
    for each in settings_of(settings):
        if each.name in values:
            bounds = Field(ge=each.flag.min, le=each.flag.max)
            kind: Any = Annotated[each.type, bounds]
            adapter = TypeAdapter[Any](kind, config=ConfigDict(strict=True))
            try:
                adapter.validate_python(values[each.name])
            except ValidationError as error:
                raise UsageError(f"{each.name} {first_mistake(error)}") from None
    return values


def _plain(value: Any) -> Any:
    """Return a file by its name, and anything else as it is."""
    return str(value) if isinstance(value, Path) else value


def spell_dtype(dtype: Any) -> Any:
    """Return a dtype by name, also where it is torch's own."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def read_policy(policy: Any) -> str | Policy | None:
    """Return a policy or its string; None where nothing was said.

    Raises:
        UsageError: None, or no policy.
    """
    if policy is UNSAID:
        return None
    return policy if isinstance(policy, str) else parse_policy(policy)


def _budget(budget: Any) -> str | None:
    return None if budget is None else str(Budget.parse(budget))


def _stops(stop: Any) -> Any:
    """Return the texts that end an answer in a list: one, or several."""
    return list(stop) if isinstance(stop, (list, tuple)) else [stop]


def _cache(cache: Any) -> Any:
    if not isinstance(cache, (str, Path, NoneType)) and not hasattr(cache, "kept_positions"):
        raise UsageError(
            f"cache must be a kvtool cache or its file, got {type(cache).__name__}",
            hint="cache=kvtool.compress(model, text, policy, budget)",
        )
    return _plain(cache)


def _turns(turns: Any) -> Any:
    if isinstance(turns, (str, Path, NoneType)):
        return _plain(turns)
    from kvtool.documents.messages import make_turns

    if not isinstance(turns, Sequence):
        raise UsageError(f"turns must be a file or a list, got {quote(repr(turns))}")
    return make_turns(turns)


def _recipe(recipe: Any) -> Any:
    from kvtool.documents.resolve import document_of

    return None if recipe is None else document_of(recipe, "a plan or recipe")


def _memory(memory: Any) -> Any:
    return f"{memory}B" if isinstance(memory, int) else memory


_READ: dict[str, Callable[[Any], Any]] = {
    "memory": _memory,
    "dtype": spell_dtype,
    "engine_version": str,
    "policy": read_policy,
    "budget": _budget,
    "stop": _stops,
    "cache": _cache,
    "turns": _turns,
    "recipe": _recipe,
}
"""What Python may give otherwise than a command line."""
