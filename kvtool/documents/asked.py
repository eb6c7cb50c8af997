"""Many prompts from a file of JSON Lines, and the file of their answers.

A prompt is `{"prompt": "text"}`, with `id` and `max_new_tokens` where they are wanted, or a JSON
string, or a conversation whose last message is answered: `{"messages": [..]}`, as OpenAI writes it,
or `{"conversations": [..]}`, as ShareGPT does.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    ConfigDict,
    NonNegativeInt,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from kvtool.documents.document import Section, TokenCount
from kvtool.documents.files import fcntl, write_text
from kvtool.documents.json_reader import load_json, parse_json
from kvtool.documents.messages import LISTS, Message, check_order, read_conversation
from kvtool.documents.problems import DocumentError, Mark, Problem
from kvtool.documents.prompts import read_utf8
from kvtool.documents.validation import reason, show
from kvtool.errors import KvtoolError, UsageError

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


class AskedPrompt(Section):
    """A prompt of many: a text, or messages of which the last one is answered.

    Attributes:
        prompt: the text; None: there are messages.
        messages: in the order in which they were said; None: there is a text.
        id: that its answer bears; None: none.
        max_new_tokens: of its answer; None: as many as of all others.
        bad: why it cannot be asked; None: it can.
    """

    model_config = ConfigDict(strict=True)

    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    id: str | int | None = None
    max_new_tokens: TokenCount | None = None
    bad: str | None = None


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
    def of_bad(cls, index: int, asked: AskedPrompt, why: str) -> AnswerLine:
        """Return the line of a prompt that cannot be answered."""
        return cls(
            index=index,
            id=asked.id,
            text="",
            token_ids=[],
            prompt_tokens=0,
            new_tokens=0,
            error=why,
        )

    def to_line(self) -> str:
        """Return the answer as a line of JSON; only a line without an answer has an `error`."""
        missing = {name for name in ("error", "fingerprint") if getattr(self, name) is None}
        data = self.model_dump(mode="json", exclude=missing)
        return json.dumps(data, ensure_ascii=False) + "\n"


def read_prompts(path: str, *, keep_bad: bool = False) -> list[AskedPrompt]:
    """Read a file of prompts, `-` for stdin; blank lines are left out.

    Args:
        keep_bad: whether a line that is no prompt becomes one that says why it cannot be asked.

    Raises:
        UsageError: missing, unreadable, not UTF-8, or without a prompt.
        DocumentError: every line that is no prompt, with its number.
    """
    name, text = read_utf8(path, "prompts file")
    shown = "<stdin>" if path == "-" else path
    prompts: list[AskedPrompt] = []
    problems: list[Problem] = []
    ids: dict[str | int, Mark] = {}
    for mark, read in _items(text, shown):
        try:
            asked = _read_prompt(read())
            if asked.id is not None and asked.id in ids:
                first = f"first in line {ids[asked.id].line}"
                raise ValueError(f"id {show(asked.id)} is given twice, {first}")
        except ValueError as error:
            problems.append(_problem(mark, error))
            prompts.append(AskedPrompt(bad=str(problems[-1])))
            continue
        if asked.id is not None:
            ids[asked.id] = mark
        prompts.append(asked)
    if problems and not keep_bad:
        raise DocumentError(problems, hint=_HINT)
    if not prompts:
        raise UsageError(f"{name} holds no prompt", hint=_HINT)
    return prompts


def _items(text: str, shown: str) -> Iterator[tuple[Mark, Callable[[], Any]]]:
    """Yield places and readers of the lines, or of the items of a file that is one JSON array."""
    if text.lstrip().startswith("[") and _is_list(text):
        for item in parse_json(text, shown).value:
            yield item.mark, partial(getattr, item, "data")
        return
    start = 0
    for line in text.split("\n"):
        if line.strip():
            yield Mark(shown, text, start), partial(load_json, line, unique=True)
        start += len(line) + 1


def _problem(mark: Mark, error: ValueError) -> Problem:
    """Say what is wrong with a line, and where."""
    if isinstance(error, json.JSONDecodeError):
        place = replace(mark, at=(mark.index or 0) + error.pos)
        return Problem(place, (), f"is not JSON: {error.msg.lower()}")
    return Problem(mark, (), _told(error))


def _is_list(text: str) -> bool:
    try:
        return isinstance(load_json(text), list)
    except ValueError:
        return False


def make_prompts(items: Sequence[Any], *, keep_bad: bool = False) -> list[AskedPrompt]:
    """Return the prompts of a list, each of them as a line of a file has it.

    Args:
        keep_bad: as for `read_prompts`.

    Raises:
        UsageError: none, or one that is none.
    """
    prompts, ids = [], set[str | int | None]()
    for place, item in enumerate(items):
        try:
            asked = _read_prompt(item)
            if asked.id is not None and asked.id in ids:
                raise ValueError(f"id {show(asked.id)} is given twice")
        except ValueError as error:
            if not keep_bad:
                raise UsageError(f"prompt {place}: {_told(error)}", hint=_HINT) from None
            asked = AskedPrompt(bad=_told(error))
        ids.add(asked.id)
        prompts.append(asked)
    if not prompts:
        raise UsageError("there is no prompt", hint=_HINT)
    return prompts


def _read_prompt(value: Any) -> AskedPrompt:
    if not isinstance(value, dict) or not any(key in value for key in LISTS):
        text = {"prompt": value} if isinstance(value, str) else value
        line = _TextLine.model_validate(text)
        return AskedPrompt(prompt=line.prompt, id=line.id, max_new_tokens=line.max_new_tokens)
    beside = {key: value[key] for key in _Line.model_fields if key in value}
    more = _Line.model_validate(beside)
    messages = read_conversation({key: value[key] for key in value if key not in beside})
    check_order(messages)
    return AskedPrompt(messages=tuple(messages), id=more.id, max_new_tokens=more.max_new_tokens)


def _told(error: ValueError) -> str:
    first = error.errors()[0]["type"] if isinstance(error, ValidationError) else ""
    return "the prompt is empty" if first == "string_pattern_mismatch" else reason(error)


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
        """Hold the file, read it, and cut off a last line that is not whole.

        Raises:
            UsageError: another run writes to it, or it holds something else.
        """
        try:
            file = self._path.open("a+b")
        except OSError as error:
            raise KvtoolError(f"cannot write `{self._path}`: {error.strerror or error}") from error
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
        """Add an answer, at once.

        Raises:
            KvtoolError: the system refused (no space, no permission).
        """
        try:
            with self._path.open("wb" if self._overwrite else "ab") as file:
                file.write(answer.to_line().encode())
        except OSError as error:
            raise KvtoolError(f"cannot write `{self._path}`: {error.strerror or error}") from error
        self._overwrite = False
        self.answers[answer.index] = answer

    def put_in_order(self) -> None:
        """Write the answers anew, atomically, in the order of their prompts."""
        if self._overwrite:  # nothing has been answered
            return
        lines = [self.answers[index].to_line() for index in sorted(self.answers)]
        write_text(self._path, "".join(lines))


def _lock(file: int, path: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"another run is writing to `{path}`",
            hint="wait for it, or choose another file with --output",
        ) from None
    except OSError:  # a file system without locks
        return
    with contextlib.suppress(OSError):
        if not os.path.samestat(os.fstat(file), os.stat(path)):
            raise UsageError(f"another run has just written `{path}`", hint="run it again")


def _read_answers(path: Path, data: bytes) -> dict[int, AnswerLine]:
    answers = TypeAdapter(AnswerLine)
    found: dict[int, AnswerLine] = {}
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            answer = answers.validate_python(load_json(line))
        except ValueError as error:
            raise UsageError(
                f"{path}:{number} is not the answer to a prompt: {reason(error)}",
                hint="choose another file with --output, or --overwrite",
            ) from None
        if answer.error is None:  # else it is tried again
            found.setdefault(answer.index, answer)
    return found
