"""The results of a run: variants, tasks, scores and costs, and a record of each sample.

Results can be made anew from the records, which are checked against these schemas when read.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, model_validator

from kvtool.documents.claim import Claim, ClaimVerdict
from kvtool.documents.document import (
    WAS_ARM,
    WERE_ARMS,
    Document,
    Section,
    ShownDocument,
    SparseSection,
    TokenCount,
    report,
)
from kvtool.documents.files import as_folder
from kvtool.documents.plan import PlanDocument
from kvtool.documents.settings import Protocol, as_entry
from kvtool.documents.verdict import Difference, Loss, Paired, SampleScores, Verdict
from kvtool.sizes import LARGEST_SEED, WIDTH

COMPARISON = "kvtool.evaluation.pairs"
"""The module that compares variants: a name, since `evaluation` imports the documents."""

Form = Literal["text", "csv", "latex", "markdown"]


class ModelUsed(Section):
    """The model of a run, and how it ran.

    Heads are those that store keys, one in latent attention (MLA), and `head_dim` is the size of
    what one stores as its key.
    """

    id: str
    revision: str | None
    config_hash: str
    dtype: str
    device: str
    attn_implementation: str
    layers: NonNegativeInt
    kv_heads: NonNegativeInt
    head_dim: NonNegativeInt
    trained_length: NonNegativeInt | None


class VariantEntry(Section):
    """One policy under one budget; `full` keeps everything; others are compared with it.

    `planned` says that a plan splits the budget over the layers, `reads` that the budget is what a
    decoded token reads and not what is stored. `codec` is the policy's name of the format that keys
    and values are stored in, None for the model's own. `label` is what tables call a policy of
    another module, None where that is `policy`.
    """

    name: str
    policy: str
    budget: int | str | None
    prefill: str
    planned: bool = False
    reads: bool = False
    codec: str | None = None
    label: str | None = None

    @property
    def shown(self) -> str:
        """Return the name with the policy's label in it."""
        return self.name if self.label is None else self.name.replace(self.policy, self.label, 1)

    @property
    def folder(self) -> str:
        """Return the name of the folder of its samples."""
        return as_folder(self.name)


class MetricEntry(Section):
    """One score over `n` samples; `stderr` is its standard error."""

    name: str
    value: float | None
    n: NonNegativeInt
    stderr: NonNegativeFloat | None


class CellEntry(Section):
    """The headline score of the samples of one cell, such as one length and depth."""

    at: dict[str, int | float | str]
    value: float | None
    n: NonNegativeInt
    stderr: NonNegativeFloat | None


class CurveEntry(Section):
    """A line for a picture."""

    name: str
    x: list[float]
    y: list[float]
    x_label: str
    y_label: str


class Cost(SparseSection):
    """Means over samples, bytes counted from tensors at the end of a sample.

    `kv_bytes` counts filled slots, `allocated_bytes` the buffers that have them, `state_bytes` the
    policy's own numbers. `kept_per_layer` are the tokens of each layer's fullest KV head (0 without
    attention), `full_bytes` what a full cache would hold. `traffic_pairs` and `traffic_bytes` are
    what the last decoded token read (per layer and KV head, and in all). `peak_kv_bytes` are the
    most key and value bytes at a time, `peak_memory_bytes` the growth of the process's (or the
    GPU's) memory, both the largest over samples. The growth is None where the system does not
    report it or variants read a prompt together; `prefill_s` is then the time of all of them.
    `batch` is the most answers that were decoded in one batch: `decode_s` is then a sample's share
    of the steps, and neither a rate nor the growth is known. `evicted_share` is the share of
    samples in which anything was evicted, `host_bytes` are those of evicted tokens in host memory.
    Earlier runs lack these three, `allocated_bytes` and `kept_per_layer`.
    """

    optional: ClassVar[tuple[str, ...]] = ("batch",)

    prompt_tokens: NonNegativeFloat
    new_tokens: NonNegativeFloat
    kept_tokens: NonNegativeFloat
    kv_bytes: NonNegativeFloat
    state_bytes: NonNegativeFloat
    full_bytes: NonNegativeFloat
    traffic_pairs: NonNegativeFloat
    traffic_bytes: NonNegativeFloat
    peak_kv_bytes: NonNegativeInt
    peak_memory_bytes: NonNegativeInt | None
    prefill_s: NonNegativeFloat
    decode_s: NonNegativeFloat
    prefill_tokens_per_s: NonNegativeFloat | None
    decode_tokens_per_s: NonNegativeFloat | None
    allocated_bytes: NonNegativeFloat | None = None
    kept_per_layer: list[NonNegativeFloat] = Field(default_factory=list)
    evicted_share: Annotated[float, Field(ge=0, le=1)] | None = None
    host_bytes: NonNegativeFloat | None = None
    batch: Annotated[int, Field(ge=1)] | None = None

    @property
    def held_bytes(self) -> float:
        """Return the bytes that a cache holds: key and value buffers and the policy's numbers.

        Where a run did not record the buffers, filled slots count instead.
        """
        known = self.allocated_bytes
        return (self.kv_bytes if known is None else known) + self.state_bytes


def when_asked(*, query_aware: bool, keep_question: bool) -> str:
    """Say when the question comes, as tables do."""
    later = "later, kept" if keep_question else "later"
    return "known" if query_aware else later


class TaskResult(Section):
    """One task under one variant.

    `value` is the headline `metric`. `best` is the value of a perfect score, None where there is
    none. `delta` is `value` less that of the full cache. `failed` counts samples without a result.
    `one_token` is the share of questions whose right answers are one token, which all policies
    answer alike where the question is known. `droppable` says whether a loss in percent of the full
    cache's value means something. `paired` is None for the full cache itself, and where the two may
    not be compared sample by sample. `scores` is None where the headline is no mean over samples.
    """

    variant: Annotated[str, WAS_ARM]
    task: str
    version: NonNegativeInt
    metric: str
    value: float | None
    n: NonNegativeInt
    stderr: NonNegativeFloat | None
    delta: float | None
    best: float | None
    lower_is_better: bool
    droppable: bool = True
    query_aware: bool
    keep_question: bool = False
    protocol: str
    settings: dict
    fingerprint: str
    failed: NonNegativeInt
    metrics: list[MetricEntry]
    cells: list[CellEntry]
    curves: list[CurveEntry]
    cost: Cost | None
    paired: Paired | None = None
    scores: SampleScores | None = None
    one_token: float = 0.0

    @property
    def question(self) -> str:
        """Return when the question comes, as tables say it."""
        return when_asked(query_aware=self.query_aware, keep_question=self.keep_question)

    @property
    def chunk(self) -> float | None:
        """Return how many tokens of a text were fed at a time, None where a task does not say."""
        return next((metric.value for metric in self.metrics if metric.name == "chunk"), None)

    def fed_like(self, other: TaskResult) -> bool:
        """Return whether both were fed texts in blocks of one size, as far as is known.

        Within a block, tokens see each other whatever the policy evicts, so scores of other blocks
        do not compare.
        """
        return None in (self.chunk, other.chunk) or self.chunk == other.chunk


class Average(Section):
    """The plain mean of the headlines of `tasks`, all of which have the same metric scale."""

    variant: Annotated[str, WAS_ARM]
    suite: str
    tasks: list[str]
    value: float
    delta: float | None


class GateResult(Section):
    """A condition on the results and whether they meet it."""

    gate: str
    variant: Annotated[str, WAS_ARM]
    task: str
    value: float | None
    limit: float
    passed: bool


class Environment(Section):
    """Where a run took place."""

    python: str
    os: str
    cpu: str
    threads: NonNegativeInt
    gpu: str | None
    cuda: str | None
    packages: dict[str, str]


class ResultsDocument(ShownDocument):
    """`results.json` of a run; `complete` is false while samples are missing.

    `samples` are the names of each task's, `differences` compare variants with each other, where
    they share samples; those that were asked for, as `pairs`, come first. Earlier runs lack these.
    `claim` is what the recipe says the run shows.
    """

    kind: Literal["results"] = "results"
    name: str
    kvtool: str
    git_commit: str | None
    argv: list[str]
    started: str
    finished: str
    complete: bool
    environment: Environment
    model: ModelUsed
    seed: NonNegativeInt
    variants: Annotated[list[VariantEntry], WERE_ARMS]
    results: list[TaskResult]
    averages: list[Average]
    gates: list[GateResult]
    verdict: Verdict | None = None
    samples: dict[str, list[str]] = Field(default_factory=dict)
    differences: list[Difference] = Field(default_factory=list)
    pairs: list[str] = Field(default_factory=list)
    claim: Claim | None = None
    claim_verdict: ClaimVerdict | None = None

    def of(self, variant: str, task: str) -> TaskResult | None:
        """Return the result of one variant on one task."""
        return next((r for r in self.results if (r.variant, r.task) == (variant, task)), None)

    def compare(self, a: str, b: str) -> list[Difference]:
        """Subtract the scores of one policy from another's, sample by sample.

        Args:
            a, b: policies, compared at each budget that both have, or variants such as `h2o@64`.

        Returns:
            a less b on every task and budget, with p-values corrected for their number (Holm).

        Raises:
            UsageError: the run has no such policy.
        """
        found: list[Difference] = import_module(COMPARISON).compare(self, [f"{a},{b}"])
        return found

    def table(self, width: int = WIDTH, form: Form = "text") -> str:
        """Return the table that a terminal shows, or one in another form, ending in a newline.

        Args:
            width: characters of a line, of `text`.
            form: `text`, `csv`, `latex` or `markdown`.
        """
        if form == "text":
            return super().table(width)
        written: str = report("results_text").exported(self, form)
        return written


Number = Annotated[float, Field(ge=-1e100, le=1e100)]
"""A finite number that can be squared and summed."""

Amount = Annotated[float, Field(ge=0, le=1e100)]
"""Seconds, bytes or tokens."""


class TaskSamples(Section):
    """A task with its settings, and its samples in order: id, hash, and number of the context."""

    task: str
    version: int
    settings: dict[str, Any]
    fingerprint: str
    samples: list[tuple[str, str]]
    contexts: list[NonNegativeInt] = Field(default_factory=list)
    one_token: float = 0.0


if TYPE_CHECKING:

    class _ProtocolFields:
        pass

else:
    _ProtocolFields = as_entry(Protocol)


class ProtocolEntry(Section, _ProtocolFields):
    """How prompts were put and answers drawn: a `Protocol` in a file."""

    max_length: TokenCount | None
    max_new_tokens: TokenCount | None
    temperature: Annotated[int | float, Field(ge=0, le=1e100)]
    seed: Annotated[NonNegativeInt, Field(le=LARGEST_SEED)]


class SamplesDocument(Document):
    """`samples.json` of a run; `model` and `protocol` are part of every record's key."""

    kind: Literal["samples"] = "samples"
    model: dict[str, str | None]
    protocol: ProtocolEntry
    variants: Annotated[list[VariantEntry], WERE_ARMS]
    plan: PlanDocument | None = None
    tasks: list[TaskSamples]
    guarantee: Loss | None = None


_BYTES = (
    *("kept_tokens", "kv_bytes", "state_bytes", "full_bytes", "peak_kv_bytes"),
    *("traffic_pairs", "traffic_bytes"),
)


class SampleCost(BaseModel):
    """What one sample cost; bytes are there if it has filled a cache.

    Earlier versions recorded none of the last four.
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
    evicted: bool | None = None
    host_bytes: Amount | None = None

    @model_validator(mode="after")
    def _all_bytes_or_none(self) -> SampleCost:
        missing = [name for name in _BYTES if getattr(self, name) is None]
        if missing and len(missing) < len(_BYTES):
            raise ValueError(f"has no {missing[0]}, and not all of {', '.join(_BYTES)} are missing")
        return self


class SampleRecord(BaseModel):
    """A line of `samples/VARIANT/TASK.jsonl`; what a task recorded is beside these keys.

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
