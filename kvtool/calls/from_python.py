"""Make settings of what a Python call is given, and refuse mistakes that only Python can make."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

from kvtool.documents.settings import ModelFields, Setting, settings_of
from kvtool.errors import UsageError, did_you_mean, quote
from kvtool.policies.grammar import parse_policy
from kvtool.sizes import LARGEST_SEED, Budget

if TYPE_CHECKING:
    from kvtool.calls.settings import PromptSettings
    from kvtool.documents.messages import Turns
    from kvtool.policies.policy import Policy


class Unsaid(Enum):
    """Nothing said of a policy, where None is a mistake."""

    UNSAID = "unsaid"

    def __repr__(self) -> str:
        return "..."


UNSAID = Unsaid.UNSAID
Settings = TypeVar("Settings", bound="PromptSettings")
Call = TypeVar("Call", bound=Callable[..., Any])

_FILES = ("prompt_file", "save", "show", "export_vllm")


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
    values["dtype"] = spell_dtype(values.get("dtype"))
    _check_choices(kind, values)
    _check_words(values)
    values["policy"] = read_policy(values["policy"])
    values["budget"] = read_budget(values["budget"])
    for name in _FILES:
        if name in values:
            values[name] = _path(values[name], name)
    if values.get("show") == "-":
        raise UsageError(
            "show='-' is for the command line", hint="print(cache.show()) of kvtool.compress"
        )
    for name, read in (("cache", _read_cache), ("turns", _read_turns), ("stop", read_stops)):
        if name in values:
            values[name] = read(values[name])
    if values.get("recipe") is not None:
        from kvtool.documents.resolve import document_of

        values["recipe"] = document_of(values["recipe"], "a plan or recipe")
    return kind(model=source.name, loaded=source.loaded, **values)


def read_policy(policy: Any) -> str | Policy | None:
    """Return a policy or its string; None where nothing was said.

    Raises:
        UsageError: None, or no policy.
    """
    if policy is UNSAID:
        return None
    return policy if isinstance(policy, str) else parse_policy(policy)


def read_budget(budget: Any) -> str | None:
    """Return a budget as it would be typed."""
    return None if budget is None else str(Budget.parse(budget))


def read_stops(stop: Any) -> list[str]:
    """Return the texts that end an answer: one, or several."""
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, Sequence) or not all(isinstance(each, str) for each in texts):
        raise UsageError(f"stop must be a text or a list of texts, got {quote(repr(stop))}")
    return list(texts)


def spell_dtype(dtype: Any) -> Any:
    """Return a dtype by name, also where it is torch's own."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def check_text(name: str, value: Any) -> None:
    """Refuse what is no text where that is meant."""
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{name} must be text, got {quote(repr(value))}")


def check_choice(name: str, value: Any, kind: type = ModelFields) -> None:
    """Refuse a word that a setting of a kind does not take."""
    choices = next(_words(each.type) for each in settings_of(kind) if each.name == name)
    if value is not None and choices and value not in choices:
        raise UsageError(
            f"{name} must be one of {', '.join(choices)}, got {quote(repr(value))}",
            hint=did_you_mean(str(value), choices),
        )


def _words(kind: Any) -> tuple[str, ...]:
    """Return the words that a type allows; none where it allows others."""
    for each in (kind, *get_args(kind)):
        if get_origin(each) is Literal:
            return get_args(each)
    return ()


def _check_choices(kind: type, given: Mapping[str, Any]) -> None:
    for each in settings_of(kind):
        if each.name in given and _words(each.type):
            check_choice(each.name, given[each.name], kind)


def _check_words(given: Mapping[str, Any]) -> None:
    """Refuse what is neither text nor a number where that is meant."""
    for name in ("prompt", "system", "prefill", "allocator"):
        check_text(name, given.get(name))
    seed = given.get("seed")
    if seed is not None and not (_is_whole(seed) and 0 <= seed <= LARGEST_SEED):
        raise UsageError(f"seed must be a whole number from 0, got {quote(repr(seed))}")
    heat = given.get("temperature")
    if heat is not None and (isinstance(heat, bool) or not isinstance(heat, (int, float))):
        raise UsageError(f"temperature must be a number, got {quote(repr(heat))}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _path(given: Any, name: str) -> str | None:
    if given is None or isinstance(given, (str, Path)):
        return None if given is None else str(given)
    raise UsageError(f"{name} must be a file, got {quote(repr(given))}")


def _read_cache(cache: Any) -> Any:
    if cache is None or isinstance(cache, (str, Path)):
        return _path(cache, "cache")
    from kvtool.cache.cache import KVCache

    if not isinstance(cache, KVCache):
        raise UsageError(
            f"cache must be a kvtool cache or its file, got {type(cache).__name__}",
            hint="cache=kvtool.compress(model, text, policy, budget)",
        )
    return cache


def _read_turns(turns: Any) -> str | Turns | None:
    if turns is None or isinstance(turns, (str, Path)):
        return _path(turns, "turns")
    from kvtool.documents.messages import make_turns

    if not isinstance(turns, Sequence):
        raise UsageError(f"turns must be a file or a list, got {quote(repr(turns))}")
    return make_turns(turns)
