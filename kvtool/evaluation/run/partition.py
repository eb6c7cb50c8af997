"""What of a run is still to be measured, and which process measures which part of it."""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.evaluation.bench.variants import Variant
from kvtool.evaluation.run.runner import Job, Measurement, Place, sample_key
from kvtool.evaluation.run.store import Store


def unfinished(
    jobs: Sequence[Job], variants: Sequence[Variant], place: Place, store: Store
) -> list[Measurement]:
    """Return what is not done, sample by sample and variant by variant; what failed is not done.

    A sample runs under every variant before the next one begins, so that a run that is broken off
    has compared all variants on the same samples.
    """
    left = []
    for j, job in enumerate(jobs):
        configurations = [place.configuration(variant, job.task) for variant in variants]
        records = [store.records(variant.folder, job.task.name) for variant in variants]
        for s, (sample, content) in enumerate(zip(job.samples, job.hashes, strict=True)):
            work = job.task.work(sample)
            for a, configuration in enumerate(configurations):
                record = records[a].get(sample_key(configuration, content))
                if record is None or "error" in record:
                    left.append(Measurement(j, s, a, work))
    return left


def partition_of(
    measurements: Sequence[Measurement], process: int, processes: int
) -> list[Measurement]:
    """Return the part of one of several processes.

    The list is cut into stretches of equal work. So the variants of a sample stay together, but for
    the samples at the cuts, and what the variants share about a sample is made once.

    >>> partition_of([Measurement(0, i, 0, work) for i, work in enumerate((1, 1, 1, 3))], 1, 2)
    [Measurement(job=0, sample=3, variant=0, work=3)]
    """
    total = sum(measurement.work for measurement in measurements)
    partition, before = [], 0
    for measurement in measurements:
        middle = 2 * before + measurement.work  # in halves
        if middle * processes // (2 * total) == process:
            partition.append(measurement)
        before += measurement.work
    return partition
