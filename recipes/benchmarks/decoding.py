"""Decode steps over a compressed cache in turn with compiled steps over full caches.

A full cache is transformers' StaticCache, filled with random keys and values in place of a prompt:
what a step costs does not depend on them. It is attended by

- `sdpa`, as transformers has it: free slots are masked, so a compiled step repeats the KV heads;
- `unmasked`: sdpa over all slots as if none were free, which repeats nothing and leaves torch its
  flash kernel; what a full cache costs whose size is just right;
- `flash_attention_2`, of the package flash-attn, likewise.

Its step is as fast as it can be made: products of one row are compiled with coordinate descent, as
kvtool's are, and on a GPU a CUDA graph holds the whole step, the choice of the next token included.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType

import torch
from transformers import AttentionInterface, PreTrainedModel, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

import kvtool
from kvtool.cache.whole.cache import KVCache
from kvtool.generation import decode_step, prefill
from kvtool.generation.compiled import ONE_ROW_OPTIONS
from kvtool.generation.feeding import wait
from kvtool.generation.graphs import CudaRecording, StaticDecoding, StepsReport, recorder
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


def recorded(call: Callable[[], object], recording: CudaRecording) -> Callable[[], None]:
    """Record a call that has run before, and return what replays it."""
    recording.record(call, ())

    def replay(kept: Callable[[], object] = call) -> None:  # whose tensors the recording uses
        recording.replay()

    return replay


class FullCacheSteps:
    """Steps over a full cache, filled so far that the steps to come just fit.

    Args:
        backend: of torch.compile; None: nothing is compiled.
        tuned: products of one row are compiled as kvtool compiles them.
        graphs: on a GPU, the step is a CUDA graph from the third call on.

    Attributes:
        captured: whether it is one; what cannot be recorded runs as it is.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        length: int,
        room: int,
        backend: str | None,
        batch: int = 1,
        *,
        tuned: bool = True,
        graphs: bool = True,
    ) -> None:
        config, device = model.config, model.device
        cache = StaticCache(config=config, max_cache_len=length)
        cache.early_initialization(
            batch, config.num_key_value_heads, config.head_dim, model.dtype, device
        )
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
            layer.cumulative_length.fill_(length - room)
        self.token = torch.full((batch, 1), 7, device=device)
        self.positions = torch.full((batch, 1), length - room, device=device)
        self.cache, self._calls, self.captured = cache, 0, False
        self._record = recorder(model) if graphs else None

        def step(token: torch.Tensor, positions: torch.Tensor) -> None:
            out = model(input_ids=token, position_ids=positions, past_key_values=cache)
            token.copy_(out.logits[:, -1].argmax(-1, keepdim=True))
            positions.add_(1)

        if backend is not None:
            step = torch.compile(
                with_own_code(step),
                fullgraph=True,
                dynamic=False,  # or a second length would get slower code for any length
                backend=backend,
                options=ONE_ROW_OPTIONS if tuned and batch == 1 and backend == "inductor" else None,
            )
        self._step: Callable[[], object] = partial(step, self.token, self.positions)

    @torch.no_grad()
    def __call__(self) -> None:
        self._calls += 1
        if self._calls == 3 and self._record is not None:
            with contextlib.suppress(RuntimeError):
                self._step, self.captured = recorded(self._step, self._record()), True
        self._step()

    def read_bytes(self) -> int:
        """Bytes of the keys and values that a step attends to."""
        return sum(t.nbytes for layer in self.cache.layers for t in (layer.keys, layer.values))


def prompted(model: PreTrainedModel, policy: str, budget: int, rows: int) -> KVCache:
    """Fill a cache by a random prompt of twice its budget."""
    ids = torch.randint(0, model.config.vocab_size, (rows, 2 * budget), device=model.device)
    cache = kvtool.build_cache(model, policy, budget)
    prefill(model, cache, ids)
    return cache


def steps_of(model: PreTrainedModel, room: int, how: str, backend: str) -> StaticDecoding:
    """Return kvtool's steps, so many to come: eager, captured or compiled."""
    return StaticDecoding(
        model, room, compiled=how == "compiled", graphs=how != "eager", backend=backend
    )


class PolicySteps:
    """Eager and compiled steps of a policy, over caches of their own that have met their budget.

    Args:
        room: steps after which to `refill`, before policies that keep what is decoded outgrow it.
    """

    def __init__(
        self, model: PreTrainedModel, policy: str, budget: int, room: int, backend: str
    ) -> None:
        self._model, self._policy, self._budget = model, policy, budget
        self._token = torch.full((1,), 7, device=model.device)
        self._compiled = steps_of(model, room, "compiled", backend)

    def refill(self) -> None:
        """Begin again after the prompt."""
        self._caches = [prompted(self._model, self._policy, self._budget, 1) for _ in range(2)]

    def eager(self) -> None:
        decode_step(self._model, self._caches[0], self._token)

    def compiled(self) -> None:
        self._compiled(self._model, self._caches[1], self._token)

    def report(self) -> StepsReport:
        """What was compiled so far."""
        return self._compiled.steps

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
