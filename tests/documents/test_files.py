import os
import stat
from pathlib import Path

import pytest

from kvtool.documents.files import check_writable, write_text, write_with
from kvtool.errors import KvtoolError, UsageError


def test_writes_the_text_and_nothing_beside_it(tmp_path):
    path = tmp_path / "out.txt"
    write_text(path, "zwei\nÄpfel\n")
    assert path.read_bytes() == "zwei\nÄpfel\n".encode()
    assert os.listdir(tmp_path) == ["out.txt"]


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

    write_with(path, look)
    assert path.read_text() == "new"


def test_permissions_are_those_of_any_new_file(tmp_path):
    plain, path = tmp_path / "plain", tmp_path / "out"
    plain.write_text("")
    write_text(path, "")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    path.chmod(0o640)
    write_text(path, "again")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_link_stays_a_link(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_device_is_written_to():
    write_text(Path("/dev/null"), "gone")


def test_what_the_system_refuses_is_one_line(tmp_path):
    with pytest.raises(KvtoolError, match=r"cannot write `.*gone/out`: No such file or directory"):
        write_text(tmp_path / "gone" / "out", "")


def test_refuses_paths_before_the_work(tmp_path):
    with pytest.raises(UsageError, match=r"--save: folder `.*gone` does not exist"):
        check_writable(tmp_path / "gone" / "out", "--save")
    with pytest.raises(UsageError, match=r"--output: `.*` is a folder, not a file"):
        check_writable(tmp_path, "--output")
    check_writable(tmp_path / "out", "--save")
