"""Many prompts from a file of JSON Lines or from a list.

A prompt is `{"prompt": "text"}`, with `id` and `max_new_tokens` where they are wanted, or a JSON
string. It may also be a conversation whose last message is answered: `{"messages": [..]}`, as
OpenAI writes it, or `{"conversations": [..]}`, as ShareGPT does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import ConfigDict, StringConstraints, ValidationError

from kvtool.documents.document import Section, TokenCount
from kvtool.documents.files import read_utf8
from kvtool.documents.messages import LISTS, Message, check_order, read_conversation
from kvtool.documents.readers import Item, json_array, json_lines, load_json
from kvtool.documents.source import problem_of, show
from kvtool.documents.tree import DocumentError, Mark, Problem
from kvtool.errors import UsageError

_HINT = (
    'a prompt is {"prompt": "text"} or {"messages": [..]}, with "id" and "max_new_tokens" if '
    "wanted, or a JSON string"
)


class _Line(Section):
    """What a line may say beside what is asked."""

    model_config = ConfigDict(strict=True)

    id: str | int | None = None
    max_new_tokens: TokenCount | None = None


class _TextLine(_Line):
    prompt: Annotated[str, StringConstraints(pattern=r"\S")]


class PromptEntry(_Line):
    """A prompt of many: a text, or messages, the last of which is answered.

    Attributes:
        prompt: the text; None: there are messages.
        messages: in the order in which they were said; None: there is a text.
        id: that its answer bears; None: none.
        max_new_tokens: of its answer; None: as many as of all others.
        bad: why it cannot be asked; None: it can.
    """

    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    bad: str | None = None


def read_prompts(path: str, *, keep_bad: bool = False) -> list[PromptEntry]:
    """Read a file of prompts, `-` for stdin; blank lines are left out.

    Args:
        keep_bad: whether a line that is no prompt becomes one that says why it cannot be asked.

    Raises:
        UsageError: missing, unreadable, not UTF-8, or without a prompt.
        DocumentError: every line that is no prompt, with its number.
    """
    name, text = read_utf8(path, "prompts file")
    shown = "<stdin>" if path == "-" else path
    whole = text.lstrip().startswith("[") and _is_list(text)
    return _read(json_array(text, shown) if whole else json_lines(text, shown), name, keep_bad)


def _is_list(text: str) -> bool:
    try:
        return isinstance(load_json(text), list)
    except ValueError:
        return False


def make_prompts(items: Sequence[Any], *, keep_bad: bool = False) -> list[PromptEntry]:
    """Return the prompts of a list, each of them as a line of a file has it.

    Args:
        keep_bad: as for `read_prompts`.

    Raises:
        UsageError: none.
        DocumentError: every item that is none.
    """
    marked = [
        (Mark(f"prompt {place}"), partial(lambda item: item, item))
        for place, item in enumerate(items)
    ]
    return _read(marked, "the list", keep_bad)


def _read(items: Iterable[Item], name: str, keep_bad: bool) -> list[PromptEntry]:
    prompts: list[PromptEntry] = []
    problems: list[Problem] = []
    ids: dict[str | int, Mark] = {}
    for mark, read in items:
        try:
            asked = _read_prompt(read())
            if asked.id is not None and asked.id in ids:
                first = ids[asked.id]
                where = f"line {first.line}" if first.in_text else first
                raise ValueError(f"id {show(asked.id)} is given twice, first in {where}")
        except ValueError as error:
            problems.append(problem_of(mark, error))
            prompts.append(PromptEntry(bad=str(problems[-1])))
            continue
        if asked.id is not None:
            ids[asked.id] = mark
        prompts.append(asked)
    if problems and not keep_bad:
        raise DocumentError(problems, hint=_HINT)
    if not prompts:
        raise UsageError(f"{name} holds no prompt", hint=_HINT)
    return prompts


def _read_prompt(value: Any) -> PromptEntry:
    if not isinstance(value, dict) or not any(key in value for key in LISTS):
        text = {"prompt": value} if isinstance(value, str) else value
        try:
            return PromptEntry(**_TextLine.model_validate(text).model_dump())
        except ValidationError as error:
            if error.errors()[0]["type"] == "string_pattern_mismatch":
                raise ValueError("the prompt is empty") from None
            raise
    beside = {key: value[key] for key in _Line.model_fields if key in value}
    more = _Line.model_validate(beside)
    messages = read_conversation({key: value[key] for key in value if key not in beside})
    check_order(messages)
    return PromptEntry(messages=tuple(messages), **more.model_dump())
