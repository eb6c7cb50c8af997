"""A task for the tests of the runner: no benchmark, quick, and it can be made to fail."""

from __future__ import annotations

from typing import ClassVar

from kvtool.evaluation.samples.sample import Sample, Turn
from kvtool.evaluation.tasks.task import Task


class Echo(Task):
    """Scores how many tokens a variant keeps of a text; sample `bad` cannot be measured."""

    texts: tuple[str, ...] = ("one", "two", "three")
    bad: str | None = None

    metric = "kept"
    best: ClassVar = None

    def draw(self, tokens):
        for text in self.texts:
            yield Sample(text, f"The old {text} was near the school. " * 3, (Turn("", (), 4),))

    def run(self, bench, sample):
        if sample.id == self.bad:
            raise ValueError("this one\nis bad")
        cache = bench.new_cache()
        bench.feed(cache, bench.encode(sample.context, special=True))
        return {"kept": cache.report().kept_per_layer[0]}

    def score(self, record):
        return {"kept": float(record["kept"])}
