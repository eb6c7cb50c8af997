"""The profile that `kvtool profile` measures: a number per layer for each analysis, and curves.

Every list over layers has `model.layers` entries, null for a layer that the analysis does not see
(one without attention, say). Numbers per head are in a file of their own beside the document.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    model_validator,
)

from kvtool.documents.document import (
    PER_LAYER,
    ByteCount,
    Section,
    ShownDocument,
    SparseSection,
    TokenCount,
    Unit,
    listed,
)
from kvtool.documents.memory import ModelShape
from kvtool.sizes import MOST_TOKENS

_Heads = Annotated[list[Annotated[float, Field(ge=0, le=1)]], BeforeValidator(listed)]
_Ratio = Annotated[float, Field(gt=0, le=1)]
BUDGET_CURVES = TypeAdapter(Annotated[dict[_Ratio, list[_Heads]], Field(min_length=1)])
"""A file of published budgets: by mean ratio, the share of each layer or of each of its heads."""

Layers = list[FiniteFloat | None]
"""One number per layer."""

LayerCurves = list[list[FiniteFloat] | None]
"""One list per layer, an entry for each point of the axis beside it."""

_PER_RATE = Unit("a list per layer, a number per rate")


class ProfileData(Section):
    """The texts that were read: `samples` of exactly `tokens` tokens, `decode` generated after."""

    source: str
    samples: PositiveInt
    tokens: TokenCount
    decode: Annotated[NonNegativeInt, Field(le=MOST_TOKENS)] | None = None
    seed: NonNegativeInt
    fingerprint: str


class _Swept(Section):
    """A list per layer, or several, with an entry for each point of `axis`."""

    axis: ClassVar[str]


class Jaccard(_Swept, SparseSection):
    """Overlap of what a score keeps step by step and what it would keep with nothing evicted.

    `rates` are shares of the text that are kept; each score has layers x rates.
    """

    axis: ClassVar = "rates"

    rates: Annotated[list[FiniteFloat], Unit("of the text")]
    aas: Annotated[LayerCurves | None, _PER_RATE] = None
    aqas: Annotated[LayerCurves | None, _PER_RATE] = None
    ltas: Annotated[LayerCurves | None, _PER_RATE] = None
    mas: Annotated[LayerCurves | None, _PER_RATE] = None


class OutputErrors(_Swept):
    """Normalised squared error of each layer's attention output: layers x budgets.

    `budgets` are tokens per layer and KV head, of prompts of `data.tokens`.
    """

    axis: ClassVar = "budgets"

    policy: str
    budgets: Annotated[list[TokenCount], Unit("tokens per layer and KV head")]
    errors: Annotated[LayerCurves, Unit("a list per layer, a number per budget")]


HeadCurves = list[Annotated[list[list[FiniteFloat]], Field(min_length=1)] | None]
"""One list per layer, in it one per KV head, an entry for each point of the axis beside it."""

_PER_HEAD = Unit("nats per token: a list per layer, in it one per KV head, a number per budget")


class HeadLosses(_Swept):
    """What the answer loses where one KV head of one layer alone is cut: layers x heads x budgets.

    The other heads of its layer, and all other layers, keep everything.
    """

    axis: ClassVar = "budgets"  # those beside it

    losses: Annotated[HeadCurves, _PER_HEAD]
    standard_errors: Annotated[HeadCurves, _PER_HEAD]
    by_sample: Annotated[
        list[HeadCurves],
        Unit("nats per token: for each sample a list per layer, in it one per KV head"),
    ]


_PER_BUDGET = Unit("nats per token: a list per layer, a number per budget")


class AnswerLosses(_Swept, SparseSection):
    """What the answer loses where one layer alone is cut, in nats per token: layers x budgets.

    `budgets` are tokens per KV head of that layer, of prompts of `data.tokens`. `losses` are means
    over the samples of `by_sample`, from which plans are made. `heads` has the same of KV heads,
    where these were cut one by one.
    """

    axis: ClassVar = "budgets"

    policy: str
    budgets: Annotated[list[TokenCount], Unit("tokens per KV head of the layer that is cut")]
    losses: Annotated[LayerCurves, _PER_BUDGET]
    standard_errors: Annotated[LayerCurves, _PER_BUDGET]
    by_sample: Annotated[
        list[LayerCurves],
        Unit("nats per token: for each sample a list per layer, a number per budget"),
    ]
    heads: HeadLosses | None = None


class MemoryTable(Section):
    """What a full cache takes, from the configuration alone.

    Attributes:
        layer_bytes_per_token: keys and values of one token, 0 without attention.
        layer_window: tokens that a layer stores at most, null where that is all of them.
        bytes: contexts x batches.
        memory: sizes of memory for keys and values, in bytes.
        largest_context: memory x batches, null where windows are all a model stores.
        largest_batch: memory x contexts.
    """

    dtype: str
    layer_bytes_per_token: Annotated[list[ByteCount], PER_LAYER]
    layer_window: Annotated[list[TokenCount | None], Unit("tokens, per layer")]
    contexts: Annotated[list[TokenCount], Unit("tokens")]
    batches: Annotated[list[PositiveInt], Unit("rows")]
    bytes: Annotated[list[list[NonNegativeInt]], Unit("a list per context, a number per batch")]
    memory: Annotated[list[PositiveInt], Unit("bytes")]
    largest_context: Annotated[
        list[list[NonNegativeInt | None]],
        Unit("tokens: a list per size of memory, a number per batch"),
    ]
    largest_batch: Annotated[
        list[list[NonNegativeInt]], Unit("rows: a list per size of memory, a number per context")
    ]


class Metrics(SparseSection):
    """The measurements, means over heads and samples.

    Attributes:
        f_variance: F, the population variance of the column sums of the attention (D2O).
        entropy: entropy of the column sums over log n, 1 where every token gets as much.
        query_cosine: cosine of neighbouring queries.
        recompute_frequency: share of steps at which CaliDrop recomputes, at 0.7 and 0.85.
        topk_union: how many tokens are among the k most attended of any decoded step.
        robustness: share of tokens whose attention varies most within their first 50 steps.
        key_basis: share of the keys' variance in the first quarter of their principal components,
            which are in the file of numbers per head.
        query_centres: length of the queries' mean before RoPE over their mean length, summed over
            pairs; both are in the file of numbers per head.
    """

    f_variance: Annotated[Layers | None, PER_LAYER] = None
    entropy: Annotated[Layers | None, Unit("of log n, per layer")] = None
    query_cosine: Annotated[Layers | None, PER_LAYER] = None
    recompute_frequency: Annotated[Layers | None, Unit("of the steps, per layer")] = None
    topk_union: Annotated[Layers | None, Unit("tokens, per layer")] = None
    jaccard: Jaccard | None = None
    robustness: Annotated[Layers | None, Unit("of the tokens, per layer")] = None
    output_error: OutputErrors | None = None
    answer_loss: AnswerLosses | None = None
    key_basis: Annotated[Layers | None, Unit("of the variance, per layer")] = None
    query_centres: Annotated[Layers | None, Unit("of the mean length, per layer")] = None
    memory: MemoryTable | None = None


class CosineCurve(_Swept):
    """Mean cosine of two queries by their distance, in tokens: layers x distances."""

    axis: ClassVar = "distances"

    distances: Annotated[list[TokenCount], Unit("tokens")]
    values: Annotated[LayerCurves, Unit("a list per layer, a number per distance")]


class UnionCurve(_Swept):
    """How the union of the top-k grows: layers x steps."""

    axis: ClassVar = "steps"

    k: TokenCount
    steps: Annotated[list[TokenCount], Unit("decoded tokens")]
    values: Annotated[LayerCurves, Unit("tokens: a list per layer, a number per step")]


class RobustnessCurve(_Swept):
    """Standard deviation of the attention that a token got in its first steps: layers x steps."""

    axis: ClassVar = "steps"

    steps: Annotated[list[TokenCount], Unit("steps after the token")]
    values: Annotated[LayerCurves, Unit("a list per layer, a number per step")]


class RecomputePoint(Section):
    """Shares of steps, mean over layers: recomputed, calibrated (those included) and left alone."""

    theta1: FiniteFloat
    theta2: FiniteFloat
    recompute: FiniteFloat
    calibrate: FiniteFloat
    idle: FiniteFloat


class RecomputeGrid(Section):
    """CaliDrop's thresholds; `queries` says whether decoded queries were enough to replay."""

    queries: Literal["decode", "prompt"]
    grid: list[RecomputePoint]


class Curves(SparseSection):
    """The curves behind some of the metrics."""

    query_cosine: CosineCurve | None = None
    recompute_frequency: RecomputeGrid | None = None
    topk_union: UnionCurve | None = None
    robustness: RobustnessCurve | None = None


class HeadsFile(Section):
    """A safetensors file with layers x heads arrays; `path` is relative to the document."""

    path: str
    sha256: str


class ProfileDocument(ShownDocument):
    """`profile.yaml`; `data` is left out where no text was read."""

    kind: Literal["profile"] = "profile"
    model: ModelShape
    data: ProfileData | None = None
    metrics: Metrics
    curves: Curves | None = None
    heads_file: HeadsFile | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ProfileDocument:
        layers, metrics = ("layers", self.model.layers), self.metrics
        _check_lists("model.layer_types", self.model.layer_types, layers)
        for name, value in metrics:
            if isinstance(value, list):
                _check_lists(f"metrics.{name}", value, layers)
        if metrics.memory:
            name = "metrics.memory.layer_bytes_per_token"
            _check_lists(name, metrics.memory.layer_bytes_per_token, layers)
        for way, section in [("metrics", metrics), ("curves", self.curves)]:
            for name, inner in section or ():
                for key, curves in _curves(inner) if isinstance(inner, _Swept) else ():
                    points = "points", len(getattr(inner, inner.axis))
                    _check_lists(f"{way}.{name}.{key}", curves, layers, points)
        losses = metrics.answer_loss
        if losses and losses.heads:
            way, first = "metrics.answer_loss.heads", losses.heads.losses
            samples = "samples", len(losses.by_sample)
            _check_lists(f"{way}.by_sample", losses.heads.by_sample, samples)
            points = "points", len(losses.budgets)
            for key, rows in _curves(losses.heads):
                _check_lists(f"{way}.{key}", rows, layers)
                for i, (heads, right) in enumerate(zip(rows, first, strict=True)):
                    name = f"{way}.{key}.{i}"
                    _check_lists(name, heads or [], ("KV heads", len(right or [])), points)
        return self


def _curves(section: _Swept) -> Iterator[tuple[str, Any]]:
    """Yield every list of curves in a section, one a layer."""
    for name, value in section:
        if name == "by_sample":
            yield from ((f"{name}.{i}", rows) for i, rows in enumerate(value))
        elif name != section.axis and isinstance(value, list):
            yield name, value


def _check_lists(name: str, value: Any, *axes: tuple[str, int]) -> None:
    """Check how long nested lists are, axis by axis; null is what was not measured."""
    (noun, size), *inner = axes
    if value is None:
        return
    if len(value) != size:
        raise ValueError(f"`{name}` has {len(value)} entries, but there are {size} {noun}")
    for i, each in enumerate(value if inner else ()):
        _check_lists(f"{name}.{i}", each, *inner)
