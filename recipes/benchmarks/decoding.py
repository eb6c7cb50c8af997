"""Decode steps over a compressed cache in turn with compiled steps over full caches.

A full cache is transformers' StaticCache, filled with random keys and values in place of a prompt:
what a step costs does not depend on them. It is attended by

- `sdpa`, as transformers has it: free slots are masked, so a compiled step repeats the KV heads;
- `unmasked`: sdpa over all slots as if none were free, which repeats nothing and leaves torch its
  flash kernel; what a full cache costs whose size is just right;
- `flash_attention_2`, of the package flash-attn, likewise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType

import torch
from transformers import AttentionInterface, PreTrainedModel, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

import kvtool
from kvtool.generation import decode_step, prefill
from kvtool.generation.feeding import wait
from kvtool.generation.graphs import StaticDecoding, StepsReport
from recipes.benchmarks.models import with_weights_of
from recipes.benchmarks.speed import median_ratio, time_steps

ATTENTIONS = ("sdpa", "unmasked", "flash_attention_2")
WARM = 6  # steps, so that what is compiled in two graphs, and recorded, is all there


def no_mask(*args, **kwargs) -> None:
    """No slot is hidden."""


AttentionInterface.register("unmasked", sdpa_attention_forward)
AttentionMaskInterface.register("unmasked", no_mask)


@dataclass(frozen=True)
class DecodeLine:
    """A policy against one full cache; ratios are of its times to that one's, in turns.

    Attributes:
        attention, length: of the full cache; `length` is its size in tokens.
        share, full_share: of the memory's bandwidth, as far as weights and K/V count.
        graphs: that the policy's steps were compiled to so far.
    """

    policy: str
    budget: int
    attention: str
    length: int
    full_ms: float
    full_share: float
    eager_ms: float
    eager_ratio: float
    compiled_ms: float
    ratio: float
    share: float
    graphs: int


def with_own_code(function: FunctionType) -> FunctionType:
    """A copy that shares no code object: the compiler looks for graphs among those of that object,
    and makes only a limited number of one."""
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, closure=function.__closure__)


class FullCacheSteps:
    """Compiled steps over a full cache, filled so far that the steps to come just fit."""

    def __init__(
        self, model: PreTrainedModel, length: int, room: int, backend: str, batch: int = 1
    ) -> None:
        config = model.config
        self._device, self._seen, self._batch = model.device, length - room, batch
        self._cache = StaticCache(config=config, max_cache_len=length)
        self._cache.early_initialization(
            batch, config.num_key_value_heads, config.head_dim, model.dtype, model.device
        )
        for layer in self._cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
            layer.cumulative_length.fill_(self._seen)

        def forward(token: torch.Tensor, positions: torch.Tensor):
            return model(input_ids=token, position_ids=positions, past_key_values=self._cache)

        graphs = backend == "inductor" and self._device.type == "cuda"
        self._forward = torch.compile(
            with_own_code(forward),
            fullgraph=True,
            dynamic=False,  # or a second length would get slower code for any length
            backend=backend,
            mode="reduce-overhead" if graphs else None,
        )

    @torch.no_grad()
    def __call__(self) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        positions = torch.full((self._batch, 1), self._seen, device=self._device)
        token = torch.full((self._batch, 1), 7, device=self._device)
        self._forward(token, positions)
        self._seen += 1

    def read_bytes(self) -> int:
        """Bytes of the keys and values that a step attends to."""
        return sum(t.nbytes for layer in self._cache.layers for t in (layer.keys, layer.values))


class PolicySteps:
    """Eager and compiled steps of a policy, over caches of their own that have met their budget.

    Args:
        room: steps after which to `refill`, before policies that keep what is decoded outgrow it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: str,
        budget: int,
        room: int,
        backend: str,
        batch: int = 1,
    ) -> None:
        self._model, self._policy, self._budget = model, policy, budget
        self._token = torch.full((batch,), 7, device=model.device)
        shape = batch, 2 * budget
        self._ids = torch.randint(0, model.config.vocab_size, shape, device=model.device)
        self._compiled = StaticDecoding(model, room, backend=backend, compiled=True)

    def refill(self) -> None:
        """Begin again after the prompt."""
        self._caches = [
            kvtool.build_cache(self._model, self._policy, self._budget) for _ in range(2)
        ]
        for cache in self._caches:
            prefill(self._model, cache, self._ids)

    def eager(self) -> None:
        decode_step(self._model, self._caches[0], self._token)

    def compiled(self) -> None:
        self._compiled(self._model, self._caches[1], self._token)

    def report(self) -> StepsReport:
        """What was compiled so far."""
        return self._compiled.report()

    def read_bytes(self) -> int:
        """Bytes of the keys and values that a step attends to."""
        return self._caches[0].report().traffic_bytes


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that every token reads: of an input embedding it reads one row."""
    read = sum(weight.nbytes for weight in model.parameters())
    embedding = model.get_input_embeddings().weight
    return read if model.get_output_embeddings().weight is embedding else read - embedding.nbytes


def copy_bandwidth(model: PreTrainedModel) -> float:
    """Bytes a second, read and written, of a large copy on the model's device."""
    size = 2**30 if model.device.type == "cuda" else 2**28
    source = torch.ones(size // 4, device=model.device)
    target = torch.empty_like(source)
    times = time_steps([lambda: target.copy_(source)], 7, 2, lambda: wait(model))[0]
    return 2 * size / (statistics.median(times) / 1e3)


def compare(
    ours: PolicySteps,
    full: FullCacheSteps,
    steps: int,
    limit: Callable[[int], float],
    synchronize: Callable[[], None],
) -> dict[str, float]:
    """Measure both in turns, in terms of `DecodeLine`.

    Args:
        limit: milliseconds that a step needs at least, given the bytes of its keys and values.
    """
    base, slow, quick = time_steps([full, ours.eager, ours.compiled], steps, WARM, synchronize)
    base_ms, quick_ms = statistics.median(base), statistics.median(quick)
    return {
        "full_ms": base_ms,
        "full_share": limit(full.read_bytes()) / base_ms,
        "eager_ms": statistics.median(slow),
        "eager_ratio": median_ratio(slow, base),
        "compiled_ms": quick_ms,
        "ratio": median_ratio(quick, base),
        "share": limit(ours.read_bytes()) / quick_ms,
        "graphs": ours.report().graphs,
    }


def decode_lines(ours, plain, args, bandwidth: float, note) -> Iterator[DecodeLine]:
    """Every policy against every full cache; what fails is noted and left out.

    The compiler begins anew with every policy, since a policy's graphs have guards that the next
    would have to fail first.
    """
    weights, room = weight_bytes(plain), args.steps + WARM

    def limit(kv_bytes: int) -> float:
        return (weights + kv_bytes) / bandwidth * 1e3

    def against(steps: PolicySteps, attention: str, length: int) -> dict[str, float]:
        model = with_weights_of(plain)
        model.set_attn_implementation(attention)
        full = FullCacheSteps(model, length, room, args.backend)
        steps.refill()
        return compare(steps, full, args.steps, limit, lambda: wait(ours))

    for policy in args.policies:
        torch._dynamo.reset()
        steps = PolicySteps(ours, policy, args.budget, room, args.backend)
        for attention in args.attentions:
            for length in (args.budget, *args.lengths):
                note(f"{policy}: compile and run, against {attention} over {length} tokens")
                try:
                    found = against(steps, attention, length)
                except Exception as error:  # one of many must not cost the others their numbers
                    note(f"left out: {type(error).__name__}: {error}")
                    continue
                yield DecodeLine(policy, args.budget, attention, length, **found)
