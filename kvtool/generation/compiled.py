"""Compile a model's forward for decoding: one graph for every step once shapes are fixed.

Nothing in it depends on a number of the host, it returns nothing but logits, and what it changes
lies at fixed addresses (`kvtool.cache.steps.static`), so that it can be recorded as a CUDA graph.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from transformers import PreTrainedModel

from kvtool.cache.whole.cache import KVCache
from kvtool.documents.files import user_cache
from kvtool.errors import KvtoolError

_PAYS_FROM = 1536  # new tokens: on an H200, 53 s of compiling for 34 ms less a token of an 8B model
ONE_ROW_OPTIONS: dict[str, Any] = {"coordinate_descent_tuning": True, "combo_kernels": True}
"""On CUDA: products become reductions with norms, activations and residuals inside, and independent
kernels are launched as one. Of more rows products stay with cuBLAS, and tuning finds nothing."""


def compiled_forward(
    model: PreTrainedModel, backend: str = "inductor", rows: int = 1
) -> Callable[..., Any]:
    """Return a model's forward, compiled as one graph when it first runs.

    Args:
        rows: that it decodes.
    """
    options = None
    if backend == "inductor":
        _keep_compiled()
        options = ONE_ROW_OPTIONS if model.device.type == "cuda" and rows == 1 else None
    return torch.compile(model.forward, fullgraph=True, backend=backend, options=options)


def one_device(model: PreTrainedModel) -> bool:
    """Whether a model lies on one device, in one process."""
    devices = set((getattr(model, "hf_device_map", None) or {"": 0}).values())
    return len(devices) == 1 and (getattr(model, "tp_size", None) or 1) == 1


def pays(model: PreTrainedModel, new_tokens: int) -> bool:
    """Whether to compile by default: many tokens on one CUDA device, in one process.

    There a step of many small operations waits for the host; on a CPU it waits for the weights.
    """
    return model.device.type == "cuda" and one_device(model) and new_tokens >= _PAYS_FROM


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


def explain(error: Exception, model: PreTrainedModel, cache: KVCache) -> KvtoolError:
    """Return what to say of a step that cannot be compiled."""
    cause = getattr(error, "inner_exception", error)  # what a compiler raised, without its frame
    reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
    return KvtoolError(
        f"policy `{cache.policy}` on `{model.config.model_type}` cannot be compiled: "
        f"{reason[:1].lower()}{reason[1:]}",
        hint="leave out --compile (`compiled` in Python)",
    )
