"""Plants faults of one line into the package, one at a time, and says which test finds each.

`python -m tests.planted_faults` runs the tests that a fault names in a copy of the tree, until the
first one fails. Before and after a change of the tests it shows whether they still find as much.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
TIERS = {
    "default": "not slow and not gpu and not exhaustive",
    "exhaustive": "exhaustive and not slow and not gpu",
    "both": "not slow and not gpu",
}
"""What pytest selects by its markers in each tier."""
_LIMIT = 900  # seconds of one run of pytest
_POLL = 0.05  # seconds between two looks at whether it has ended
_PRELOADED = (
    "transformers.models.llama.modeling_llama",
    "hypothesis",
    "typer",
    "matplotlib.figure",
)


@dataclass(frozen=True)
class Fault:
    """A mistake of one line.

    Attributes:
        name: short words, which choose it on the command line.
        file: where it is, under `kvtool/`.
        old: a text that occurs there once.
        new: what replaces it.
        tests: paths of the tests that are most likely to find it.
        tier: the cheapest tier that does.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    tier: str = "default"


FAULTS = [
    Fault(**each | {"tests": tuple(each["tests"])})
    for each in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
]


@dataclass(frozen=True)
class Found:
    """What became of a fault.

    Attributes:
        test: the node id of the first test that failed with it and passes without; None: none did.
        why: what to say where there is no test.
        seconds: of the run with the fault.
    """

    fault: Fault
    test: str | None
    why: str
    seconds: float

    def to_data(self) -> dict[str, object]:
        """Return what a file of results holds."""
        fault = self.fault
        about = {"name": fault.name, "file": fault.file, "tier": fault.tier}
        return about | {"found": self.test, "why": self.why, "seconds": round(self.seconds, 1)}


class Outcomes:
    """A plugin of pytest that notes which tests passed, and which failed or could not be read."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.passed and report.when == "call":
            self.passed.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def to_text(self) -> str:
        """Write both down."""
        passed = [test for test in self.passed if test not in self.failed]
        return json.dumps({"passed": passed, "failed": self.failed})


def check(faults: Sequence[Fault]) -> list[str]:
    """Return a line for every fault that cannot be planted as it is written."""
    wrong = []
    for fault in faults:
        path = ROOT / "kvtool" / fault.file
        count = path.read_text("utf-8").count(fault.old) if path.is_file() else 0
        if count != 1 or "\n" in fault.old + fault.new or not fault.tests:
            wrong.append(f"{fault.name}: `{fault.old}` occurs {count} times in {fault.file}")
    names = [fault.name for fault in faults]
    return wrong + [f"{name}: the name is taken" for name in set(names) if names.count(name) > 1]


def copy_tree(folder: Path) -> None:
    """Copy what git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


@contextlib.contextmanager
def planted(fault: Fault, tree: Path) -> Iterator[None]:
    """Edit the copy, and restore it.

    No byte code is written beside it, which Python would take for that of another edit of the same
    size within the same second.
    """
    path = tree / "kvtool" / fault.file
    whole = path.read_bytes()
    path.write_text(whole.decode().replace(fault.old, fault.new), encoding="utf-8", newline="")
    try:
        yield
    finally:
        path.write_bytes(whole)


def run_pytest(tree: Path, options: Sequence[str], log: Path) -> tuple[int, dict[str, list[str]]]:
    """Run pytest in a copy of this process, which has imported what takes long.

    Args:
        log: a file for what it prints.

    Returns:
        Its exit code, -1 where the limit ended it, and the tests that passed and that failed.
    """
    note = log.with_suffix(".json")
    note.write_text(Outcomes().to_text(), encoding="utf-8")
    process = os.fork()
    if process == 0:
        code = 70
        try:
            code = _in_child(tree, options, log, note)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    end, code = time.monotonic() + _LIMIT, None
    while code is None:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > end:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            code = -1
        else:
            time.sleep(_POLL)
    shutil.rmtree(tree / ".hypothesis", ignore_errors=True)
    return code, json.loads(note.read_text("utf-8"))


def _in_child(tree: Path, options: Sequence[str], log: Path, note: Path) -> int:
    os.setsid()  # so that the processes of tests end with it
    os.chdir(tree)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    own = {str(ROOT), str(Path.cwd()), "", "."}
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(tree), *(path for path in inherited if path not in own)]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in own)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "kvtool")]:
        del sys.modules[name]
    outcomes = Outcomes()
    always = ["-q", "-p", "no:cacheprovider", "-n", "0"]
    if importlib.util.find_spec("hypothesis"):
        always.append("--hypothesis-seed=0")  # the same examples before and after a change
    code = int(pytest.main([*always, *options], plugins=[outcomes]))
    note.write_text(outcomes.to_text(), encoding="utf-8")
    return code


def try_out(fault: Fault, tests: Sequence[str], tier: str, tree: Path, log: Path) -> Found:
    """Plant a fault, and run tests until one fails."""
    begun = time.monotonic()
    there = [test for test in tests if (tree / test.partition("::")[0]).exists()]
    if not there:
        return Found(fault, None, "none of its tests is there", 0.0)
    with planted(fault, tree):
        code, ran = run_pytest(tree, ["-x", "-m", TIERS[tier], *there], log)
    seconds = time.monotonic() - begun
    if ran["failed"]:
        return Found(fault, ran["failed"][0], "", seconds)
    why = {0: "all tests pass", 5: "no test is selected", -1: f"no end within {_LIMIT} s"}
    return Found(fault, None, why.get(code, f"pytest ended with {code}, see {log}"), seconds)


def confirmed(results: Sequence[Found], tree: Path, log: Path) -> list[Found]:
    """Run the tests that failed again, without a fault: one that fails then, too, finds nothing.

    Whatever their tier, they run: of cases that are chosen alone, other ones are marked.
    """
    tests = list(dict.fromkeys(each.test for each in results if each.test))
    passed = run_pytest(tree, ["-m", "", *tests], log)[1]["passed"] if tests else []
    return [
        each
        if each.test is None or each.test in passed
        else replace(each, test=None, why=f"{each.test} does not pass without the fault")
        for each in results
    ]


def preload() -> None:
    """Import what takes long and is no part of the tree, with the settings of `conftest.py`."""
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    torch = import_module("torch")
    os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
    torch.set_num_threads(1)
    for name in _PRELOADED:
        if importlib.util.find_spec(name.partition(".")[0]):
            import_module(name)


def show(results: Sequence[Found]) -> None:
    """Print the table."""
    wide = max(len(each.fault.name) for each in results)
    files = max(len(each.fault.file) for each in results)
    for each in results:
        what = each.test or f"NOT FOUND ({each.why})"
        print(f"{each.fault.name:{wide}}  {each.fault.file:{files}}  {each.seconds:5.1f} s  {what}")
    missed = sum(each.test is None for each in results)
    total = sum(each.seconds for each in results)
    print(f"{len(results) - missed} of {len(results)} faults found, {total:.0f} s")


def chosen(names: Sequence[str], tier: str) -> list[Fault]:
    """Return the faults of these names, or without a name those that a tier is to find."""
    unknown = set(names) - {fault.name for fault in FAULTS}
    if unknown:
        raise SystemExit(f"no fault is called {', '.join(sorted(unknown))}; --list names them")
    if names:
        return [fault for fault in FAULTS if fault.name in names]
    return [fault for fault in FAULTS if tier in ("both", fault.tier)]


def main() -> None:
    """Read the command line, try the faults out, and end with 1 where one is not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted_faults", description=__doc__)
    parser.add_argument("names", nargs="*", help="faults to plant; all of the tier by default")
    parser.add_argument("--list", action="store_true", help="print the faults and end")
    parser.add_argument("--tier", choices=TIERS, default="default", help="tests that may find them")
    parser.add_argument("--tests", nargs="+", help="where to look, in place of what faults name")
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument("--logs", type=Path, help="a folder for what pytest prints")
    asked = parser.parse_args()
    wrong = check(FAULTS)
    if wrong:
        raise SystemExit("\n".join(wrong))
    faults = chosen(asked.names, asked.tier)
    if asked.list:
        for fault in faults:
            print(f"{fault.name}: {fault.file}, {fault.tier}, {' '.join(fault.tests)}")
        return
    preload()
    logs = asked.logs or Path(tempfile.mkdtemp(prefix="kvtool-faults-"))
    logs.mkdir(parents=True, exist_ok=True)
    results = []
    with tempfile.TemporaryDirectory(prefix="kvtool-tree-") as folder:
        tree = Path(os.path.realpath(folder))
        copy_tree(tree)
        for number, fault in enumerate(faults):
            log = logs / f"{number:03}.log"
            results.append(try_out(fault, asked.tests or fault.tests, asked.tier, tree, log))
            what = results[-1].test or f"NOT FOUND ({results[-1].why})"
            print(f"{number + 1}/{len(faults)} {fault.name}: {what}", file=sys.stderr, flush=True)
        results = confirmed(results, tree, logs / "without.log")
    show(results)
    if asked.json is not None:
        text = json.dumps([each.to_data() for each in results], indent=2)
        asked.json.write_text(f"{text}\n", encoding="utf-8")
    raise SystemExit(any(each.test is None for each in results))


if __name__ == "__main__":
    main()
