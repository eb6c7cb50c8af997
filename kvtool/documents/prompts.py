"""Prompts from the command line, a file or stdin."""

from __future__ import annotations

from kvtool.documents.reading import expand, read_bytes, read_stdin
from kvtool.errors import UsageError


def check_prompt(text: str, source: str) -> str:
    """Return a prompt as it is, once it is known to be text that a tokenizer can read.

    Raises:
        UsageError: empty, or holding bytes that were not UTF-8 when the shell passed them.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{source} is not UTF-8: stray byte at character {error.start + 1}",
            hint="convert it, for example with iconv -t UTF-8",
        ) from None
    if not text.strip():
        raise UsageError(f"{source} is empty", hint="give it at least one word")
    return text


def read_prompt(path: str) -> str:
    """Read a prompt file, `-` for stdin. A newline at its end is not part of the prompt.

    Raises:
        UsageError: missing, unreadable, not UTF-8, or empty.
    """
    name, text = read_utf8(path, "prompt file")
    return check_prompt(text.removesuffix("\n").removesuffix("\r"), name)


def read_utf8(path: str, what: str) -> tuple[str, str]:
    """Read a text file, `-` for stdin.

    Args:
        what: the file in words, such as `prompt file`.

    Returns:
        What it is called in messages, and its text.

    Raises:
        UsageError: missing, unreadable, no regular file, over 64 MiB or not UTF-8.
    """
    name = "stdin" if path == "-" else f"{what} `{path}`"
    try:
        data = read_stdin() if path == "-" else read_bytes(expand(path), name)
    except FileNotFoundError:
        raise UsageError(f"{name} does not exist") from None
    except IsADirectoryError:
        raise UsageError(f"{name} is a folder") from None
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}") from None
    try:
        return name, data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}",
            hint="convert it, for example with iconv -f LATIN1 -t UTF-8",
        ) from None
