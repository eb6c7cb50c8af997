"""The profile that `kvtool profile` measures: a number per layer for each analysis, and curves.

Every list over layers has `model.layers` entries, null for a layer that the analysis does not see
(one without attention, say). Numbers per head are in a file of their own beside the document.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
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
)
from kvtool.documents.memory import ModelShape
from kvtool.sizes import MOST_TOKENS

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


class Jaccard(SparseSection):
    """Overlap of what a score keeps step by step and what it would keep with nothing evicted.

    `rates` are shares of the text that are kept; each score has layers x rates.
    """

    rates: Annotated[list[FiniteFloat], Unit("of the text")]
    aas: Annotated[LayerCurves | None, _PER_RATE] = None
    aqas: Annotated[LayerCurves | None, _PER_RATE] = None
    ltas: Annotated[LayerCurves | None, _PER_RATE] = None
    mas: Annotated[LayerCurves | None, _PER_RATE] = None


class OutputErrors(Section):
    """Normalised squared error of each layer's attention output: layers x budgets.

    `budgets` are tokens per layer and KV head, of prompts of `data.tokens`.
    """

    policy: str
    budgets: Annotated[list[TokenCount], Unit("tokens per layer and KV head")]
    errors: Annotated[LayerCurves, Unit("a list per layer, a number per budget")]


HeadCurves = list[list[list[FiniteFloat]] | None]
"""One list per layer, in it one per KV head, an entry for each point of the axis beside it."""

_PER_HEAD = Unit("nats per token: a list per layer, in it one per KV head, a number per budget")


class HeadLosses(Section):
    """What the answer loses where one KV head of one layer alone is cut: layers x heads x budgets.

    The other heads of its layer, and all other layers, keep everything.
    """

    losses: Annotated[HeadCurves, _PER_HEAD]
    standard_errors: Annotated[HeadCurves, _PER_HEAD]
    by_sample: Annotated[
        list[HeadCurves],
        Unit("nats per token: for each sample a list per layer, in it one per KV head"),
    ]


class AnswerLosses(SparseSection):
    """What the answer loses where one layer alone is cut, in nats per token: layers x budgets.

    `budgets` are tokens per KV head of that layer, of prompts of `data.tokens`. `losses` are means
    over the samples of `by_sample`, from which plans are made. `heads` has the same of KV heads,
    where these were cut one by one.
    """

    policy: str
    budgets: Annotated[list[TokenCount], Unit("tokens per KV head of the layer that is cut")]
    losses: Annotated[LayerCurves, Unit("nats per token: a list per layer, a number per budget")]
    standard_errors: Annotated[
        LayerCurves, Unit("nats per token: a list per layer, a number per budget")
    ]
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


class CosineCurve(Section):
    """Mean cosine of two queries by their distance, in tokens: layers x distances."""

    distances: Annotated[list[TokenCount], Unit("tokens")]
    values: Annotated[LayerCurves, Unit("a list per layer, a number per distance")]


class UnionCurve(Section):
    """How the union of the top-k grows: layers x steps."""

    k: TokenCount
    steps: Annotated[list[TokenCount], Unit("decoded tokens")]
    values: Annotated[LayerCurves, Unit("tokens: a list per layer, a number per step")]


class RobustnessCurve(Section):
    """Standard deviation of the attention that a token got in its first steps: layers x steps."""

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
    def _as_many_as_layers(self) -> ProfileDocument:
        layers = self.model.layers
        for name, values in self._over_layers():
            if len(values) != layers:
                raise ValueError(
                    f"`{name}` has {len(values)} entries, but the model {layers} layers"
                )
        return self

    @model_validator(mode="after")
    def _as_many_as_heads(self) -> ProfileDocument:
        lists, losses = self._head_losses(), self.metrics.answer_loss
        if losses and losses.heads and len(losses.heads.by_sample) != len(losses.by_sample):
            raise ValueError(
                f"`metrics.answer_loss.heads.by_sample` has {len(losses.heads.by_sample)} samples, "
                f"and that of layers {len(losses.by_sample)}"
            )
        for name, layers in lists:
            for i, (heads, first) in enumerate(zip(layers, lists[0][1], strict=True)):
                found, right = (0 if each is None else len(each) for each in (heads, first))
                if found != right or heads == []:
                    raise ValueError(
                        f"`{name}.{i}` has {found} KV heads, and the first list {right}"
                    )
        return self

    @model_validator(mode="after")
    def _as_many_as_points(self) -> ProfileDocument:
        for name, curves, points in self._over_points():
            for layer, curve in enumerate(curves or []):
                if curve is not None and len(curve) != points:
                    raise ValueError(
                        f"`{name}.{layer}` has {len(curve)} entries, but its axis {points} points"
                    )
        return self

    def _over_points(self) -> list[tuple[str, LayerCurves | None, int]]:
        """Return every list of curves with the points of its axis."""
        metrics, curves = self.metrics, self.curves
        found: list[tuple[str, LayerCurves | None, int]] = []
        if metrics.output_error:
            error = metrics.output_error
            found.append(("metrics.output_error.errors", error.errors, len(error.budgets)))
        if metrics.answer_loss:
            points = len(metrics.answer_loss.budgets)
            found += [(name, rows, points) for name, rows in self._losses()]
            for name, layers in self._head_losses():
                for i, heads in enumerate(layers):
                    found.append((f"{name}.{i}", None if heads is None else list(heads), points))
        if metrics.jaccard:
            points = len(metrics.jaccard.rates)
            for score in ("aas", "aqas", "ltas", "mas"):
                name = f"metrics.jaccard.{score}"
                found.append((name, getattr(metrics.jaccard, score), points))
        for name in ("query_cosine", "topk_union", "robustness"):
            curve = getattr(curves, name) if curves else None
            if curve is not None:
                axis = curve.distances if name == "query_cosine" else curve.steps
                found.append((f"curves.{name}.values", curve.values, len(axis)))
        return found

    def _losses(self) -> list[tuple[str, LayerCurves]]:
        """Return every list of layers in `answer_loss`."""
        found = self.metrics.answer_loss
        if found is None:
            return []
        name = "metrics.answer_loss"
        own = [(f"{name}.losses", found.losses), (f"{name}.standard_errors", found.standard_errors)]
        return own + [(f"{name}.by_sample.{i}", rows) for i, rows in enumerate(found.by_sample)]

    def _head_losses(self) -> list[tuple[str, HeadCurves]]:
        """Return every list of layers in `answer_loss.heads`."""
        found = self.metrics.answer_loss and self.metrics.answer_loss.heads
        if not found:
            return []
        name = "metrics.answer_loss.heads"
        own = [(f"{name}.losses", found.losses), (f"{name}.standard_errors", found.standard_errors)]
        return own + [(f"{name}.by_sample.{i}", rows) for i, rows in enumerate(found.by_sample)]

    def _over_layers(self) -> list[tuple[str, list[Any]]]:
        metrics = self.metrics
        found: dict[str, Any] = {"model.layer_types": self.model.layer_types}
        for name in Metrics.model_fields:
            if isinstance(getattr(metrics, name), list):
                found[f"metrics.{name}"] = getattr(metrics, name)
        for score in ("aas", "aqas", "ltas", "mas") if metrics.jaccard else ():
            found[f"metrics.jaccard.{score}"] = getattr(metrics.jaccard, score)
        if metrics.output_error:
            found["metrics.output_error.errors"] = metrics.output_error.errors
        found.update(self._losses())
        found.update(self._head_losses())
        if metrics.memory:
            found["metrics.memory.layer_bytes_per_token"] = metrics.memory.layer_bytes_per_token
        return [(name, values) for name, values in found.items() if values is not None]
