import errno
import os
import re
import stat
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvtool.documents import files
from kvtool.documents.files import check_writable, temporaries_of, write_text, write_with
from kvtool.errors import KvtoolError, UsageError


def test_a_failure_keeps_the_old_file(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")

    def fail(temporary):
        temporary.write_text("half")
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        write_with(path, fail)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.txt"]


def test_readers_never_see_a_part(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")

    def look(temporary):
        temporary.write_text("new")
        assert path.read_text() == "old"

    with path.open() as begun:
        write_with(path, look)
        assert begun.read() == "old"  # another file has taken its place
    assert path.read_text() == "new"


def test_permissions_are_those_of_any_new_file(tmp_path):
    plain, path = tmp_path / "plain", tmp_path / "out"
    plain.write_text("")
    write_text(path, "")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    path.chmod(0o640)
    write_text(path, "again")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    write_text(Path("/dev/null"), "gone")  # nor is a device replaced
    assert Path("/dev/null").is_char_device()


def test_what_the_system_refuses_is_one_line(tmp_path):
    with pytest.raises(KvtoolError, match=r"cannot write `.*gone/out`: No such file or directory"):
        write_text(tmp_path / "gone" / "out", "")


def test_refuses_paths_before_the_work(tmp_path):
    with pytest.raises(UsageError, match=r"--save: folder `.*gone` does not exist"):
        check_writable(tmp_path / "gone" / "out", "--save")
    with pytest.raises(UsageError, match=r"--output: `.*` is a folder, not a file"):
        check_writable(tmp_path, "--output")
    check_writable(tmp_path / "out", "--save")


def test_a_name_that_leaves_no_room_for_a_temporary_is_written_as_well(tmp_path):
    for name in ("x" * 251 + ".txt", "ä" * 127):
        check_writable(tmp_path / name, "--save")
        write_text(tmp_path / name, "zwei\nÄpfel\n")
        assert (tmp_path / name).read_bytes() == "zwei\nÄpfel\n".encode()
        assert os.listdir(tmp_path) == [name]
        (tmp_path / name).unlink()


def test_a_name_too_long_is_refused_at_once(tmp_path):
    long = ("x" * 256, "ä" * 128, "y" * 300 + "/a.st", "/".join(["z" * 200] * 25))
    for path in long:
        told = "--save: a file name has at most 255 bytes, a path 4095, got"
        with pytest.raises(UsageError, match=re.escape(told)):
            check_writable(tmp_path / path, "--save")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device")
def test_a_device_that_takes_nothing_is_found_before_the_work(tmp_path):
    check_writable(Path("/dev/null"), "--output")
    with pytest.raises(UsageError, match="`/dev/full` is not writable: No space left on device"):
        check_writable(Path("/dev/full"), "--output")
    (tmp_path / "link").symlink_to("/dev/full")
    with pytest.raises(UsageError, match="No space left"):
        check_writable(tmp_path / "link", "--output")


def test_a_pipe_that_nobody_reads_yet_does_not_hold_up_the_check(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    check_writable(tmp_path / "pipe", "--output")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no such file system")
def test_a_folder_that_takes_no_files_is_found_though_its_mode_allows_it(tmp_path):
    with pytest.raises(UsageError, match=r"--output: `/proc/out.yaml` is not writable: "):
        check_writable(Path("/proc/out.yaml"), "--output")


def test_checking_leaves_nothing(tmp_path):
    (tmp_path / "old").write_text("old")
    check_writable(tmp_path / "old", "--save")
    check_writable(tmp_path / "new", "--save")
    assert os.listdir(tmp_path) == ["old"]
    assert (tmp_path / "old").read_text() == "old"


def test_temporaries_are_told_from_other_files(tmp_path):
    path = tmp_path / "results.json"
    left = tmp_path / ".results.json.x1y2_z3a.part"
    for other in (left, path, tmp_path / "results.json.part", tmp_path / ".results.json.copy.part"):
        other.write_text("")
    assert temporaries_of(path) == [left]


WRITER = """
import sys, time
from pathlib import Path
from kvtool.documents.files import write_with

def write(temporary):
    temporary.write_text("half")
    print("begun", flush=True)
    sys.stdin.readline()
    temporary.write_text("whole")

write_with(Path(sys.argv[1]), write)
"""


def start_writer(path):
    """Start a process that is in the middle of a write until it is asked to go on."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    writer = subprocess.Popen([sys.executable, "-c", WRITER, path], text=True, **pipes)
    assert writer.stdout.readline() == "begun\n"
    return writer


@pytest.mark.skipif(find_spec("fcntl") is None, reason="no locks on this system")
def test_the_next_write_deletes_what_a_killed_one_has_left(tmp_path):
    path, other = tmp_path / "out.txt", tmp_path / ".out.txt.backup.part"
    other.write_text("not ours")
    for _ in range(2):
        with start_writer(path) as writer:
            writer.kill()
    left = temporaries_of(path)
    assert [each.read_text() for each in left] == ["half"], "the second writer found the first's"
    assert not path.exists()
    write_text(tmp_path / "out", "a name that begins alike")
    assert temporaries_of(path) == left
    write_text(path, "new")
    assert sorted(os.listdir(tmp_path)) == [".out.txt.backup.part", "out", "out.txt"]


def test_what_a_living_writer_writes_is_left_to_it(tmp_path):
    path = tmp_path / "out.txt"
    with start_writer(path) as writer:
        (temporary,) = temporaries_of(path)
        write_text(path, "new")
        assert temporaries_of(path) == [temporary]
        assert path.read_text() == "new"
        writer.communicate("go on\n")
    assert writer.returncode == 0
    assert path.read_text() == "whole"
    assert os.listdir(tmp_path) == ["out.txt"]


@pytest.mark.skipif(find_spec("fcntl") is None, reason="no locks on this system")
def test_a_temporary_that_was_swept_before_it_was_locked_is_made_anew(tmp_path, monkeypatch):
    made, lock = [], files.lock

    def sweep_first(handle):
        made.append(temporaries_of(tmp_path / "out.txt"))
        if len(made) == 1:
            made[0][0].unlink()
        return lock(handle)

    monkeypatch.setattr(files, "lock", sweep_first)
    write_text(tmp_path / "out.txt", "new")
    assert len(made) == 2
    assert made[0] != made[1]
    assert os.listdir(tmp_path) == ["out.txt"]


def test_where_no_file_can_be_locked_nothing_is_swept(tmp_path, monkeypatch):
    def refuse(handle, wait=True):
        raise OSError(errno.ENOSYS, "no locks here")

    left = tmp_path / ".out.txt.x1y2_z3a.part"
    left.write_text("half")
    monkeypatch.setattr(files, "lock", refuse)
    write_text(tmp_path / "out.txt", "new")
    assert (tmp_path / "out.txt").read_text() == "new"
    assert left.exists()
