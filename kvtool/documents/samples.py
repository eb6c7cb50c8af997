"""What a run measures: its arms, tasks and samples, so that results can be made anew from files."""

from __future__ import annotations

from typing import Any, Literal

from kvtool.documents.document import Document, Section
from kvtool.documents.plan import PlanDocument
from kvtool.documents.results import ArmEntry


class TaskSamples(Section):
    """A task with its settings, and its samples in order: id and hash of the content."""

    task: str
    version: int
    settings: dict[str, Any]
    fingerprint: str
    samples: list[tuple[str, str]]


class SamplesDocument(Document):
    """`samples.json` of a run; `model` and `protocol` are part of every record's key."""

    kind: Literal["samples"] = "samples"
    model: dict[str, Any]
    protocol: dict[str, Any]
    arms: list[ArmEntry]
    plan: PlanDocument | None = None
    tasks: list[TaskSamples]
