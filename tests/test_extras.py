"""Optional dependencies that are there and that are not."""

import sys

import pytest

from kvtool import extras
from kvtool.errors import UsageError


@pytest.fixture
def lacking(monkeypatch):
    """Hide packages."""

    def hide(*names):
        monkeypatch.setattr(extras, "find_spec", lambda name: None if name in names else object())

    return hide


@pytest.mark.parametrize("extra", ["eval", "plots", "lm-eval"])
def test_an_extra_that_is_there_is_accepted(extra, lacking):
    lacking()
    assert extras.installed(extra)
    extras.require(extra, needed_by="anything")


def test_one_missing_package_of_two_is_named(lacking):
    lacking("rouge_score")
    assert not extras.installed("eval")
    assert extras.installed("plots")
    with pytest.raises(UsageError, match=r"ROUGE needs rouge-score;") as caught:
        extras.require("eval", needed_by="ROUGE")
    assert caught.value.hint == "pip install 'kvtool[eval]'"


def test_all_missing_packages_are_named(lacking):
    lacking("rouge_score", "sacrebleu")
    with pytest.raises(UsageError, match="needs rouge-score and sacrebleu"):
        extras.require("eval", needed_by="it")


def test_looking_for_an_extra_imports_nothing():
    before = set(sys.modules)
    extras.installed("lm-eval")
    assert not {name for name in set(sys.modules) - before if name.startswith("lm_eval")}
