"""`--version`, short and fast, and `python -m kvtool --version`, with all that a report needs."""

import re
import subprocess
import sys

import pytest
import torch
import transformers

import kvtool
from kvtool.cli.main import main
from kvtool.cli.versions import versions


def test_all_versions_are_listed():
    lines = dict(line.split(" ", 1) for line in versions().splitlines())
    names = ["kvtool", "Python", "torch", "transformers", "flash-attn", "triton", "GPU"]
    assert list(lines) == names
    assert lines["kvtool"] == kvtool.__version__
    assert lines["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert lines["transformers"] == transformers.__version__
    assert (lines["GPU"] == "none") == (not torch.cuda.is_available())


def test_a_package_that_is_missing_is_said_to_be(monkeypatch):
    from importlib.metadata import PackageNotFoundError

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("kvtool.cli.versions.version", missing)
    assert "triton not installed\n" in versions()


def test_a_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert versions().endswith("GPU NVIDIA H100, CUDA 13.0\n")


def test_the_command_says_its_own_version_alone(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvtool {kvtool.__version__}\n"


@pytest.mark.exhaustive
def test_the_module_says_them_all():
    done = subprocess.run(
        [sys.executable, "-m", "kvtool", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == versions()
    assert re.match(r"kvtool \S+\nPython ", done.stdout)
