"""What a Python call is given, made into settings: the mistakes that only Python can make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvtool.calls.settings import CompressionSettings, PromptSettings
from kvtool.documents.flags import MODEL_SETTINGS
from kvtool.errors import UsageError, did_you_mean, quote
from kvtool.sizes import LARGEST_SEED, Budget

if TYPE_CHECKING:
    from kvtool.documents.turns import Turns
    from kvtool.policies.policy import Policy


class Unsaid(Enum):
    """Nothing said of a policy, where None is a mistake."""

    UNSAID = "unsaid"

    def __repr__(self) -> str:
        return "..."


UNSAID = Unsaid.UNSAID
Settings = TypeVar("Settings", bound=PromptSettings)

_FILES = ("prompt_file", "save", "show")
_CHOICES = {
    "chat_template": ("auto", "on", "off"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "attn_implementation": ("auto", "eager", "sdpa", "flash_attention_2"),
}


def given_settings(
    kind: type[Settings],
    model: Any,
    tokenizer: Any,
    model_settings: Mapping[str, Any],
    *,
    plan: Any,
    **given: Any,
) -> Settings:
    """Return what a call is asked to do, in the form in which a command is asked.

    Args:
        kind: of settings.
        model: a name, a path or a loaded model (then with its tokenizer).
        plan: a plan or recipe as a document, its data or its file.
        given: the other settings by name.

    Raises:
        TypeError: a model setting that there is not.
        UsageError: a value of a type that means nothing here.
    """
    check_model_settings(model_settings, "compress" if kind is CompressionSettings else "generate")
    from kvtool.models.attached import ModelSource

    source = ModelSource.of(model, tokenizer)
    named = dict(model_settings)
    named["dtype"] = spell_dtype(named.get("dtype"))
    check_choice("dtype", named["dtype"])
    check_choice("attn_implementation", named.get("attn_implementation"))
    _check_words(given)
    given["policy"] = read_policy(given["policy"])
    given["budget"] = read_budget(given["budget"])
    for name in _FILES:
        given[name] = _path(given[name], name)
    if given["show"] == "-":
        raise UsageError(
            "show='-' is for the command line", hint="print(cache.show()) of kvtool.compress"
        )
    if "cache" in given:
        given["cache"] = _read_cache(given["cache"])
    if "turns" in given:
        given["turns"] = _read_turns(given["turns"])
    if plan is not None:
        from kvtool.documents.given import document_of

        given["recipe"] = document_of(plan, "a plan or recipe")
    return kind(model=source.name, loaded=source.loaded, **named, **given)


def check_model_settings(given: Mapping[str, Any], call: str) -> None:
    """Refuse a keyword that neither a call nor the loading of its model has."""
    unknown = given.keys() - set(MODEL_SETTINGS)
    if unknown:
        raise TypeError(f"{call}() got an unexpected keyword argument {min(unknown)!r}")


def read_policy(policy: Any) -> str | Policy | None:
    """Return a policy or its string; None where nothing was said.

    Raises:
        UsageError: None, or no policy.
    """
    if policy is UNSAID:
        return None
    from kvtool.policies.grammar import parse_policy

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


def check_choice(name: str, value: Any) -> None:
    """Refuse a word that a setting does not take."""
    choices = _CHOICES[name]
    if value is not None and value not in choices:
        raise UsageError(
            f"{name} must be one of {', '.join(choices)}, got {quote(repr(value))}",
            hint=did_you_mean(str(value), choices),
        )


def _check_words(given: Mapping[str, Any]) -> None:
    """Refuse what is neither text nor a number where that is meant."""
    for name in ("prompt", "system", "prefill", "allocator"):
        check_text(name, given[name])
    check_choice("chat_template", given["chat_template"])
    seed = given["seed"]
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
    from kvtool.documents.turns import make_turns

    if not isinstance(turns, Sequence):
        raise UsageError(f"turns must be a file or a list, got {quote(repr(turns))}")
    return make_turns(turns)
