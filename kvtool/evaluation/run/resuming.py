"""Decide whether a run goes on from the records in its folder, which may be of other inputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.errors import UsageError
from kvtool.evaluation.run.fingerprint import WAYS_OUT, difference
from kvtool.evaluation.run.runner import Job, Place, sample_key
from kvtool.evaluation.run.store import Store
from kvtool.evaluation.samples.sample import Json
from kvtool.planning.variants import Variant


@dataclass(frozen=True)
class Resumed:
    """What a folder holds for a run.

    Attributes:
        unknown: finished measurements of an earlier kvtool, which do not say by what code.
        stale: why the folder cannot be gone on from; None: it can.
    """

    unknown: int = 0
    stale: UsageError | None = None


def look_at_records(
    jobs: Sequence[Job], variants: Sequence[Variant], place: Place, store: Store
) -> Resumed:
    """Hold the records of a run's samples against what they would depend on now.

    A record without a fingerprint counts if its key is the one that it would have now.
    """
    unknown = 0
    for job in jobs:
        for variant in variants:
            shared = place.shared_fingerprint(variant, job.task)
            configuration = place.configuration(variant, job.task)
            there: dict[str, list[Json]] = {}
            for record in store.records(variant.folder, job.task.name).values():
                if record.get("error") is None:
                    there.setdefault(_name(record["id"], record.get("cell")), []).append(record)
            for sample, content in zip(job.samples, job.hashes, strict=True):
                now = place.fingerprint(shared, content)
                key = sample_key(configuration, content)
                for record in there.get(_name(sample.id, dict(sample.cell)), ()):
                    found = record.get("fingerprint")
                    if found is None:
                        unknown += record["key"] == key
                    elif (message := difference(found, now)) is not None:
                        message = (
                            f"`{store.folder}` holds an answer of `{variant.name}` to sample "
                            f"`{sample.id}` of {job.task.name} that {message}"
                        )
                        return Resumed(stale=UsageError(message, hint=WAYS_OUT))
    return Resumed(unknown)


def _name(sample: str, cell: object) -> str:
    return json.dumps([sample, cell or {}], sort_keys=True)
