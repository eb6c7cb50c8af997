"""Read the requests of OpenAI clients: what is asked, and a reason where kvtool cannot do it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
)

from kvtool.documents.document import Section, TokenCount, listed
from kvtool.documents.files import check_prompt
from kvtool.documents.messages import Message, check_order, holds_nothing, read_message
from kvtool.documents.readers import load_json
from kvtool.documents.source import reason, show
from kvtool.errors import UsageError, did_you_mean
from kvtool.generation.serving import Drawing
from kvtool.sizes import LARGEST_SEED, check_temperature


class Refused(UsageError):
    """A request that is not answered, with the HTTP status that says so."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def _read_messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise UsageError(f"must be a list of messages, got {show(value)}")
    messages = tuple(_message(each, place) for place, each in enumerate(value))
    check_order(messages)
    return messages


def _message(value: Any, place: int) -> Message:
    try:
        if not isinstance(value, dict):
            raise UsageError(f"a message has `role` and `content`, got {show(value)}")
        if value.get("role") == "assistant":  # as this server has sent it
            value = {key: each for key, each in value.items() if key not in _SENT}
            if value.get("content") in ("", None) and "content" in value:
                empty = read_message(value | {"content": "."}, ("role", "content"))
                return Message(empty.role, "")
        value = {key: each for key, each in value.items() if key not in _NAMES}
        return read_message(value, ("role", "content"))
    except UsageError as error:
        raise UsageError(f"message {place}: {error}") from None


_SENT = ("reasoning_content", "refusal", "annotations", "audio", "tool_calls", "function_call")
_NAMES = ("name", "id", "type", "status", "phase")


def _only(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


class Choice(Section):
    """The policy and budget that a request chooses."""

    model_config = ConfigDict(strict=True)

    policy: str | None = None
    budget: int | str | None = None


class StreamOptions(Section):
    """What a stream holds beside its text; obfuscation is not done, and changes no text."""

    model_config = ConfigDict(strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False


class Ask(Section):
    """What a request asks for: an answer to messages, or to a prompt."""

    model_config = ConfigDict(strict=True)

    messages: Annotated[tuple[Message, ...], PlainValidator(_read_messages)] | None = None
    prompt: (
        Annotated[
            str,
            BeforeValidator(_only),
            AfterValidator(lambda text: check_prompt(text, "prompt")),
        ]
        | None
    ) = None
    model: str | None = None
    stream: bool = False
    temperature: Annotated[float, Field(le=2), AfterValidator(check_temperature)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = Field(
        default_factory=lambda: secrets.randbelow(2**31)  # which every client reads
    )
    stream_options: StreamOptions = StreamOptions()
    generation_config: Any = None  # of `transformers chat`, which takes a usage unasked
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(listed)] = Field(
        default_factory=list, max_length=16
    )
    kvtool: Choice = Choice()
    max_completion_tokens: TokenCount | None = None
    max_tokens: TokenCount | None = None
    max_output_tokens: TokenCount | None = None

    @property
    def max_new_tokens(self) -> int | None:
        """How long the answer may be; None: the request does not say."""
        return self.max_completion_tokens or self.max_tokens or self.max_output_tokens

    @property
    def drawing(self) -> Drawing:
        """How the answer is drawn."""
        return Drawing(self.temperature, self.seed, tuple(self.stop), self.top_p)


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
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "top_k": (-1, 0),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
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


def read_request(route: str, text: bytes) -> Ask:
    """Read the body of a request.

    Args:
        route: `chat`, `completion` or `response`.

    Raises:
        UsageError: it cannot be read, or asks for what cannot be done.
    """
    given = _known(route, _json(text, "the body"))
    if route == "response":
        given["messages"] = _input(given)
    given = _settings_of_transformers(given.get("generation_config")) | given
    needed = "prompt" if route == "completion" else "messages"
    if needed not in given:
        raise UsageError(f"{needed} is missing")
    try:
        return Ask.model_validate({key: given[key] for key in Ask.model_fields if key in given})
    except ValidationError as error:
        raise UsageError(reason(error)) from None


def _json(text: bytes | str, what: str) -> dict[str, Any]:
    try:
        found = load_json(text.decode() if isinstance(text, bytes) else text, unique=True)
    except ValueError as error:
        raise UsageError(f"{what} is not JSON: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{what} is a JSON object, got {show(found)}")
    return found


def _known(route: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a request says; what asks for nothing else than is done is left out."""
    known = (*_USED, *_ROUTES[route], *_IDLE)
    for key, value in body.items():
        if key in known or holds_nothing(value) or value in _ONLY.get(key, ()):
            continue
        if key in _ONLY or key in _NEVER:
            raise UsageError(f"kvtool serve does no `{key}` of {show(value)}; leave it out")
        raise UsageError(f"unknown key `{key}`", hint=did_you_mean(key, [*known, *_ONLY]))
    return {key: body[key] for key in known if body.get(key) is not None}


def _settings_of_transformers(given: Any) -> dict[str, Any]:
    """Return as OpenAI names them the settings that `transformers chat` sends as JSON."""
    if given is None:
        return {}
    found = given if isinstance(given, dict) else _json(str(given), "generation_config")
    found = {name: value for name, value in found.items() if not holds_nothing(value)}
    settings = {"max_new_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p"}
    for name, value in found.items():
        if name not in (*settings, "do_sample") and not _is_idle(name, value):
            raise UsageError(f"kvtool serve does no `{name}` of {show(value)}")
    chosen = {ours: found[name] for name, ours in settings.items() if name in found}
    heat = chosen.get("temperature", 1.0) if found.get("do_sample") is True else 0.0
    return chosen | {"temperature": heat}


def _is_idle(name: str, value: Any) -> bool:
    """Say whether a setting of transformers changes no answer."""
    if name in ("num_beams", "num_return_sequences", "repetition_penalty"):
        return value == 1
    idle = ("transformers_version", "use_cache", "return_dict_in_generate")
    return name in idle or name.startswith(("_", "output_")) or name.endswith("_token_id")


def _input(given: Mapping[str, Any]) -> list[Any]:
    """Return what the Responses API calls input as messages, its instructions the system's."""
    asked = given.get("input")
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    if not isinstance(asked, list) or not asked:
        raise UsageError(f"input is a text or a list of messages, got {show(asked)}")
    if isinstance(asked[0], dict) and "role" not in asked[0] and "text" in asked[0]:
        asked = [{"role": "user", "content": asked}]
    said = given.get("instructions")
    items = [] if holds_nothing(said) else [{"role": "system", "content": said}]
    for each in asked:
        if isinstance(each, dict) and each.get("type") == "reasoning":
            continue
        items.append(each)
    return items
