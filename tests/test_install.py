"""An editable install, used from the folder that holds the clone, whose name is the package's."""

import os
import shutil
import subprocess
import sys
import venv
from importlib.metadata import distributions
from pathlib import Path

import pytest

import kvtool

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone, installed into an environment of its own that uses this one's packages."""
    installed = {each.name: each.version for each in distributions()}
    if "pip" not in installed or int(installed.get("setuptools", "0").split(".")[0]) < 77:
        pytest.skip("pip and setuptools 77 are needed")
    place = tmp_path_factory.mktemp("place")
    folder = place / "kvtool"
    shutil.copytree(ROOT / "kvtool", folder / "kvtool", ignore=lambda *_: ["__pycache__"])
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, symlinks=os.name != "nt")
    python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
    (site,) = environment.rglob("site-packages")
    borrowed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "borrowed.pth").write_text("\n".join(borrowed))
    run(
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-build-isolation",
        "-e",
        folder,
    )
    return python, place


def run(*arguments, python=sys.executable, folder=None):
    """Return what a process prints, without this one's way to the package."""
    variables = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, *arguments], cwd=folder, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", ["beside", "inside", "elsewhere"])
def test_the_package_is_found_wherever_python_starts(clone, tmp_path, place):
    python, beside = clone
    folder = {"beside": beside, "inside": beside / "kvtool", "elsewhere": tmp_path}[place]
    found = run("-c", "import kvtool; print(kvtool.__file__)", python=python, folder=folder)
    assert Path(found.strip()).samefile(beside / "kvtool" / "kvtool" / "__init__.py")
    version = run("-m", "kvtool", "--version", python=python, folder=folder)
    assert version.splitlines()[0] == f"kvtool {kvtool.__version__}"


@pytest.mark.exhaustive
def test_torchrun_finds_the_package_beside_the_clone(clone):
    python, beside = clone
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "kvtool"]
    found = run(*torchrun, "--version", python=python, folder=beside)
    assert found.splitlines()[0] == f"kvtool {kvtool.__version__}"


@pytest.mark.exhaustive
def test_the_command_runs_beside_the_clone(clone):
    python, beside = clone
    command = python.with_name("kvtool.exe" if os.name == "nt" else "kvtool")
    done = subprocess.run([command, "--version"], cwd=beside, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"kvtool {kvtool.__version__}\n")
