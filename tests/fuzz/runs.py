"""Run folders: records, index, results and recipe altered; scored anew and taken up again."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import kvtool
from kvtool.documents.settings import Protocol
from kvtool.evaluation.run.run import Run, read_results
from kvtool.evaluation.run.runner import draw_jobs
from kvtool.evaluation.run.store import Store
from kvtool.evaluation.samples.sample import token_counter
from kvtool.evaluation.tasks.table import task_class
from kvtool.models.load import load
from kvtool.report.page import write_page
from tests.evaluation.variants import make_variants
from tests.fuzz.contract import Case, command
from tests.fuzz.mutate import mutate_bytes, mutate_data, mutate_text, odd_word

_TASKS: dict[str, dict[str, Any]] = {
    "niah": {"lengths": "128", "depths": [0, 100]},
    "ppl": {"lengths": "64", "samples": 1},
    "output-error": {"lengths": "192", "samples": 1, "new_tokens": 2},
    "speed": {"lengths": "16", "new_tokens": 2, "samples": 1},
    "scbench/mf": {"lengths": "640", "samples": 1, "turns": 2},
}


class RunFolders:
    name = "run folders"

    def __init__(self, folder: Path) -> None:
        self.whole, self.folder = folder / "whole", folder / "run"
        self.loaded = load()
        kvtool.attach(self.loaded.model)
        counter = token_counter(self.loaded.tokenizer, 8192)
        tasks = [task_class(name)(name=name, **given) for name, given in _TASKS.items()]
        self.jobs = draw_jobs(tasks, counter, None)
        store = Store(self.whole)
        store.locked().__enter__()
        run = self._begin(store)
        run.measure(run.unfinished(self.jobs), self.jobs, self.loaded, lambda step: None)
        assert run.write_results().complete
        self.files = sorted(
            path.relative_to(self.whole) for path in self.whole.rglob("*.json*") if path.is_file()
        )

    def _begin(self, store: Store) -> Run:
        run = Run.plan(
            store,
            name="run",
            argv=[],
            loaded=self.loaded,
            variants=make_variants(["streaming"], ["32"]),
            jobs=self.jobs,
            protocol=Protocol(),
            gates=[],
        )
        run.start()
        return run

    def case(self, random: Random) -> Case:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.whole, self.folder)
        for _ in range(random.choice([0, 0, 0, 0, 0, 1, 1, 2])):
            self._damage(random, self.folder / random.choice(self.files))
        for _ in range(random.choice([0, 1, 2])):
            self._alter(random, random.choice(sorted(self.folder.rglob("*.jsonl"))))
        run = self._rescore if random.random() < 0.6 else self._resume
        pictures = random.random() < 0.005  # which take most of the time
        return run if pictures else lambda: self._without_pictures(run)

    def _without_pictures(self, run: Case) -> None:
        with patch("kvtool.report.page.installed", return_value=False):
            run()

    def _damage(self, random: Random, path: Path) -> None:
        if not path.exists():
            return  # it was deleted a moment ago
        text = path.read_text("utf-8", "surrogateescape")
        kind = random.randrange(8)
        if kind == 0:
            path.write_bytes(mutate_bytes(random, path.read_bytes()))
        elif kind == 1:
            path.unlink()
        elif kind == 2:
            text = mutate_text(random, text)
            path.write_bytes(text.encode("utf-8", "surrogatepass"))
        elif path.suffix == ".json":
            with suppress(ValueError):  # it was damaged a moment ago
                path.write_text(json.dumps(mutate_data(random, json.loads(text))))
        else:
            lines = text.splitlines()
            i = random.randrange(len(lines)) if lines else 0
            if lines and kind < 7:
                try:
                    lines[i] = json.dumps(mutate_data(random, json.loads(lines[i])))
                except ValueError:
                    lines[i] = odd_word(random)
            else:
                lines.insert(i, random.choice(["", "[]", "{}", '"x"', "1", "[" * 5000, "9" * 5000]))
            path.write_bytes("".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))

    def _alter(self, random: Random, path: Path) -> None:
        """Write what a run may well have written: other seconds, another order, half a line."""
        lines = path.read_bytes().splitlines(keepends=True)
        kind = random.randrange(4)
        if kind == 0:
            lines.reverse()
        elif kind == 1 and lines:
            lines.append(lines[0][: len(lines[0]) // 2])
        elif kind == 2:
            lines = [re.sub(rb'("\w+_s": )[0-9.]+', rb"\g<1>1.5", line) for line in lines]
        path.write_bytes(b"".join(lines))

    def _rescore(self) -> None:
        command("eval", "--rescore", str(self.folder), "--no-plots", "-q")

    def _resume(self) -> None:
        """Do what `kvtool eval --resume` does up to where it would measure."""
        store = Store(self.folder)
        with store.locked():
            read_results(store)
            store.repair()
            run = self._begin(store)
            run.unfinished(self.jobs)
            write_page(run.write_results(), self.folder / "report.html")
