"""Progress of a run in lines, where no bar shows it: one for each finished cell, but not many."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvtool.evaluation.run.runner import Job, Measurement

_MOST = 20  # lines of a quick run
_WAIT = 60.0  # seconds after which a line comes anyway


def work_in_words(jobs: Sequence[Job], variants: int) -> str:
    """Say how many measurements a run is.

    >>> work_in_words([], 3)
    '0 samples x 3 variants = 0 measurements'
    """
    samples = sum(len(job.samples) for job in jobs)
    parts = f"{samples} samples"
    if len(jobs) == 1:
        cells = len({tuple(sample.cell.items()) for sample in jobs[0].samples})
        if cells > 1 and samples % cells == 0:
            parts = f"{cells} cells x {samples // cells} samples"
    return f"{parts} x {variants} variants = {samples * variants:,} measurements"


class ProgressLines:
    """Says after a measurement how far a run is, if a line is called for.

    Args:
        part: the measurements, in the order in which they are done.
        say: takes a line.
        clock: seconds.
    """

    def __init__(
        self,
        part: Sequence[Measurement],
        jobs: Sequence[Job],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._part, self._jobs, self._say, self._clock = part, jobs, say, clock
        self._done = self._said = 0
        self._at = clock()

    def step(self) -> None:
        """Take note of one more measurement."""
        self._done += 1
        cell, total = self._cell(self._done - 1), len(self._part)
        ends = self._done == total or self._cell(self._done) != cell
        many = (self._done - self._said) * _MOST >= total
        if (ends and many) or self._done == total or self._clock() - self._at >= _WAIT:
            self._say(f"measured {self._done}/{total}: {cell}{'' if ends else ', not finished'}")
            self._said, self._at = self._done, self._clock()

    def _cell(self, index: int) -> str:
        measurement = self._part[index]
        job = self._jobs[measurement.job]
        cell = job.samples[measurement.sample].cell
        return " ".join([job.task.name, *(f"{name}={value}" for name, value in cell.items())])
