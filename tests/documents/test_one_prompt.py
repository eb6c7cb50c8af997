import io
import sys

import pytest

from kvtool.documents.files import check_prompt, read_prompt
from kvtool.errors import UsageError


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"one two", "one two"),
        (b"one two\n", "one two"),
        (b"one two\r\n", "one two"),
        (b"one two\n\n", "one two\n"),
        (b"\xef\xbb\xbfone", "one"),
        ("schön 漢字".encode(), "schön 漢字"),
    ],
)
def test_reads_a_file_and_stdin_alike(tmp_path, monkeypatch, data, text):
    path = tmp_path / "prompt.txt"
    path.write_bytes(data)
    assert read_prompt(str(path)) == text
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert read_prompt("-") == text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"prompt file `.*` is empty"),
        (b"\n \n", r"prompt file `.*` is empty"),
        (b"ab\xffcd", r"prompt file `.*` is not UTF-8: byte 0xff at offset 2"),
    ],
)
def test_refuses_what_is_no_prompt(tmp_path, data, message):
    path = tmp_path / "prompt.txt"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=message):
        read_prompt(str(path))


def test_refuses_what_is_no_file(tmp_path):
    with pytest.raises(UsageError, match=r"prompt file `.*gone` does not exist"):
        read_prompt(str(tmp_path / "gone"))
    with pytest.raises(UsageError, match=r"prompt file `.*` is a folder"):
        read_prompt(str(tmp_path))


def test_refuses_bytes_that_the_shell_could_not_decode():
    with pytest.raises(UsageError, match="--prompt is not UTF-8: stray byte at character 2"):
        check_prompt("a\udcff", "--prompt")
