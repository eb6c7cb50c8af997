"""What a layer sets aside of its evicted tokens, and how its outputs are calibrated by it.

Everything that CaliDrop (`kvtool.policies.evicted.calidrop`) needs beside the slots: the evicted
keys and values in host memory, and of each query head the query that is held, with the output and
the log-sum-exp of its attention to them. Whether a head recomputes is decided on the host, once a
step and layer; on a GPU that is one sync, made before the kept tokens are attended, so that the
fetch that follows runs beside that attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtool.cache.storage.host import Chunk, Store, Tokens
from kvtool.cache.storage.part import Part, tensor_bytes
from kvtool.maths.attention import (
    attention_weights_lse,
    group_queries,
    join_attention,
    weighted_values,
)
from kvtool.maths.selection import keep_top, take
from kvtool.policies.evicted.calidrop import CaliDrop, calibrate, decide, query_cosine
from kvtool.policies.evicted.eviction import Eviction
from kvtool.policies.heads import KVHeads
from kvtool.policies.numbers import State

_CHUNK = 4096  # evicted tokens that are copied at a time
_NOTHING = float("-inf")


@dataclass(frozen=True)
class DecodePlan:
    """What a step has decided about its heads.

    Attributes:
        query: (batch, heads, 1, head_dim).
        recompute, calibrate: bool (batch, heads).
        fetched: what is stored of the heads that recompute, on its way; None: none does.
    """

    query: Tensor
    recompute: Tensor
    calibrate: Tensor
    fetched: Iterator[Chunk] | None


class Calibration(Part):
    """The evicted tokens of one layer.

    Attributes:
        memory: of each row and query head `query`, the one that is held, `out` and `lse` of its
            attention to the evicted tokens, and how many `steps` were decoded beside evicted
            tokens, how many `recomputed` and how many `calibrated`.
    """

    name = "calibration"

    def __init__(self, part: CaliDrop) -> None:
        self.part = part
        self._scale: float = 1.0
        self._softcap: float | None = None
        self.clear()

    def clear(self) -> None:
        self.store = Store(self.part.store)
        self.memory: State = {}
        self._last: Tensor | None = None

    @property
    def active(self) -> bool:
        """Whether anything has been set aside."""
        return self.store.tokens > 0

    @property
    def recompute_frequency(self) -> float | None:
        """Share of decoded steps and heads that recomputed; None before the first."""
        steps = self.memory["steps"].sum().item() if self.memory else 0
        return self.memory["recomputed"].sum().item() / steps if steps else None

    def set_scale(self, scale: float, softcap: float | None) -> None:
        """Say how the running attention scales its logits, and whether it caps them."""
        self._scale, self._softcap = scale, softcap

    # ---- blocks

    @torch.no_grad()
    def begin_block(self, query: Tensor, value_dim: int, new: Tensor) -> None:
        """Hold the last query of each row, which has seen no evicted token yet.

        Args:
            query: (batch, heads, q_len, head_dim), after RoPE.
            new: (batch or 1, q_len) positions of the block, -1 = padding.
        """
        batch, heads, q_len, dim = query.shape
        if not self.memory:
            self.memory = self.part.start(batch, heads, dim, value_dim, query.device)
        place = torch.arange(q_len, device=query.device)
        self._last = torch.where(new >= 0, place, -1).amax(-1).expand(batch)
        nothing = (
            torch.zeros_like(self.memory["out"]),
            torch.full_like(self.memory["lse"], _NOTHING),
        )
        inside, index = self._last_rows(query, 0)
        self._hold(inside[:, None], take(query, index)[:, :, 0], *nothing)

    def correct_block(self, query: Tensor, out: Tensor, lse: Tensor, start: int) -> Tensor:
        """Join in the evicted part of every query, exactly.

        Args:
            query: (batch, heads, rows, head_dim), a chunk of the block from row `start` on.
            out: (batch, heads, rows, value_dim) of the kept tokens and the block.
            lse: (batch, kv_heads, group, rows) float32 of the same.
        """
        batch, kv_heads = lse.shape[:2]
        pairs = [(row, head) for row in range(batch) for head in range(kv_heads)]
        fetched = self.store.fetch(pairs, query.device)
        evicted = self._attend(query, kv_heads, out.shape[-1], fetched)
        inside, index = self._last_rows(query, start)
        last = take(evicted[0], index)[:, :, 0], evicted[1].gather(2, index)[..., 0]
        self._hold(inside[:, None], take(query, index)[:, :, 0], *last)
        whole, _ = join_attention(out.float(), lse.flatten(1, 2), *evicted)
        return whole.to(out.dtype)

    def _last_rows(self, query: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Which rows have their last query in a chunk, (batch,), and where, (batch, heads, 1)."""
        if self._last is None:
            raise RuntimeError("no block is running")
        place = self._last - start
        inside = (place >= 0) & (place < query.shape[2])
        index = place.clamp(0, query.shape[2] - 1)[:, None, None]
        return inside, index.expand(-1, query.shape[1], -1)

    @torch.no_grad()
    def _hold(self, which: Tensor, query: Tensor, out: Tensor, lse: Tensor) -> None:
        """Hold these queries, and their attention to the evicted tokens, for some heads."""
        for name, number in (("query", query.float()), ("out", out)):
            self.memory[name] = torch.where(which[..., None], number, self.memory[name])
        self.memory["lse"] = torch.where(which, lse, self.memory["lse"])

    # ---- decoded tokens

    @torch.no_grad()
    def begin_decode(
        self, query: Tensor, kv_heads: int, positions: Tensor | None, heads: KVHeads
    ) -> DecodePlan | None:
        """Decide which heads recompute and start to fetch what they need.

        Args:
            query: (batch, heads, 1, head_dim), after RoPE.
            kv_heads: of the layer, as they are cached here.
            heads: all heads of the layer, of which this process may hold a part.
            positions: (batch, 1), -1 where a row has padding instead of a token; None: none has.

        Returns:
            None where nothing has been set aside.
        """
        if not self.active:
            return None
        memory = self.memory
        known = memory["lse"] > _NOTHING
        if positions is not None:
            known = known & (positions >= 0)
        cosine = query_cosine(query[:, :, 0], memory["query"], self.part.granularity, heads)
        decided = decide(cosine, self.part.theta1, self.part.theta2)
        recompute, calibrated = (which & known for which in decided)
        for name, which in (
            ("steps", known),
            ("recomputed", recompute),
            ("calibrated", calibrated),
        ):
            memory[name] = memory[name] + which
        groups = recompute.unflatten(1, (kv_heads, -1)).any(-1)
        pairs = groups.nonzero().tolist()  # the one host decision of a step
        fetched = self.store.fetch(pairs, query.device) if pairs else None
        return DecodePlan(query, recompute, calibrated, fetched)

    def end_decode(self, plan: DecodePlan, out: Tensor, lse: Tensor) -> Tensor:
        """Recompute the evicted part where it was decided, and calibrate.

        Args:
            out: (batch, heads, 1, value_dim) of the kept tokens.
            lse: (batch, kv_heads, group, 1) float32 of the same.
        """
        if plan.fetched is not None:
            evicted = self._attend(plan.query, lse.shape[1], out.shape[-1], plan.fetched)
            new = evicted[0][:, :, 0], evicted[1][..., 0]
            self._hold(plan.recompute, plan.query[:, :, 0], *new)
        held = self.memory["out"], self.memory["lse"]
        return calibrate(out[:, :, 0], lse.flatten(1), *held, plan.calibrate)[:, :, None]

    @torch.no_grad()
    def _attend(
        self, query: Tensor, kv_heads: int, value_dim: int, fetched: Iterator[Chunk]
    ) -> tuple[Tensor, Tensor]:
        """Attention to what is stored, of the heads that are fetched.

        Returns:
            (batch, heads, rows, value_dim) and (batch, heads, rows) float32, the second -inf for
            heads that are not.
        """
        grouped = group_queries(query, kv_heads)
        out = torch.zeros(*grouped.shape[:-1], value_dim, device=query.device)
        lse = torch.full(grouped.shape[:-1], _NOTHING, device=query.device)
        for chunk in fetched:
            keys, values, stored = chunk.wait(query.dtype)
            own = chunk.row, chunk.head
            part = self._attend_tokens(grouped[own][None, None], keys, values, stored)
            out[own], lse[own] = join_attention(out[own], lse[own], *(t[0, 0] for t in part))
        return out.flatten(1, 2), lse.flatten(1, 2)

    def _attend_tokens(
        self, grouped: Tensor, keys: Tensor, values: Tensor, stored: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attention of (batch, kv_heads, group, rows, dim) to tokens, (.., tokens, dim)."""
        weights, lse = attention_weights_lse(
            grouped,
            keys.expand(*grouped.shape[:2], -1, -1),
            scale=self._scale,
            softcap=self._softcap,
            visible=None if stored is None else stored[..., None, None, :],
        )
        out = weighted_values(weights, values.expand(*grouped.shape[:2], -1, -1))
        return out.float().unflatten(1, grouped.shape[1:3]), lse

    # ---- what leaves

    @torch.no_grad()
    def offload(self, eviction: Eviction) -> None:
        """Store what leaves, and fold it into the attention of the query that is held."""
        evicted, positions = eviction.evicted, eviction.evicted_positions
        size = self.part.calibration_size
        by = eviction.importance
        if size is not None and by is not None and size < evicted.shape[2]:
            scores = by.gather(2, evicted)
            best, positions = keep_top(scores, positions, size, None, size)
            evicted = evicted.gather(2, best)
        parts = self._folded(eviction, evicted, positions)
        if eviction.decoded:
            self.store.stage(next(parts), eviction.whole)
        else:
            self.store.append(parts, evicted.shape[2], eviction.whole)

    def _folded(self, eviction: Eviction, evicted: Tensor, positions: Tensor) -> Iterator[Tokens]:
        held = group_queries(self.memory["query"][:, :, None], evicted.shape[1])
        held = held.to(eviction.keys.dtype)
        for index, place in zip(
            evicted.split(_CHUNK, -1), positions.split(_CHUNK, -1), strict=True
        ):
            keys, values = take(eviction.keys, index), take(eviction.values, index)
            stored = None if eviction.whole else place >= 0
            out, lse = self._attend_tokens(held, keys, values, stored)
            self.memory["out"], self.memory["lse"] = join_attention(
                self.memory["out"],
                self.memory["lse"],
                out.flatten(1, 2)[:, :, 0],
                lse.flatten(1, 2)[..., 0],
            )
            yield keys, values, place

    # ---- rows of the batch, bytes and files

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.memory:
            self.store.map_rows(change, len(self.memory["lse"]))
            self.memory = {name: change(number) for name, number in self.memory.items()}

    @property
    def nbytes(self) -> int:
        """Bytes beside the slots that are not in host memory."""
        return tensor_bytes(list(self.memory.values())) + self.store.device_bytes

    def tensors(self) -> dict[str, Tensor]:
        memory = {f"calibration.memory.{name}": t.cpu() for name, t in self.memory.items()}
        return memory | {f"calibration.store.{name}": t for name, t in self.store.tensors().items()}

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        memory, store = (
            {
                name.removeprefix(prefix): tensor
                for name, tensor in tensors.items()
                if name.startswith(prefix)
            }
            for prefix in ("calibration.memory.", "calibration.store.")
        )
        self.memory = {name: number.to(device) for name, number in memory.items()}
        self.store.load(store, device)
