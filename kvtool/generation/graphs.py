"""Decode by static steps: recorded once as a CUDA graph, and replayed for every token that follows.

An eager step of many small operations waits for the host; a replayed one is a single launch. It
reads and writes what lies at fixed addresses (`kvtool.cache.steps.static`), the token that it feeds
as well: where tokens are drawn in the same graph, the host only reads them, one step late.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from kvtool.cache.steps.static import StaticSteps
from kvtool.cache.whole.cache import KVCache
from kvtool.cache.whole.layers import why_not
from kvtool.generation.compiled import compiled_forward, explain, one_device
from kvtool.generation.feeding import decode_step

_MOST_ROOM = 2048  # tokens, since every step attends to the empty slots as well
_PAYS_FROM = 4  # tokens; recording takes about as long as a step by itself


_wanted: ContextVar[bool] = ContextVar("wanted", default=True)


@contextmanager
def recording(wanted: bool) -> Iterator[None]:
    """Say whether steps that begin inside are recorded at all."""
    before = _wanted.set(wanted)
    try:
        yield
    finally:
        _wanted.reset(before)


class Recording(Protocol):
    """A step that can be run again, on what its tensors hold by then."""

    def record(self, run: Callable[[], Tensor], generators: Iterable[torch.Generator]) -> Tensor:
        """Record what a function does to tensors, which does not happen yet; what it returns."""

    def replay(self) -> None:
        """Do it."""


class CudaRecording:
    """A CUDA graph."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._graph = device, torch.cuda.CUDAGraph()

    def record(self, run: Callable[[], Tensor], generators: Iterable[torch.Generator]) -> Tensor:
        for each in generators:
            self._graph.register_generator_state(each)
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(self._graph, capture_error_mode="thread_local"),
        ):
            return run()

    def replay(self) -> None:
        with torch.cuda.device(self._device):
            self._graph.replay()


def recorder(model: PreTrainedModel) -> Callable[[], Recording] | None:
    """Return what makes recordings of a model's steps; None: its device knows none."""
    if model.device.type != "cuda" or not one_device(model):
        return None
    return lambda: CudaRecording(model.device)


class Draw(Protocol):
    """What draws the next token from logits, (rows, vocab), where nothing asks the host.

    Attributes:
        token: (rows,) int64, at a fixed address.
        generators: that it draws by, which others in the same state may replace.
    """

    token: Tensor
    generators: list[torch.Generator]

    def __call__(self, logits: Tensor) -> None: ...


@dataclass(frozen=True)
class StepsReport:
    """How decoded tokens ran.

    Attributes:
        graphs: graphs compiled; none where an earlier run has left one that fits.
        eager_steps: decoded tokens whose operations the host launched one by one, such as those
            before the shapes were fixed.
        compiled_steps: decoded tokens that ran compiled.
        compile_s: seconds of the steps that were compiled.
        cuda_graphs: whether steps were replayed as CUDA graphs.
        replayed_steps: decoded tokens that were replayed without being compiled.
    """

    graphs: int
    eager_steps: int
    compiled_steps: int
    compile_s: float
    cuda_graphs: bool = False
    replayed_steps: int = 0

    @classmethod
    def join(cls, reports: Iterable[StepsReport]) -> StepsReport:
        """Sum the reports of one run after another."""
        reports = list(reports)
        return cls(
            graphs=sum(each.graphs for each in reports),
            eager_steps=sum(each.eager_steps for each in reports),
            compiled_steps=sum(each.compiled_steps for each in reports),
            compile_s=sum(each.compile_s for each in reports),
            cuda_graphs=any(each.cuda_graphs for each in reports),
            replayed_steps=sum(each.replayed_steps for each in reports),
        )


@dataclass(frozen=True)
class _Recorded:
    """A recorded step.

    Attributes:
        of: what it holds for, as `_Key`.
        token: (rows,) int64, which it feeds.
        logits: (rows, vocab), which it leaves.
    """

    of: _Key
    recording: Recording
    token: Tensor
    logits: Tensor


@dataclass(frozen=True)
class _Key:
    """What a recorded step holds for: the same tensors in the same places, and the same draw."""

    steps: StaticSteps
    epoch: int
    rows: int
    draw: Draw | None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and (
            self.steps is other.steps
            and self.draw is other.draw
            and (self.epoch, self.rows) == (other.epoch, other.rows)
        )


class StaticDecoding:
    """Decode steps of one model; those that find fixed shapes run static.

    The first one runs as it is, and sets up what is set up once. The next one is recorded, if the
    device knows how, and those that follow are replayed.

    Args:
        tokens: how many are to come. Layers that append take slots for them, or for 2048 at a time;
            two more graphs serve all larger buffers.
        compiled: whether steps run through torch.compile.
        graphs: whether they are recorded where that is possible.
        backend: of torch.compile.
        required: whether what cannot be compiled is an error; else it runs as it is.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokens: int,
        *,
        compiled: bool = False,
        graphs: bool = True,
        backend: str = "inductor",
        required: bool = True,
    ) -> None:
        self._model, self._room, self._required = model, min(tokens, _MOST_ROOM), required
        pays = graphs and _wanted.get() and tokens >= _PAYS_FROM
        self._record = recorder(model) if pays else None
        self._silent = not pays or (self._record is None and model.device.type != "cuda")
        self._compile = partial(compiled_forward, model, backend) if compiled else None
        self._forward: Callable[..., Any] | None = None
        self._recorded: _Recorded | None = None
        self._last: _Key | None = None
        self._graphs = self._eager = self._compiled = self._replayed = 0
        self._seconds, self._ran_graphs = 0.0, False

    @property
    def replays(self) -> bool:
        """Whether steps are replayed once shapes are fixed."""
        return self._record is not None

    def __call__(self, model: PreTrainedModel, cache: KVCache, token_ids: Tensor) -> Tensor:
        """Feed one token per row: see `decode_step`."""
        logits = self.feed(cache, token_ids)
        recorded = self._recorded  # the next step writes over its logits
        return logits.clone() if recorded is not None and logits is recorded.logits else logits

    @torch.no_grad()
    def feed(self, cache: KVCache, token_ids: Tensor, draw: Draw | None = None) -> Tensor:
        """Feed one token per row, and draw the next.

        Args:
            token_ids: (rows,) int64; of a draw, its own.

        Returns:
            (rows, vocab) float32 logits, until the next step.
        """
        cache.check_whole()
        static = self._record is not None or self._compile is not None
        if not static or not cache.fix_shapes(self._room):
            self._eager += 1
            if not self._silent:
                self._explain(cache)
            return self._run(cache, token_ids, draw)
        if self._forward is None and self._compile is not None:
            self._forward = self._compile(len(token_ids))
        before, start = counters["stats"]["unique_graphs"], time.perf_counter()
        try:
            logits = self._step(cache, token_ids, draw)
        except TorchDynamoException as error:
            if self._required:
                raise explain(error, self._model, cache) from error
            self._compile = self._forward = None
            return self.feed(cache, token_ids, draw)
        made = counters["stats"]["unique_graphs"] - before
        if made:
            self._graphs += made
            self._seconds += time.perf_counter() - start
        self._compiled += self._forward is not None
        return logits

    def _step(self, cache: KVCache, token_ids: Tensor, draw: Draw | None) -> Tensor:
        with cache.static_step():
            try:
                key = _Key(cache.static, cache.static.epoch, len(token_ids), draw)
                if self._record is not None and key == self._last:
                    logits = self._replay(cache, key, token_ids)
                else:
                    self._recorded, self._last = None, key
                    logits = self._run(cache, token_ids, draw)
                    self._eager += self._forward is None
            except (TorchDynamoException, FailOnRecompileLimitHit):
                raise  # nothing has run
            except BaseException:
                cache.break_off()  # which a graph itself would say at its end only
                raise
        cache.end_forward(token_ids[:, None])
        return logits

    def _replay(self, cache: KVCache, key: _Key, token_ids: Tensor) -> Tensor:
        assert self._record is not None, "there is a recorder"
        if self._recorded is None:
            token = token_ids if key.draw is not None else token_ids.clone()
            generators = [] if key.draw is None else key.draw.generators
            states, recording = [each.get_state() for each in generators], self._record()
            try:
                logits = recording.record(lambda: self._run(cache, token, key.draw), generators)
            except Exception as error:  # any: what a device cannot record fails in its own way
                cache.take_back_step()
                self._record = None
                generators[:] = [
                    _generator_in(state, token.device) for state in states
                ]  # what has failed may have kept theirs
                _tell(self._model, cache, str(error).strip() or type(error).__name__)
                self._eager += self._forward is None
                return self._run(cache, token_ids, key.draw)
            self._recorded = _Recorded(key, recording, token, logits)
        recorded = self._recorded
        if recorded.token is not token_ids:
            recorded.token.copy_(token_ids)
        recorded.recording.replay()
        self._ran_graphs = True
        self._replayed += self._forward is None
        return recorded.logits

    def _run(self, cache: KVCache, token_ids: Tensor, draw: Draw | None) -> Tensor:
        static = cache.first_layer.seen_device is not None
        step = partial(
            decode_step, self._model, cache, token_ids, self._forward if static else None
        )
        try:
            logits = step()
        except FailOnRecompileLimitHit:  # of other policies, budgets and batches before
            torch._dynamo.reset()
            logits = step()
        if draw is not None:
            draw(logits)
        return logits

    def _explain(self, cache: KVCache) -> None:
        """Say what no later step will change."""
        self._silent = True
        several = self._record is None
        why = "the model is on several devices" if several else why_not(cache.policy, "static")
        if why is not None:
            _tell(self._model, cache, why)

    def report(self) -> StepsReport:
        """Report how steps have run so far."""
        counts = self._graphs, self._eager, self._compiled, self._seconds
        return StepsReport(*counts, self._ran_graphs, self._replayed)


def _generator_in(state: Tensor, device: torch.device) -> torch.Generator:
    return torch.Generator(device).set_state(state)


_told: set[tuple[str, str]] = set()


def _tell(model: PreTrainedModel, cache: KVCache, why: str) -> None:
    """Say once of a policy and a kind of model why its steps are not recorded."""
    kind = str(cache.policy), model.config.model_type
    if kind in _told:
        return
    _told.add(kind)
    logging.getLogger(__name__).warning(
        "kvtool: steps of `%s` on `%s` run one operation at a time, "
        "since no CUDA graph could be recorded: %s",
        *(*kind, why.splitlines()[0][:200]),
    )
