"""Read the requests of OpenAI clients: what is asked, and a reason where kvtool cannot do it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvtool.documents.files import check_prompt
from kvtool.documents.messages import Message, check_order, holds_nothing, read_message
from kvtool.documents.readers import load_json
from kvtool.documents.source import show
from kvtool.errors import UsageError, did_you_mean
from kvtool.generation.serving import Drawing
from kvtool.sizes import LARGEST_SEED, MOST_TOKENS, check_temperature


class Refused(UsageError):
    """A request that is not answered, with the HTTP status that says so."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Ask:
    """What a request asks for.

    Attributes:
        messages: of the conversation; None: there is a prompt.
        model: the name that it gives; None: it names none.
        max_new_tokens: None: it does not say.
        policy, budget: what it chooses under `kvtool`; None: nothing.
    """

    messages: tuple[Message, ...] | None
    prompt: str | None
    model: str | None
    max_new_tokens: int | None
    drawing: Drawing
    stream: bool
    policy: str | None = None
    budget: str | None = None


_USED = ("model", "stream", "stream_options", "temperature", "top_p", "seed", "kvtool")
_ROUTES: dict[str, tuple[str, ...]] = {
    "chat": ("messages", "max_tokens", "max_completion_tokens", "stop", "generation_config"),
    "completion": ("prompt", "max_tokens", "stop"),
    "response": ("input", "instructions", "max_output_tokens"),
}
_IDLE = (  # they change no answer
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "parallel_tool_calls", "verbosity", "include", "truncation"),
)
_ONLY: dict[str, tuple[Any, ...]] = {  # values that ask for what is done anyway
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}},),
    "modalities": (["text"],),
    "background": (False,),
}
_NEVER = (
    *("tools", "functions", "audio", "suffix", "logit_bias", "prediction", "reasoning"),
    *("reasoning_effort", "web_search_options", "previous_response_id", "conversation"),
    *("max_tool_calls", "prompt_cache_options", "moderation", "context_management"),
)


def read_request(route: str, text: bytes, names: Callable[[], str]) -> Ask:
    """Read the body of a request.

    Args:
        route: `chat`, `completion` or `response`.
        names: says which policies a request may choose.

    Raises:
        Refused: it cannot be read, or asks for what cannot be done.
    """
    try:
        body = load_json(text.decode("utf-8"))
    except UnicodeDecodeError:
        raise Refused("the body is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {' '.join(str(error).split())}") from None
    if not isinstance(body, dict):
        raise Refused(f"the body is a JSON object, got {show(body)}")
    _check_keys(route, body)
    chosen = _kvtool(body.get("kvtool"), names)
    settings = _settings(body)
    limits = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens")
    given = [_count(name, settings[name]) for name in limits if settings.get(name) is not None]
    messages, prompt = None, None
    if route == "completion":
        prompt = _prompt(body.get("prompt"))
    else:
        messages = _messages(body.get("messages")) if route == "chat" else _input(body)
    return Ask(
        messages,
        prompt,
        _text("model", body.get("model")),
        given[0] if given else None,
        _drawing(settings),
        _truth("stream", body.get("stream")),
        *chosen,
    )


def _check_keys(route: str, body: Mapping[str, Any]) -> None:
    known = (*_USED, *_ROUTES[route], *_IDLE)
    for key, value in body.items():
        if key in known or holds_nothing(value):
            continue
        if key in _ONLY:
            if value in _ONLY[key]:
                continue
            raise Refused(f"kvtool serve does no `{key}` of {show(value)}")
        if key in _NEVER:
            raise Refused(f"kvtool serve does not know `{key}`; leave it out")
        hint = did_you_mean(key, [*known, *_ONLY])
        raise Refused(f"unknown key `{key}`" + (f"; {hint}" if hint else ""))


def _settings(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a request; `transformers chat` sends them as a text of JSON."""
    given = body.get("generation_config")
    if given is None:
        return dict(body)
    try:
        found = load_json(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Refused("`generation_config` is a JSON object, or a text that holds one")
    names = ("max_new_tokens", "temperature", "top_p", "do_sample")
    settings = {name: found[name] for name in names if found.get(name) is not None}
    for name, value in found.items():
        if not (name in names or holds_nothing(value) or _is_idle(name, value)):
            raise Refused(f"kvtool serve does no `{name}` of {show(value)}")
    if settings.pop("do_sample", False) is True:
        settings.setdefault("temperature", 1.0)
    else:
        settings["temperature"] = 0.0
    own = {name: value for name, value in body.items() if value is not None}
    return settings | own


def _is_idle(name: str, value: Any) -> bool:
    """Say whether a setting of transformers changes no answer."""
    if name in ("num_beams", "num_return_sequences", "repetition_penalty"):
        return value == 1
    idle = ("transformers_version", "use_cache", "return_dict_in_generate")
    return name in idle or name.startswith(("_", "output_")) or name.endswith("_token_id")


def _drawing(settings: Mapping[str, Any]) -> Drawing:
    temperature = _number("temperature", settings.get("temperature"), 0.0, 2.0)
    try:
        check_temperature(temperature or 0.0, "temperature")
    except UsageError as error:
        raise Refused(str(error)) from None
    top_p = _number("top_p", settings.get("top_p"), 0.0, 1.0)
    if top_p == 0.0:
        raise Refused("top_p is above 0, got 0")
    seed = settings.get("seed")
    if seed is not None and not (type(seed) is int and 0 <= seed <= LARGEST_SEED):
        raise Refused(f"seed is a whole number from 0 to {LARGEST_SEED}, got {show(seed)}")
    return Drawing(temperature or 0.0, seed or 0, _stop(settings.get("stop")), top_p)


def _stop(value: Any) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value or []
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise Refused(f"stop is a text or a list of texts, got {show(value)}")
    if "" in given:
        raise Refused("stop holds an empty text, and every answer has that")
    if len(given) > 16:
        raise Refused(f"stop takes up to 16 texts, got {len(given)}")
    return tuple(_utf8("stop", each) for each in given)


def _kvtool(value: Any, names: Callable[[], str]) -> tuple[str | None, str | None]:
    """Read which policy and budget a request chooses."""
    if value is None:
        return None, None
    if not isinstance(value, dict):
        raise Refused(f"kvtool is an object with policy and budget, got {show(value)}")
    for key in value:
        if key not in ("policy", "budget"):
            raise Refused(f"kvtool is an object with policy and budget, and no `{key}`")
    policy, budget = value.get("policy"), value.get("budget")
    if policy is not None and not isinstance(policy, str):
        raise Refused(f"kvtool.policy is a text, got {show(policy)}; {names()}")
    if budget is not None and (type(budget) is bool or not isinstance(budget, (str, int))):
        raise Refused(f"kvtool.budget is a number of tokens or a text, got {show(budget)}")
    return policy, None if budget is None else str(budget)


def _prompt(value: Any) -> str:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if not isinstance(value, str):
        raise Refused(f"prompt is a text, got {show(value)}")
    try:
        return check_prompt(value, "prompt")
    except UsageError as error:
        raise Refused(str(error)) from None


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise Refused(f"messages is a list of messages, got {show(value)}")
    messages = []
    for place, each in enumerate(value):
        try:
            messages.append(_message(each))
        except UsageError as error:
            raise Refused(f"message {place}: {error}") from None
    try:
        check_order(messages)
    except UsageError as error:
        raise Refused(str(error)) from None
    return tuple(messages)


def _message(value: Any) -> Message:
    if not isinstance(value, dict):
        raise UsageError(f"a message has `role` and `content`, got {show(value)}")
    if value.get("role") == "assistant":  # as this server has sent it
        value = {key: each for key, each in value.items() if key != "reasoning_content"}
        if value.get("content") in ("", None) and "content" in value:
            empty = read_message(value | {"content": "."}, ("role", "content"))
            return Message(empty.role, "")
    message = read_message(value, ("role", "content"))
    return Message(message.role, _utf8("its text", message.content))


def _input(body: Mapping[str, Any]) -> tuple[Message, ...]:
    """Read what the Responses API calls input, with its instructions as the system message."""
    given = body.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise Refused(f"input is a text or a list of messages, got {show(given)}")
    if isinstance(given[0], dict) and "role" not in given[0] and "text" in given[0]:
        given = [{"role": "user", "content": given}]
    items = []
    for each in given:
        if isinstance(each, dict) and each.get("type") == "reasoning":
            continue
        if isinstance(each, dict) and each.get("type", "message") == "message":
            each = {key: each[key] for key in each if key not in ("type", "id", "status", "phase")}
        items.append(each)
    instructions = _text("instructions", body.get("instructions"))
    if instructions:
        items.insert(0, {"role": "system", "content": instructions})
    return _messages(items)


def _text(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise Refused(f"{name} is a text, got {show(value)}")
    return None if value is None else _utf8(name, value)


def _utf8(name: str, text: str) -> str:
    """Return a text that has no half of a surrogate pair, which no tokenizer reads."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise Refused(f"{name} holds half of a surrogate pair, which is no character") from None
    return text


def _truth(name: str, value: Any) -> bool:
    if value is not None and type(value) is not bool:
        raise Refused(f"{name} is true or false, got {show(value)}")
    return bool(value)


def _count(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MOST_TOKENS:
        raise Refused(f"{name} is a whole number of 1 or more, got {show(value)}")
    return value


def _number(name: str, value: Any, low: float, high: float) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise Refused(f"{name} is a number from {low:g} to {high:g}, got {show(value)}")
    return float(value) if math.isfinite(value) else low
