"""Answers to many prompts: a line of JSON each, in a file that grows as they are given."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, model_validator

from kvtool.documents.document import Section
from kvtool.documents.files import lock, write_text, writing
from kvtool.documents.prompts import PromptEntry
from kvtool.documents.readers import load_json
from kvtool.documents.source import reason
from kvtool.errors import UsageError


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
