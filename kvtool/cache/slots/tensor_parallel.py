"""Tensor parallelism: each process holds its part of a layer's heads, the same part of every layer.

Transformers splits the projections, so that keys arrive here as plain tensors of the process's own
heads, and a policy that decides head by head needs nothing. What looks across heads is reduced over
the processes, in this file alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from kvtool.errors import KvtoolError
from kvtool.model_shape import LayerShape
from kvtool.policies.numbers import ALL_HERE, KVHeads
from kvtool.transformers_versions import tensor_parallel_group


class ShardedHeads(KVHeads):
    """The heads of a layer, in equal parts over a group of processes."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group
        self.processes = distributed.get_world_size(group)
        self.place = distributed.get_rank(group)

    def first(self, held: int) -> int:
        return self.place * held

    def mean(self, numbers: Tensor) -> Tensor:
        return self.total(numbers.sum(1)) / (self.processes * numbers.shape[1])

    def total(self, numbers: Tensor) -> Tensor:
        return self._reduce(numbers, distributed.ReduceOp.SUM)

    def most(self, numbers: Tensor) -> Tensor:
        return self._reduce(numbers, distributed.ReduceOp.MAX)

    def all(self, slots: Tensor, empty: float) -> Tensor:
        kind = slots.dtype
        if kind == torch.bool:  # which not every backend can send
            slots = slots.to(torch.uint8)
        width = int(self.most(torch.tensor(slots.shape[2], device=slots.device)))
        slots = functional.pad(slots, (0, width - slots.shape[2]), value=empty).contiguous()
        parts = [torch.empty_like(slots) for _ in range(self.processes)]
        distributed.all_gather(parts, slots, self._group)
        return torch.cat(parts, 1).to(kind)

    def own(self, numbers: Tensor) -> Tensor:
        return numbers.chunk(self.processes, 1)[self.place]

    def _reduce(self, numbers: Tensor, operation: distributed.ReduceOp.RedOpType) -> Tensor:
        numbers = numbers.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(numbers, operation, self._group)
        return numbers

    def __deepcopy__(self, memo: dict) -> ShardedHeads:
        return self  # the processes are what they are


def shards_of(model: PreTrainedModel) -> KVHeads:
    """Return how a model's heads are split over processes."""
    group = tensor_parallel_group(model)
    return ALL_HERE if group is None else ShardedHeads(group)


def heads_of_layer(
    shards: KVHeads,
    config: PreTrainedConfig,
    shape: LayerShape | None,
    query_heads: int,
    kv_heads: int,
) -> KVHeads:
    """Return how a layer's heads are split; some families leave attention whole in each process.

    Args:
        shape: what the layer stores in all processes together.
        query_heads, kv_heads: that this process has, the latter as they are cached.
    """
    if shards.processes == 1 or query_heads == config.num_attention_heads:
        return ALL_HERE
    whole = 0 if shape is None else shape.kv_heads
    if kv_heads * shards.processes != whole:
        raise KvtoolError(
            f"`{config.model_type}` splits {config.num_attention_heads} query heads over "
            f"{shards.processes} processes and caches {kv_heads} of {whole} KV heads in each: what "
            "one process evicts another would still need",
            hint="run it in one process",
        )
    return shards
