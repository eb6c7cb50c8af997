"""Streams that are closed before the command begins, and Python without docstrings."""

import subprocess
import sys

import pytest

KVTOOL = f"{sys.executable} -m kvtool"


def shell(line, folder):
    return subprocess.run(line, shell=True, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("line", "code", "out", "err"),
    [
        (f"{KVTOOL} policies h2o >&-", 1, "", "error: a standard stream is closed"),
        pytest.param(f"{KVTOOL} policies h2o 2>&-", 0, "h2o", "", marks=pytest.mark.exhaustive),
        pytest.param(f"{KVTOOL} policies <&- >&- 2>&-", 1, "", "", marks=pytest.mark.exhaustive),
        pytest.param(
            f"{KVTOOL} generate -p h2o --prompt-file - <&-",
            *(2, "", "error: cannot read stdin"),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_closed_stream_is_one_line_where_it_is_needed(line, code, out, err, tmp_path):
    done = shell(line, tmp_path)
    assert done.returncode == code, done.stderr
    assert done.stdout.startswith(out)
    assert done.stderr.startswith(err)
    assert "Traceback" not in done.stderr


@pytest.mark.exhaustive
def test_no_file_takes_the_place_of_a_closed_stream(tmp_path):
    """A file opened as stdout would hold what libraries print."""
    for name, closed in {"open": "", "stdout": ">&-", "all": "<&- >&- 2>&-"}.items():
        line = f"{KVTOOL} plan-budget -b 64 --context 1K -f json -o {name}.json {closed}"
        done = shell(line, tmp_path)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / f"{name}.json").read_bytes() == (tmp_path / "open.json").read_bytes()


def test_python_without_docstrings_is_refused_in_a_line(tmp_path):
    done = shell(f"{sys.executable} -OO -m kvtool policies", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: python -OO (PYTHONOPTIMIZE=2) leaves out docstrings")
