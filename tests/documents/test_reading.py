import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtool.documents.files import expand, read_bytes, read_prompt
from kvtool.documents.messages import read_turns
from kvtool.documents.overrides import resolve_includes
from kvtool.documents.source import Source, read_source
from kvtool.errors import UsageError
from kvtool.evaluation.samples.haystack import haystack
from kvtool.policies.allocate.duo import read_scores

NOBODY = "~no-such-user/x"


def test_home_folders_are_put_in_place(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand("~/a/b") == tmp_path / "a" / "b"
    assert expand("a/~") == Path("a/~")


def test_a_path_that_can_lead_nowhere_is_refused_in_one_line():
    for path in (NOBODY, "~" + "x" * 300, "a\0b"):
        with pytest.raises(UsageError) as caught:
            expand(path)
        assert len(str(caught.value)) < 900
        assert path[:10] in str(caught.value)


def test_an_include_of_no_path_at_all_is_told_at_its_place():
    source = Source.parse('kind: recipe\ninclude: ["a\\0b", ~no-such-user/x]\n', "a.yaml")
    with pytest.raises(UsageError) as caught:
        resolve_includes(source)
    first, second = map(str, caught.value.problems)
    assert first.startswith("a.yaml:2:11: include.0: no path holds a null byte")
    assert second.startswith("a.yaml:2:19: include.1: `~no-such-user/x`: no home folder is known")


READERS = {
    "document": lambda path: read_source(path, option="recipe"),
    "prompt": read_prompt,
    "turns": read_turns,
    "head scores": lambda path: read_scores(path, (1, 1)),
    "haystack": haystack,
}


@pytest.mark.parametrize("kind", READERS)
def test_what_does_not_end_is_not_read(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.symlink("/dev/zero", "link")
    for path in ("pipe", "/dev/zero", "link"):
        with pytest.raises(UsageError, match="is no regular file"):
            READERS[kind](path)
    with pytest.raises(UsageError, match="no home folder is known for"):
        READERS[kind](NOBODY)
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(2**40)  # takes no space
    with pytest.raises(UsageError, match=r"is larger than (4|64) MiB, too large for a"):
        READERS[kind](str(path))


def test_stdin_that_does_not_end_is_refused(monkeypatch):
    with open("/dev/zero", "rb") as stream:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stream, isatty=lambda: False))
        with pytest.raises(UsageError, match="stdin is larger than 64 MiB, too large for a text"):
            read_prompt("-")
        with pytest.raises(UsageError, match="stdin is larger than 4 MiB, too large for a docum"):
            read_source("-", option="recipe")


def test_what_a_shell_hands_over_as_a_file_is_read():
    code = "from kvtool.documents.files import *; import sys; p = sys.argv[1]\n"
    code += "print(read_bytes(expand(p), p).decode())"
    for place in ("<(printf hello)", "/dev/stdin < <(printf hello)", "/dev/fd/0 < <(printf hello)"):
        command = f"{sys.executable} -c '{code}' {place}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert (done.stdout.strip(), done.returncode) == ("hello", 0), done.stderr


def test_what_a_pipe_brings_is_limited_as_well():
    ours, theirs = os.pipe()
    threading.Thread(target=lambda: (os.write(theirs, b"x" * 1000), os.close(theirs))).start()
    with pytest.raises(UsageError, match=r"^it is larger than 0 MiB"):
        read_bytes(Path(f"/dev/fd/{ours}"), "it", most=999)
    os.close(ours)
