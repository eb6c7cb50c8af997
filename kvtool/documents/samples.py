"""What a run measures and has measured: its arms, tasks, samples, and a record of each sample.

So results can be made anew from files, which are held against these schemas whenever they are read.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

from kvtool.documents.document import Document, Section, TokenCount
from kvtool.documents.plan import PlanDocument
from kvtool.documents.results import ArmEntry
from kvtool.sizes import LARGEST_SEED

Number = Annotated[float, Field(ge=-1e100, le=1e100)]
"""A finite number that can be squared and summed."""

Amount = Annotated[float, Field(ge=0, le=1e100)]
"""Seconds, bytes or tokens."""


class TaskSamples(Section):
    """A task with its settings, and its samples in order: id and hash of the content."""

    task: str
    version: int
    settings: dict[str, Any]
    fingerprint: str
    samples: list[tuple[str, str]]


class ProtocolEntry(Section):
    """How prompts were put and answers drawn; see `kvtool.evaluation.bench.bench.Protocol`."""

    query_aware: bool | None
    chat_template: Literal["auto", "on", "off"]
    max_length: TokenCount | None
    truncate: Literal["middle", "left", "error"]
    max_new_tokens: TokenCount | None
    temperature: Annotated[int | float, Field(ge=0, le=1e100)]
    stop: tuple[str, ...]
    seed: Annotated[NonNegativeInt, Field(le=LARGEST_SEED)]
    keep_question: bool = False
    shared_prefill: bool = False


class SamplesDocument(Document):
    """`samples.json` of a run; `model` and `protocol` are part of every record's key."""

    kind: Literal["samples"] = "samples"
    model: dict[str, str | None]
    protocol: ProtocolEntry
    arms: list[ArmEntry]
    plan: PlanDocument | None = None
    tasks: list[TaskSamples]


_LATER = ("allocated_bytes", "kept_per_layer")


class SampleCost(BaseModel):
    """What one sample cost; bytes are there if it has filled a cache.

    Samples of earlier versions lack what is in `_LATER`.
    """

    model_config = ConfigDict(strict=True)

    prompt_tokens: Amount
    new_tokens: Amount
    decoded_tokens: Amount
    prefill_s: Amount
    decode_s: Amount
    kept_tokens: Amount | None = None
    kv_bytes: Amount | None = None
    state_bytes: Amount | None = None
    full_bytes: Amount | None = None
    peak_kv_bytes: NonNegativeInt | None = None
    traffic_pairs: Amount | None = None
    traffic_bytes: Amount | None = None
    peak_memory_bytes: NonNegativeInt | None
    allocated_bytes: Amount | None = None
    kept_per_layer: list[Amount] | None = None

    @model_validator(mode="after")
    def _all_bytes_or_none(self) -> SampleCost:
        fields = type(self).model_fields.items()
        optional = [
            name for name, field in fields if not field.is_required() and name not in _LATER
        ]
        given = [name for name in optional if name in self.model_fields_set]
        if given and len(given) < len(optional):
            raise ValueError(f"has {given[0]}, and not all of {', '.join(optional)}")
        if any(getattr(self, name) is None for name in given):
            raise ValueError("has bytes that are null")
        return self


class SampleRecord(BaseModel):
    """A line of `samples/ARM/TASK.jsonl`; what a task recorded stands beside these keys.

    Earlier versions wrote no `fingerprint` of what the answer depends on.
    """

    model_config = ConfigDict(strict=True)

    key: str
    configuration: str
    id: str
    fingerprint: dict[str, str] | None = None
    cell: dict[str, int | Number | str] = Field(default_factory=dict)
    error: str | None = None
    scores: dict[str, Number] | None = None
    cost: SampleCost | None = None

    @model_validator(mode="after")
    def _measured_or_failed(self) -> SampleRecord:
        if self.error is None and (self.scores is None or self.cost is None):
            raise ValueError("has neither an error nor scores and cost")
        return self
