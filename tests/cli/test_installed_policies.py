"""Policies that an installed package adds to the table by its entry points."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvtool.errors import UsageError
from kvtool.policies import installed as module
from kvtool.policies.grammar import check_imported, parse_policy

SCORE = '''
from dataclasses import dataclass
from typing import ClassVar
from kvtool.policies.parts import Score


@dataclass(frozen=True)
class Oldest(Score):
    """Keep the first tokens."""

    seed: int = 0

    name: ClassVar = "oldest"
    paper: ClassVar = "-"

    def importance(self, state, view, rows):
        return -view.positions.float()
'''
ENTRIES = """[kvtool.policies]
Oldest = added_policies.oldest:Oldest
h2o = added_policies.oldest:Oldest
gone = added_policies.nowhere:Gone
formless = added_policies
raising = added_policies.raising:Raising
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package on the path with its metadata, as pip leaves it."""
    folder = tmp_path / "added_policies"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "oldest.py").write_text(SCORE)
    (folder / "raising.py").write_text("raise RuntimeError('no such\\ndevice')\n")
    info = tmp_path / "added_policies-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: added-policies\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    module.installed.cache_clear()
    yield tmp_path
    module.installed.cache_clear()
    for name in [each for each in sys.modules if each.startswith("added_policies")]:
        del sys.modules[name]


def test_a_name_of_a_package_is_a_policy(package):
    policy = parse_policy("oldest(seed=3)+int8")
    assert str(policy) == "added_policies.oldest:Oldest(seed=3)+int8"
    assert parse_policy("OLDEST") == parse_policy("added_policies.oldest:Oldest")
    assert str(parse_policy("h2o")) == "h2o"  # kvtool's own stays


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone", "policy `gone` of package added-policies 1.2: no module named"),
        ("formless", "policy `formless` of package added-policies 1.2: cannot read"),
        ("raising", "cannot import module `added_policies.raising`: RuntimeError: no such$"),
    ],
)
def test_a_broken_one_is_one_line(package, name, message):
    with pytest.raises(UsageError, match=message):
        parse_policy(name)


def test_a_file_does_not_import_it(package):
    with pytest.raises(UsageError, match=r"own\.yaml` names policy `h2o,added_policies\.oldest"):
        check_imported(["h2o,oldest(seed=2)+int8"], "own.yaml", "a recipe")
    with pytest.raises(UsageError, match="is not imported"):
        parse_policy("oldest", imports=False)
    assert "added_policies.oldest" not in sys.modules
    parse_policy("oldest")
    check_imported([{"name": "oldest", "seed": 2}, "h2o", None], "own.yaml", "a recipe")
    assert parse_policy("oldest", imports=False).score.name == "oldest"


def test_the_list_says_where_each_comes_from_and_warns_in_lines(package, kvtool):
    done = kvtool("policies", "-f", "json")
    assert done.code == 0
    entries = {each["name"]: each for each in json.loads(done.out)}
    assert entries["oldest"]["origin"] == "added-policies 1.2"
    assert entries["oldest"]["summary"] == "Keep the first tokens."
    assert entries["h2o"]["origin"] == "kvtool"
    warnings = done.err.splitlines()
    assert len(warnings) == 4
    assert all(line.startswith("warning: policy `") for line in warnings)
    assert "warning: policy `h2o` of package added-policies 1.2 has a name of kvtool's" in warnings
    text = kvtool("policies", "-f", "text").out
    assert "tokens held after every step; from added-policies 1.2" in text


def test_known_names_read_no_entry_points():
    """So that the start of a command stays as it is."""
    program = (
        "import sys\nfrom kvtool.policies.grammar import parse_policy\n"
        "before = 'importlib.metadata' in sys.modules\n"
        "parse_policy('h2o(recent=8)+caote'), parse_policy('streaming')\n"
        "from kvtool.policies.installed import installed\n"
        "print(before, installed.cache_info().misses)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split()[1] == "0", done.stderr
