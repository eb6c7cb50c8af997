"""Processor seconds of each test file, those of the processes that it starts included.

python -m pytest -p tests.costs       # adds a line for each case to runs/costs.jsonl
python -m tests.costs                 # prints the thirty dearest files
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "runs" / "costs.jsonl"


def seconds() -> float:
    """User and system time of this process and of those of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = seconds()
    found = yield
    FILE.parent.mkdir(exist_ok=True)
    with FILE.open("a") as lines:  # a short line is written whole, whoever else writes
        tier = "exhaustive" if item.get_closest_marker("exhaustive") else "default"
        record = {"case": item.nodeid, "tier": tier, "seconds": round(seconds() - before, 3)}
        lines.write(json.dumps(record) + "\n")
    return found


def main() -> None:
    files: dict = defaultdict(lambda: {"default": [], "exhaustive": []})
    for line in FILE.read_text().splitlines():
        record = json.loads(line)
        files[record["case"].split("::")[0]][record["tier"]].append(record["seconds"])
    dearest = sorted(files.items(), key=lambda each: -sum(map(sum, each[1].values())))
    for name, tiers in dearest[:30]:
        cells = [f"{sum(each):.1f} s, {len(each)}" if each else "-" for each in tiers.values()]
        sys.stdout.write(f"| `{name.removeprefix('tests/')}` | {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
