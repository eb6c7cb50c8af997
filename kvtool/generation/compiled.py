"""Decode through torch.compile: one graph for every step, once the cache's shapes are fixed.

On CUDA devices the graph is a CUDA graph as well. Nothing in it depends on a number of the host, it
returns nothing but logits, and what it changes lies at fixed addresses
(`kvtool.cache.steps.static`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import counters
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvtool.cache.whole.cache import KVCache
from kvtool.documents.files import user_cache
from kvtool.errors import KvtoolError
from kvtool.generation.feeding import decode_step

_MOST_ROOM = 2048  # tokens, since every step attends to the empty slots as well
_PAYS_FROM = 1536  # new tokens: on an H200, 53 s of compiling for 34 ms less a token of an 8B model


@dataclass(frozen=True)
class CompileReport:
    """What was compiled.

    Attributes:
        graphs: graphs made; none where an earlier run has left one that fits.
        eager_steps: decoded tokens that did not run compiled, such as those before the shapes were
            fixed.
        compiled_steps: decoded tokens that ran compiled.
        compile_s: seconds of the steps that made graphs.
        cuda_graphs: whether the compiled steps ran as CUDA graphs.
    """

    graphs: int
    eager_steps: int
    compiled_steps: int
    compile_s: float
    cuda_graphs: bool = False

    @classmethod
    def join(cls, reports: Iterable[CompileReport]) -> CompileReport:
        """Sum the reports of one run after another."""
        reports = list(reports)
        return cls(
            graphs=sum(each.graphs for each in reports),
            eager_steps=sum(each.eager_steps for each in reports),
            compiled_steps=sum(each.compiled_steps for each in reports),
            compile_s=sum(each.compile_s for each in reports),
            cuda_graphs=any(each.cuda_graphs for each in reports),
        )


def pays(model: PreTrainedModel, new_tokens: int) -> bool:
    """Whether to compile by default: many tokens on one CUDA device, in one process.

    There a step of many small operations waits for the host; on a CPU it waits for the weights.
    """
    devices = set((getattr(model, "hf_device_map", None) or {"": 0}).values())
    whole = len(devices) == 1 and (getattr(model, "tp_size", None) or 1) == 1
    return model.device.type == "cuda" and whole and new_tokens >= _PAYS_FROM


def _keep_compiled() -> None:
    """Let torch keep what it compiles in the user's cache folder, for runs to come."""
    given, own = os.environ.get("TORCHINDUCTOR_CACHE_DIR"), Path(gettempdir()) / "torchinductor_"
    folder = user_cache() / "compiled"
    if given is not None and not given.startswith(str(own)):
        return
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if os.access(folder, os.W_OK):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


class CompiledDecoding:
    """Decode steps of one model; those that find fixed shapes run compiled.

    Args:
        tokens: how many are to come. Layers that append take slots for them, or for 2048 at a time;
            two more graphs serve all larger buffers.
        backend: of torch.compile.
        required: whether what cannot be compiled is an error; else it runs as it is.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokens: int,
        backend: str = "inductor",
        required: bool = True,
    ) -> None:
        self._model, self._room, self._required = model, min(tokens, _MOST_ROOM), required
        self._cuda = model.device.type == "cuda"
        if backend == "inductor":
            _keep_compiled()
        mode = "reduce-overhead" if self._cuda and backend == "inductor" else None
        self._forward = torch.compile(model.forward, fullgraph=True, backend=backend, mode=mode)
        self._graphs = self._eager = self._compiled = 0
        self._seconds = 0.0
        self._skipped = counters["inductor"]["cudagraph_skips"]
        self._failed = False

    def __call__(self, model: PreTrainedModel, cache: KVCache, token_ids: Tensor) -> Tensor:
        """Feed one token per row: see `decode_step`."""
        cache.check_whole()
        if self._failed or not cache.fix_shapes(self._room):
            self._eager += 1
            return decode_step(model, cache, token_ids)
        before, start = counters["stats"]["unique_graphs"], time.perf_counter()
        try:
            logits = self._step(cache, token_ids)
        except TorchDynamoException as error:
            if self._required:
                raise _explain(error, model, cache) from error
            self._failed = True
            return self(model, cache, token_ids)
        made = counters["stats"]["unique_graphs"] - before
        if made:
            self._graphs += made
            self._seconds += time.perf_counter() - start
        self._compiled += 1
        return logits

    def _step(self, cache: KVCache, token_ids: Tensor) -> Tensor:
        if self._cuda:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            logits = decode_step(self._model, cache, token_ids, self._run(cache))
        except FailOnRecompileLimitHit:  # of other policies, budgets and batches before
            torch._dynamo.reset()
            logits = decode_step(self._model, cache, token_ids, self._run(cache))
        return logits.clone() if self._cuda else logits  # the next step writes over it

    def _run(self, cache: KVCache):
        def forward(**inputs) -> CausalLMOutputWithPast:
            with cache.static_step():
                try:
                    return self._forward(**inputs)
                except (TorchDynamoException, FailOnRecompileLimitHit):
                    raise  # nothing has run
                except BaseException:
                    cache.break_off()  # which the graph itself would say at its end only
                    raise

        return forward

    def report(self) -> CompileReport:
        """Report what has been compiled so far."""
        skipped = counters["inductor"]["cudagraph_skips"] - self._skipped
        graphs = self._cuda and self._compiled > 0 and skipped == 0
        return CompileReport(self._graphs, self._eager, self._compiled, self._seconds, graphs)


def _explain(error: Exception, model: PreTrainedModel, cache: KVCache) -> KvtoolError:
    cause = getattr(error, "inner_exception", error)  # what a compiler raised, without its frame
    reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
    return KvtoolError(
        f"policy `{cache.policy}` on `{model.config.model_type}` cannot be compiled: "
        f"{reason[:1].lower()}{reason[1:]}",
        hint="leave out --compile (`compiled` in Python)",
    )
