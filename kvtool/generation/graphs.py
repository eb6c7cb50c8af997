"""Decode by static steps: recorded once as a CUDA graph, and replayed for every token that follows.

An eager step of many small operations waits for the host; a replayed one is a single launch. It
reads and writes what lies at fixed addresses (`kvtool.cache.steps.static`), the token that it feeds
as well: where tokens are drawn in the same graph, the host only reads them, one step late.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import cache as remember
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

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


class CudaRecording:
    """A CUDA graph, and the memory of its own that torch gives it."""

    _one_at_a_time = threading.Lock()  # as torch wants it of a process
    _failed: ClassVar[list[torch.cuda.CUDAGraph]] = []  # which torch's allocator may still call

    def __init__(self, device: torch.device) -> None:
        self._device, self._graph = device, torch.cuda.CUDAGraph()

    def record(self, run: Callable[[], Tensor], generators: Iterable[torch.Generator]) -> Tensor:
        """Record what a function does to tensors, which does not happen yet; what it returns.

        Where that fails, the function's error is raised, and generators are as they were.
        """
        for each in generators:
            self._graph.register_generator_state(each)
        with self._one_at_a_time, torch.cuda.device(self._device):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # nothing can be given back while a graph is recorded
            with torch.cuda.stream(_recording_stream(self._device)):
                try:
                    self._graph.capture_begin(capture_error_mode="thread_local")
                    found = run()
                    self._graph.capture_end()
                except BaseException:
                    with suppress(RuntimeError):  # says that something else has failed
                        self._graph.capture_end()
                    self._failed.append(self._graph)
                    own = torch.cuda.default_generators[torch.cuda.current_device()]
                    for each in (own, *generators):  # which wait for the recording's end
                        each.graphsafe_set_state(each.clone_state())
                    raise
        return found

    def replay(self) -> None:
        """Do it."""
        with torch.cuda.device(self._device):
            self._graph.replay()


@remember
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the only stream that a device's steps are recorded on: cuBLAS has memory for each."""
    return torch.cuda.Stream(device)


def recorder(model: PreTrainedModel) -> Callable[[], CudaRecording] | None:
    """Return what makes recordings of a model's steps; None: its device knows none."""
    if model.device.type != "cuda" or not one_device(model):
        return None
    return lambda: CudaRecording(model.device)


class Draw(Protocol):
    """Draws the next token from logits, (rows, vocab), by generators, and asks the host nothing."""

    generators: list[torch.Generator]

    def __call__(self, logits: Tensor) -> None: ...


@dataclass
class StepsReport:
    """How decoded tokens ran, so far.

    Attributes:
        graphs: graphs compiled; none where an earlier run has left one that fits.
        eager_steps: decoded tokens whose operations the host launched one by one, such as those
            before the shapes were fixed.
        compiled_steps: decoded tokens that ran compiled.
        compile_s: seconds of the steps that were compiled.
        cuda_graphs: whether steps were replayed as CUDA graphs.
        replayed_steps: decoded tokens that were replayed without being compiled.
    """

    graphs: int = 0
    eager_steps: int = 0
    compiled_steps: int = 0
    compile_s: float = 0.0
    cuda_graphs: bool = False
    replayed_steps: int = 0

    def __add__(self, other: StepsReport) -> StepsReport:
        """Put the steps of two runs together."""
        both = {name: value + getattr(other, name) for name, value in asdict(self).items()}
        return StepsReport(**both | {"cuda_graphs": self.cuda_graphs or other.cuda_graphs})


class _Recorded(NamedTuple):
    """A recorded step, with the (rows,) token that it feeds and the logits that it leaves."""

    recording: CudaRecording
    token: Tensor
    logits: Tensor


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
        self._says_why = pays and (self._record is not None or model.device.type == "cuda")
        self._compile = partial(compiled_forward, model, backend) if compiled else None
        self._forward: Callable[..., Any] | None = None
        self._last: tuple | None = None  # what a recording holds for
        self._recorded: _Recorded | None = None
        self.steps = StepsReport()

    @property
    def replays(self) -> bool:
        """Whether steps are replayed once shapes are fixed."""
        return self._record is not None

    def __call__(self, model: PreTrainedModel, cache: KVCache, token_ids: Tensor) -> Tensor:
        """Feed one token per row: see `decode_step`."""
        logits = self.feed(cache, token_ids)
        return logits if self._recorded is None else logits.clone()  # the next step writes over it

    @torch.no_grad()
    def feed(self, cache: KVCache, token_ids: Tensor, draw: Draw | None = None) -> Tensor:
        """Feed one token per row.

        Args:
            token_ids: (rows,) int64; of a draw, its own.
            draw: draws the next token from the logits and asks the host for nothing.

        Returns:
            (rows, vocab) float32 logits, until the next step.
        """
        cache.check_whole()
        static = self._record is not None or self._compile is not None
        if not static or not cache.fix_shapes(self._room):
            self.steps.eager_steps += 1
            if self._says_why:
                several, self._says_why = self._record is None, False
                why = "the model is on several devices" if several else None
                self._say(cache, why or why_not(cache.policy, "static"))
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
            self.steps.graphs += made
            self.steps.compile_s += time.perf_counter() - start
        self.steps.compiled_steps += self._forward is not None
        return logits

    def _step(self, cache: KVCache, token_ids: Tensor, draw: Draw | None) -> Tensor:
        with cache.static_step():
            try:
                found = cache.static, cache.static.epoch, len(token_ids), draw
                if found != self._last:
                    self._last, self._recorded = found, None
                elif self._recorded is None and self._record is not None:
                    self._recorded = self._capture(cache, token_ids, draw)
                if self._recorded is not None:
                    logits = self._replay(self._recorded, token_ids)
                else:
                    logits = self._run(cache, token_ids, draw)
                    self.steps.eager_steps += self._forward is None
            except (TorchDynamoException, FailOnRecompileLimitHit):
                raise  # nothing has run
            except BaseException:
                cache.break_off()  # which a graph itself would say at its end only
                raise
        cache.end_forward(token_ids[:, None])
        return logits

    def _capture(self, cache: KVCache, token_ids: Tensor, draw: Draw | None) -> _Recorded | None:
        """Record a step, which does not happen yet; None: steps run as they are from now on."""
        token = token_ids if draw is not None else token_ids.clone()
        try:
            if self._record is not None and self._kind(cache) not in _refused:
                recording, run = self._record(), partial(self._run, cache, token, draw)
                logits = recording.record(run, [] if draw is None else draw.generators)
                return _Recorded(recording, token, logits)
        except Exception as error:  # any: what a device cannot record fails in its own way
            cache.take_back_step()
            self._say(cache, str(error).strip() or type(error).__name__)
            if not isinstance(error, torch.OutOfMemoryError):
                _refused.add(self._kind(cache))
        self._record, self._says_why = None, False
        return None

    def _replay(self, recorded: _Recorded, token_ids: Tensor) -> Tensor:
        if recorded.token is not token_ids:
            recorded.token.copy_(token_ids)
        recorded.recording.replay()
        self.steps.cuda_graphs = True
        self.steps.replayed_steps += self._forward is None
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

    def _kind(self, cache: KVCache) -> tuple[str, str]:
        return str(cache.policy), self._model.config.model_type

    def _say(self, cache: KVCache, why: str | None) -> None:
        """Say once of a policy and a kind of model why its steps are not recorded."""
        kind = self._kind(cache)
        if why is not None and kind not in _told:
            _told.add(kind)
            logging.getLogger(__name__).warning(
                "kvtool: steps of `%s` on `%s` run one operation at a time, "
                "since no CUDA graph could be recorded: %s",
                *(*kind, why.splitlines()[0][:200]),
            )


_told: set[tuple[str, str]] = set()
_refused: set[tuple[str, str]] = set()
"""What has failed to be recorded: torch keeps the memory that it has taken, so once is enough."""
