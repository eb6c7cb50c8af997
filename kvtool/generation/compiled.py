"""Decode through torch.compile: one graph for every step, once the cache's shapes are fixed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from kvtool.cache.cache import KVCache
from kvtool.errors import KvtoolError
from kvtool.generation.feeding import decode_step


@dataclass(frozen=True)
class CompileReport:
    """What was compiled.

    Attributes:
        graphs: graphs made: the first step's, and one in which the count of tokens may change.
        eager_steps: decoded tokens before the shapes were fixed.
        compiled_steps: decoded tokens that ran compiled.
        compile_s: seconds of the steps that made graphs.
    """

    graphs: int
    eager_steps: int
    compiled_steps: int
    compile_s: float

    @classmethod
    def join(cls, reports: Iterable[CompileReport]) -> CompileReport:
        """Sum the reports of one run after another."""
        return cls(*map(sum, zip(*map(astuple, reports), strict=True)))


class CompiledDecoding:
    """Decode steps of one model; those that find fixed shapes run compiled.

    Args:
        tokens: how many more tokens layers that append take room for at a time.
        backend: of torch.compile.
    """

    def __init__(self, model: PreTrainedModel, tokens: int, backend: str = "inductor") -> None:
        self._model, self._tokens = model, tokens
        self._forward = torch.compile(model.forward, fullgraph=True, backend=backend)
        self._graphs = self._eager = self._compiled = 0
        self._seconds = 0.0

    def __call__(self, model: PreTrainedModel, cache: KVCache, token_ids: Tensor) -> Tensor:
        """Feed one token per row: see `decode_step`.

        Raises:
            KvtoolError: the policy or the model cannot be compiled.
        """
        if not cache.fix_shapes(self._tokens):
            self._eager += 1
            return decode_step(model, cache, token_ids)
        before, start = counters["stats"]["unique_graphs"], time.perf_counter()
        try:
            logits = decode_step(model, cache, token_ids, self._forward)
        except TorchDynamoException as error:
            reason = str(error).strip().splitlines()[0]
            raise KvtoolError(
                f"policy `{cache.policy}` on `{model.config.model_type}` cannot be compiled: "
                f"{reason[:1].lower()}{reason[1:]}",
                hint="leave out --compile (`compiled` in Python)",
            ) from error
        made = counters["stats"]["unique_graphs"] - before
        if made:
            self._graphs += made
            self._seconds += time.perf_counter() - start
        self._compiled += 1
        return logits

    def report(self) -> CompileReport:
        """What has been compiled so far."""
        return CompileReport(self._graphs, self._eager, self._compiled, self._seconds)
