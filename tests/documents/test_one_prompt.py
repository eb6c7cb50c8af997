import io
import sys

import pytest

from kvtool.documents.files import check_prompt, read_prompt
from kvtool.errors import UsageError


def test_reads_a_file_and_stdin_alike(tmp_path, monkeypatch):
    for data, text in [
        (b"one two", "one two"),
        (b"one two\n", "one two"),
        (b"one two\r\n", "one two"),
        (b"one two\n\n", "one two\n"),
        (b"\xef\xbb\xbfone", "one"),
        ("schön 漢字".encode(), "schön 漢字"),
    ]:
        path = tmp_path / "prompt.txt"
        path.write_bytes(data)
        assert read_prompt(str(path)) == text
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert read_prompt("-") == text


def test_refuses_what_is_no_prompt(tmp_path):
    path = tmp_path / "prompt.txt"
    for data, message in (
        (b"\n \n", "is empty"),
        (b"ab\xff", "is not UTF-8: byte 0xff at offset 2"),
    ):
        path.write_bytes(data)
        with pytest.raises(UsageError, match=f"prompt file `.*` {message}"):
            read_prompt(str(path))
    with pytest.raises(UsageError, match=r"prompt file `.*gone`: No such file"):
        read_prompt(str(tmp_path / "gone"))
    with pytest.raises(UsageError, match=r"prompt file `.*`: Is a directory"):
        read_prompt(str(tmp_path))


def test_refuses_bytes_that_the_shell_could_not_decode():
    with pytest.raises(UsageError, match="--prompt is not UTF-8: stray byte at character 2"):
        check_prompt("a\udcff", "--prompt")
