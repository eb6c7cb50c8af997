"""Garbage is collected seldom until a command has its model, and as usual from then on."""

import gc
import subprocess
import sys

import pytest

from kvtool import garbage
from kvtool.models.attached import load_attached

USUALLY = gc.get_threshold()


@pytest.fixture(autouse=True)
def _as_before():
    yield
    gc.set_threshold(*USUALLY)


def test_a_command_begins_seldom_and_goes_on_as_usual():
    garbage.collect_seldom()
    assert gc.get_threshold()[0] > 100 * USUALLY[0]
    load_attached(None, {})
    assert gc.get_threshold() == USUALLY


def test_what_a_user_of_the_library_has_set_stays():
    gc.set_threshold(1234, 5, 6)
    load_attached(None, {})
    assert gc.get_threshold() == (1234, 5, 6)


def test_the_command_begins_so():
    code = (
        "import gc, sys\n"
        "from kvtool.cli.main import run\n"
        "try: run(['policies', 'h2o'])\n"
        "finally: sys.stderr.write(str(gc.get_threshold()[0]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, int(done.stderr)) == (0, 500_000)
