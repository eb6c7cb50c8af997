"""Many prompts from a file of JSON Lines or from a list, and the file of their answers.

A prompt is `{"prompt": "text"}`, with `id` and `max_new_tokens` where they are wanted, or a JSON
string. It may also be a conversation whose last message is answered: `{"messages": [..]}`, as
OpenAI writes it, or `{"conversations": [..]}`, as ShareGPT does.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    ConfigDict,
    NonNegativeInt,
    model_validator,
)

from kvtool.documents.document import Section, TokenCount
from kvtool.documents.files import check_prompt, lock, read_utf8, write_text, writing
from kvtool.documents.messages import LISTS, Message, check_order, read_conversation
from kvtool.documents.readers import Item, json_array, json_lines, load_json, try_json
from kvtool.documents.source import problem_of, reason, show
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
    prompt: Annotated[str, AfterValidator(partial(check_prompt, source="the prompt"))]


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
    whole = text.lstrip().startswith("[") and isinstance(try_json(text), list)
    return _read(json_array(text, shown) if whole else json_lines(text, shown), name, keep_bad)


def make_prompts(items: Sequence[Any], *, keep_bad: bool = False) -> list[PromptEntry]:
    """Return the prompts of a list, each of them as a line of a file has it; see `read_prompts`."""
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
        return PromptEntry(**_TextLine.model_validate(text).model_dump())
    beside = {key: value[key] for key in _Line.model_fields if key in value}
    more = _Line.model_validate(beside)
    messages = read_conversation({key: value[key] for key in value if key not in beside})
    check_order(messages)
    return PromptEntry(messages=tuple(messages), **more.model_dump())


class AnswerLine(Section):
    """The answer to one of many prompts.

    Attributes:
        index: of the prompt in its file, from 0.
        token_ids: new tokens, an end-of-text token included.
        prompt_tokens: what was read, a chat template's text included.
        error: why there is none; such a line has no tokens.
        fingerprint: of what the answer depends on; files of earlier versions lack it.
    """

    model_config = ConfigDict(strict=True)

    index: NonNegativeInt
    id: str | int | None
    text: str
    token_ids: list[NonNegativeInt]
    prompt_tokens: NonNegativeInt
    new_tokens: NonNegativeInt
    fingerprint: dict[str, str] | None = None
    error: str | None = None

    @model_validator(mode="after")
    def _has_tokens(self) -> AnswerLine:
        if self.error is None and not self.token_ids:
            raise ValueError("`token_ids` holds no token")
        return self

    @classmethod
    def of_bad(cls, index: int, asked: PromptEntry, why: str) -> AnswerLine:
        """Return the line of a prompt that cannot be answered."""
        none: dict[str, Any] = {"text": "", "token_ids": [], "prompt_tokens": 0, "new_tokens": 0}
        return cls(index=index, id=asked.id, error=why, **none)

    def to_line(self) -> str:
        """Return the answer as a line of JSON; only a line without an answer has an `error`."""
        missing = {name for name in ("error", "fingerprint") if getattr(self, name) is None}
        data = self.model_dump(mode="json", exclude=missing)
        return json.dumps(data, ensure_ascii=False) + "\n"


class AnswersFile:
    """A file of answers that grows line by line, so that what is there is not answered again.

    Args:
        overwrite: whether the first answer deletes what is there.

    Attributes:
        answers: that it holds, by the index of their prompts.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self._path, self._overwrite = path, overwrite
        self.answers: dict[int, AnswerLine] = {}

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the file, which holds answers only, and cut off a last line that is not whole."""
        with writing(self._path):
            file = self._path.open("a+b")
        with file:
            _lock(file.fileno(), self._path)
            file.seek(0)
            data = b"" if self._overwrite else file.read()
            whole = data.rfind(b"\n") + 1
            self.answers = _read_answers(self._path, data[:whole])
            if whole < len(data):
                file.truncate(whole)
            yield

    def append(self, answer: AnswerLine) -> None:
        """Add an answer, at once."""
        with writing(self._path), self._path.open("wb" if self._overwrite else "ab") as file:
            file.write(answer.to_line().encode())
        self._overwrite = False
        self.answers[answer.index] = answer

    def put_in_order(self) -> None:
        """Write the answers anew, atomically, in the order of their prompts."""
        if self._overwrite:  # nothing has been answered
            return
        lines = [self.answers[index].to_line() for index in sorted(self.answers)]
        write_text(self._path, "".join(lines))


def _lock(file: int, path: Path) -> None:
    try:
        locked = lock(file, wait=False)
    except OSError:  # a file system without locks
        return
    if not locked:
        raise UsageError(
            f"another run is writing to `{path}`",
            hint="wait for it, or choose another file with --output",
        )
    with contextlib.suppress(OSError):
        if not os.path.samestat(os.fstat(file), os.stat(path)):
            raise UsageError(f"another run has just written `{path}`", hint="run it again")


def _read_answers(path: Path, data: bytes) -> dict[int, AnswerLine]:
    found: dict[int, AnswerLine] = {}
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            answer = AnswerLine.model_validate(load_json(line))
        except ValueError as error:
            raise UsageError(
                f"{path}:{number} is not the answer to a prompt: {reason(error)}",
                hint="choose another file with --output, or --overwrite",
            ) from None
        if answer.error is None:  # else it is tried again
            found.setdefault(answer.index, answer)
    return found
