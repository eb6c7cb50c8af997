"""What has been measured, in one JSON file that is written after every case."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import kvtool
from recipes.benchmarks.headline import device_name

KIND = "kvtool.device-run"
GOOD = ("ok", "skipped")
_TRIES = 2  # of a case that ended its process, or was still running when the time was up

Record = dict[str, Any]


class Skip(Exception):
    """A case that cannot run here; the text says why."""


class Wrong(Exception):
    """A case that ran and found a fault; `found` is what it measured all the same."""

    def __init__(self, reason: str, found: Record | None = None) -> None:
        super().__init__(reason)
        self.found = found or {}


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        key: its name, one of its part.
        run: returns numbers and names for the file, or raises.
        beside: it measures no time, so others may run on the device meanwhile.
        seconds: it takes about so many on a GPU, where no run has measured it; 0: unknown.
    """

    key: str
    run: Callable[[], Record]
    beside: bool = False
    seconds: float = 0.0


def source_hash() -> str:
    """Name the package's source as it is now."""
    digest = hashlib.sha256()
    for file in sorted(Path(kvtool.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def machine(device: str, tiny: bool) -> Record:
    """What numbers hold for: device, versions, sizes."""
    return {
        "device": device_name(torch.device(device).type),
        "kind": torch.device(device).type,
        "tiny": tiny,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


class Results:
    """The records of a file, by part and case.

    Raises:
        ValueError: the file is another machine's, or no such file.
    """

    def __init__(self, path: Path, machine: Record, again: bool = False) -> None:
        self.path, self.call = path, 0.0  # the command that measures now
        self.data: Record = {"kind": KIND, "machine": machine, "parts": {}}
        if path.exists() and not again:
            found = json.loads(path.read_text())
            if found.get("kind") != KIND:
                raise ValueError(f"{path} holds something else; name another file")
            if found["machine"] != machine:
                changed = [k for k in machine if found["machine"].get(k) != machine[k]]
                raise ValueError(
                    f"{path} was measured with another {', '.join(changed)}: "
                    "name another file, or measure all of it --again"
                )
            self.data = found

    def records(self, part: str) -> dict[str, Record]:
        """The records of a part, by the keys of their cases."""
        return self.data["parts"].setdefault(part, {})

    def wants(self, part: str, key: str, always: bool = False) -> bool:
        """Whether to run a case: once a command, unless it was right (or `always`)."""
        record = self.records(part).get(key, {})
        if record.get("call") == self.call:
            return False
        return always or record.get("state") not in GOOD

    def begin(self, part: str, key: str) -> bool:
        """Note that a case runs now, and say whether it may: not if it never came to its end."""
        before = self.records(part).get(key, {})
        tries = before.get("tries", 0) + 1 if before.get("state") == "running" else 1
        if tries > _TRIES:
            reason = f"it ended its process, or took all the time, {_TRIES} times"
            self.end(part, key, {"state": "failed", "reason": reason})
            return False
        self.records(part)[key] = {"state": "running", "tries": tries}
        self.save()
        return True

    def end(self, part: str, key: str, record: Record) -> None:
        """Keep what was found."""
        self.records(part)[key] = {**record, "source": source_hash(), "call": self.call}
        self.save()

    def save(self) -> None:
        """Write the file, all at once or not at all."""
        write_whole(self.path, self.data)


def write_whole(path: Path, data: Record) -> None:
    """Write a JSON file, all at once or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w") as file:
        json.dump(data, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def run_case(results: Results, part: str, case: Case) -> Record | None:
    """Run one case and keep what it finds; None where it never came to its end before."""
    if not results.begin(part, case.key):
        return None
    start = time.perf_counter()
    try:
        record = {"state": "ok", **case.run()}
    except Skip as reason:
        record = {"state": "skipped", "reason": str(reason)}
    except Wrong as fault:
        record = {"state": "wrong", "reason": str(fault), **fault.found}
    except torch.OutOfMemoryError as error:
        record = {"state": "skipped", "reason": f"out of memory: {str(error).splitlines()[0]}"}
    except Exception as error:  # one of many must not cost the others their numbers
        lines = str(error).strip().splitlines() or [""]
        record = {"state": "failed", "reason": f"{type(error).__name__}: {lines[0][:300]}"}
    record["seconds"] = round(time.perf_counter() - start, 2)
    results.end(part, case.key, record)
    return record
