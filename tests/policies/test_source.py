"""The hash of a policy's code: what changes it, and what does not."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import pytest

import kvtool
from kvtool.policies.grammar import parse_policy
from kvtool.policies.source import source_hash
from tests.cli.test_outside_policies import SCORE

MODULE = "from my_hashed import helper\nfrom . import beside\n" + SCORE


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("my_hashed", "lone")]:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    package = tmp_path / "my_hashed"
    package.mkdir()
    files = {
        "__init__.py": "",
        "scores.py": MODULE,
        "helper.py": "def f():\n    import my_hashed.deep\n",
        "beside.py": "import lone\n",
        "deep.py": "X = 1\n",
        "unused.py": "X = 1\n",
        "../lone.py": "import json\n",
        "../stranger.py": "X = 1\n",
    }
    for name, text in files.items():
        (package / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    forget()
    yield package
    forget()


def hashed(policy="my_hashed.scores:MyScore"):
    forget()
    return source_hash(parse_policy(policy))


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("scores.py", True),
        ("helper.py", True),
        ("beside.py", True),
        ("deep.py", True),
        ("__init__.py", True),
        ("../lone.py", True),
        ("unused.py", False),
        ("../stranger.py", False),
    ],
)
def test_an_edit_of_any_module_that_is_imported_counts(folder, file, counts):
    before = hashed()
    assert hashed() == before
    with (folder / file).open("a") as text:
        text.write("Y = 2\n")
    assert (hashed() != before) is counts


def test_no_module_of_kvtool_is_read(folder, monkeypatch):
    """Another hash covers them, and parsing all takes seconds beside a clone."""
    monkeypatch.syspath_prepend(str(Path(kvtool.__file__).parents[1]))
    (folder / "../kvtool").symlink_to(Path(kvtool.__file__).parent)
    read = []
    monkeypatch.setattr("kvtool.policies.source.digest", lambda path: read.append(path) or "")
    hashed()
    assert {path.name for path in read} == {
        *("scores.py", "helper.py", "beside.py", "deep.py", "__init__.py", "lone.py")
    }


def test_code_that_is_loaded_counts_although_its_file_is_another_by_now(folder):
    """A module that is not loaded anew after an edit runs the old code under the new text."""
    hashed()
    edited = MODULE.replace('state["attention_sum"]', '-state["attention_sum"]')
    (folder / "scores.py").write_text(edited)
    stale = source_hash(parse_policy("my_hashed.scores:MyScore"))
    assert stale != hashed()


def test_a_class_without_a_file_counts_by_its_code(monkeypatch):
    from kvtool.policies.policy import Policy

    found = []
    for sign in ("", "-"):
        typed = types.ModuleType("typed_at_a_prompt")
        monkeypatch.setitem(sys.modules, "typed_at_a_prompt", typed)
        exec(SCORE.replace('state["attention_sum"]', f'{sign}state["attention_sum"]'), vars(typed))
        found.append(source_hash(Policy(typed.MyScore())))
    assert found[0] != found[1]


def test_a_file_that_a_setting_names_counts_by_its_content(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = []
    for text in ("0 1\n", "1 0\n", "0 1\n"):
        (tmp_path / "heads.tsv").write_text(text)
        found.append(source_hash(parse_policy("duoattention(scores=heads.tsv)")))
    assert found[0] == found[2] != found[1]


def test_policies_of_the_package_count_by_the_package():
    assert source_hash(parse_policy("h2o+caote")) == source_hash(parse_policy("snapkv"))
