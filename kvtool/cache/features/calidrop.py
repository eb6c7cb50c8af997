"""CaliDrop: the evicted tokens that a layer sets aside, and the calibration of its outputs by them.

Beside the evicted keys and values in host memory are the held query of each head, and the output
and log-sum-exp of its attention to them. Tokens evicted for a decoded one are folded in for all
layers at once.

Whether a head recomputes is decided on the host, once a step and layer. On a GPU that is one sync,
made before the kept tokens are attended, so that the fetch runs beside that attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvtool.cache.features.host import (
    NOTHING,
    Chunk,
    Store,
    Tokens,
    attend_chunks,
    attend_tokens,
    join_token,
)
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import Correction, LayerSite, Part, tensor_bytes
from kvtool.cache.slots.slot_form import take_stored
from kvtool.cache.steps.block import Block
from kvtool.cache.steps.call import Call
from kvtool.maths.attention import group_queries, join_attention
from kvtool.maths.selection import keep_top, take
from kvtool.policies.evicted.calidrop import GATHERED, CaliDrop, calibrate, decide, query_cosine
from kvtool.policies.evicted.eviction import Eviction
from kvtool.policies.numbers import KVHeads, State
from kvtool.policies.parts import SlotView

Decision = tuple[Tensor | None, Tensor]
"""Who could decide, bool (batch, heads), None: all; and (2, batch, heads) who recomputes and who is
calibrated."""


@dataclass(frozen=True)
class DecodePlan:
    """What a step has decided about its heads.

    Attributes:
        recompute, calibrate: bool (batch, heads); None: all.
        fetched: what is stored of the heads that recompute, on its way; None: none does.
        changes: whether any head is calibrated.
    """

    recompute: Tensor | None
    calibrate: Tensor | None
    fetched: Iterator[Chunk] | None
    changes: bool


def add_decisions(memory: State, noted: Sequence[Decision]) -> State:
    """Return `steps`, `recomputed` and `calibrated`, (batch, heads), with decisions added."""
    knowing = [known for known, _ in noted if known is not None]
    steps = memory["steps"] + (len(noted) - len(knowing))
    if knowing:
        steps = steps + torch.stack(knowing).sum(0)
    recomputed, calibrated = torch.stack([decided for _, decided in noted]).sum(0)
    return {
        "steps": steps,
        "recomputed": memory["recomputed"] + recomputed,
        "calibrated": memory["calibrated"] + calibrated,
    }


_CHUNK = 4096  # evicted tokens that are copied at a time
_NOTED = 16  # decisions that are counted at a time


class Calibration(Part):
    """The evicted tokens of one layer, in its `store`."""

    name = "calibration"
    refusals: Mapping[str, str] = {
        "eager": "`{policy.on_evict.name}` compares queries, "
        "and the eager attention of `{model}` does not show them",
        "latents": "`{policy.on_evict.name}`",
        "shared": "changes or sets aside what is evicted",
        "joined": "what it evicts is in host memory, by the rows that were read together",
        "static": "the host decides in every step what it fetches of the evicted tokens",
    }

    def __init__(self, part: CaliDrop) -> None:
        self.part = part
        self._scale: float = 1.0
        self._softcap: float | None = None
        self.clear()

    @classmethod
    def make(cls, site: LayerSite) -> Calibration | None:
        part = site.policy.on_evict
        return cls(part) if isinstance(part, CaliDrop) else None

    def allows_static(self, layer: SlotLayer) -> bool:
        return False  # what is evicted is fetched when the host decides

    def clear(self) -> None:
        self.store = Store(self.part.store)
        self._memory: State = {}
        self._last: Tensor | None = None
        self._whole = False  # whether every head holds the attention of a query
        self._noted: tuple[Decision, ...] = ()  # and not counted yet

    @property
    def memory(self) -> State:
        """What is held of each sequence and query head.

        It is `query`, `out` and `lse` of its attention to the evicted tokens, and how many `steps`
        were decoded beside evicted tokens, how many `recomputed` and how many `calibrated`.
        """
        if self._noted:
            self._memory |= add_decisions(self._memory, self._noted)
            self._noted = ()
        return self._memory

    @property
    def active(self) -> bool:
        """Whether anything has been set aside."""
        return self.store.tokens > 0

    @property
    def recompute_frequency(self) -> float | None:
        """Share of decoded steps and heads that recomputed; None before the first."""
        memory = self.memory
        steps = memory["steps"].sum().item() if memory else 0
        return memory["recomputed"].sum().item() / steps if steps else None

    # ---- blocks

    def correct(self, layer: SlotLayer, call: Call, block: Block | None) -> Correction | None:
        self._scale, self._softcap = call.scale, call.softcap
        if block is not None:
            self.hold_last(call.query, call.value.shape[-1], block.new)
            return self._correct_block if self.active else None
        kv_heads = call.raw_key.shape[1]
        plan = self.begin_decode(call.query, kv_heads, call.positions, layer.slots.heads)
        return partial(self.end_decode, plan) if plan is not None and plan.changes else None

    @torch.no_grad()
    def hold_last(self, query: Tensor, value_dim: int, new: Tensor) -> None:
        """Hold the last query of each sequence, which has seen no evicted token yet.

        Args:
            query: (batch, heads, q_len, head_dim), after RoPE.
            new: (batch or 1, q_len) positions of the block, -1 = padding.
        """
        batch, heads, q_len, dim = query.shape
        if not self._memory:
            self._memory = self.part.start(batch, heads, dim, value_dim, query.device)
        place = torch.arange(q_len, device=query.device)
        self._last = torch.where(new >= 0, place, -1).amax(-1).expand(batch)
        nothing = (
            torch.zeros_like(self._memory["out"]),
            torch.full_like(self._memory["lse"], NOTHING),
        )
        self._whole = False
        inside, index = self._last_rows(query, 0)
        self._hold(inside[:, None], take(query, index)[:, :, 0], *nothing)

    def _correct_block(self, query: Tensor, out: Tensor, lse: Tensor, start: int) -> Tensor:
        """Join in the evicted part of every query, exactly."""
        batch, kv_heads = lse.shape[:2]
        pairs = [(row, head) for row in range(batch) for head in range(kv_heads)]
        fetched = self.store.fetch(pairs, query.device)
        evicted = attend_chunks(query, kv_heads, out.shape[-1], fetched, *self.how)
        inside, index = self._last_rows(query, start)
        last = take(evicted[0], index)[:, :, 0], evicted[1].gather(2, index)[..., 0]
        self._hold(inside[:, None], take(query, index)[:, :, 0], *last)
        whole, _ = join_attention(out.float(), lse.flatten(1, 2), *evicted)
        return whole.to(out.dtype)

    def _last_rows(self, query: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Which sequences end in a chunk of queries, (batch,), and where, (batch, heads, 1)."""
        assert self._last is not None, "a block is running"
        place = self._last - start
        inside = (place >= 0) & (place < query.shape[2])
        index = place.clamp(0, query.shape[2] - 1)[:, None, None]
        return inside, index.expand(-1, query.shape[1], -1)

    @torch.no_grad()
    def _hold(self, which: Tensor | None, query: Tensor, out: Tensor, lse: Tensor) -> None:
        """Hold these queries, and their attention to the evicted tokens, for some heads or all."""
        new = {"query": query.detach().float(), "out": out, "lse": lse}
        for name, number in new.items():
            if which is not None:
                some = which if name == "lse" else which[..., None]
                number = torch.where(some, number, self._memory[name])
            self._memory[name] = number

    # ---- decoded tokens

    @torch.no_grad()
    def begin_decode(
        self, query: Tensor, kv_heads: int, positions: Tensor | None, heads: KVHeads
    ) -> DecodePlan | None:
        """Decide which heads recompute and start to fetch what they need; None: nothing is stored.

        Args:
            query: (batch, heads, 1, head_dim), after RoPE.
            kv_heads: of the layer, as they are cached here; `heads` are all of the layer.
            positions: (batch, 1), -1 where a sequence has padding instead of a token; None: none.
        """
        if not self.active:
            return None
        cosine = query_cosine(query[:, :, 0], self._memory["query"], self.part.granularity, heads)
        decided = torch.stack(decide(cosine, self.part.theta1, self.part.theta2))
        known = None if self._whole else self._memory["lse"] > NOTHING
        if positions is not None:
            real = positions >= 0
            known = real.expand_as(cosine) if known is None else known & real
        if known is not None:
            decided = decided & known
        self._note(known, decided)
        anew, some = decided.tolist()  # the one host decision of a step
        group = cosine.shape[1] // kv_heads
        pairs = sorted(
            {
                (i, head // group)
                for i, row in enumerate(anew)
                for head, new in enumerate(row)
                if new
            }
        )
        return DecodePlan(
            recompute=None if all(map(all, anew)) else decided[0],
            calibrate=None if all(map(all, some)) else decided[1],
            fetched=self.store.fetch(pairs, query.device) if pairs else None,
            changes=any(map(any, some)),
        )

    def _note(self, known: Tensor | None, decided: Tensor) -> None:
        """Note a step's decisions, which are counted when some have come together."""
        self._noted = (*self._noted, (known, decided))
        if len(self._noted) == _NOTED:
            _ = self.memory

    def end_decode(
        self, plan: DecodePlan, query: Tensor, out: Tensor, lse: Tensor, start: int
    ) -> Tensor:
        """Recompute the evicted part where it was decided, and calibrate: see `Correction`."""
        if plan.fetched is not None:
            sizes = lse.shape[1], out.shape[-1]
            new, total = attend_chunks(query, *sizes, plan.fetched, *self.how)
            self._hold(plan.recompute, query[:, :, 0], new[:, :, 0], total[..., 0])
        return calibrate(out[:, :, 0], lse.flatten(1), *self.held[1:], plan.calibrate)[:, :, None]

    # ---- evicted tokens

    def take_evicted(self, layer: SlotLayer, view: SlotView, eviction: Eviction) -> None:
        self.offload(eviction)

    @torch.no_grad()
    def take_decoded(self, layers: Sequence[SlotLayer], positions: Tensor) -> None:
        pairs = []
        for layer in layers:
            slots = layer.slots
            assert slots.reuse_slot is not None, "nothing leaves"
            stored = take_stored(slots.used_stored(), slots.reuse_slot[..., None])
            pairs.append(slots.form.dequantise(stored))
        active = [part for part in map(Calibration.of, layers) if part is not None]
        offload_evicted(active, pairs, positions, not layers[0].masked)

    @torch.no_grad()
    def offload(self, eviction: Eviction) -> None:
        """Store evicted tokens, and fold them into the attention of the query that is held."""
        evicted, positions = eviction.evicted, eviction.evicted_positions
        size = self.part.calibration_size
        by = eviction.importance
        if size is not None and by is not None and size < evicted.shape[2]:
            scores = by.gather(2, evicted)
            best, positions = keep_top(scores, positions, size, None, size)
            evicted = evicted.gather(2, best)
        parts = self._folded(eviction, evicted, positions)
        self.store.append(parts, evicted.shape[2], eviction.whole)
        self._whole |= eviction.whole

    def _folded(self, eviction: Eviction, evicted: Tensor, positions: Tensor) -> Iterator[Tokens]:
        memory = self._memory
        held = group_queries(memory["query"][:, :, None], evicted.shape[1])
        held = held.to(eviction.keys.dtype)
        for index, place in zip(
            evicted.split(_CHUNK, -1), positions.split(_CHUNK, -1), strict=True
        ):
            keys, values = take(eviction.keys, index), take(eviction.values, index)
            stored = None if eviction.whole else place >= 0
            out, lse = attend_tokens(held, keys, values, stored, *self.how)
            out, lse = out.flatten(1, 2)[:, :, 0], lse.flatten(1, 2)[..., 0]
            memory["out"], memory["lse"] = join_attention(memory["out"], memory["lse"], out, lse)
            yield keys, values, place

    @property
    def how(self) -> tuple[float, float | None]:
        """The scale and the cap of the running attention."""
        return self._scale, self._softcap

    @property
    def held(self) -> tuple[Tensor, Tensor, Tensor]:
        """The queries that are held, with the output and log-sum-exp of their attention."""
        return self._memory["query"], self._memory["out"], self._memory["lse"]

    def take_in(self, token: Tokens, out: Tensor, lse: Tensor, whole: bool) -> None:
        """Store a token that leaves, and hold what it has been folded into.

        Args:
            token: its key and value, (batch, kv_heads, 1, dim), and position, -1 = none leaves.
            out, lse: of the attention of the held queries, this token included.
        """
        self._memory["out"], self._memory["lse"] = out, lse
        self._whole |= whole
        self.store.stage(token, whole)

    # ---- batch entries, bytes and files

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        memory = self.memory
        if memory:
            self.store.map_entries(change, len(memory["lse"]))
            self._memory = {name: change(number) for name, number in memory.items()}

    @property
    def nbytes(self) -> int:
        """Bytes beside the slots that are not in host memory."""
        return tensor_bytes(list(self.memory.values())) + self.store.device_bytes

    def tensors(self) -> dict[str, Tensor]:
        memory = {f"calibration.memory.{name}": t.cpu() for name, t in self.memory.items()}
        return memory | {f"calibration.store.{name}": t for name, t in self.store.tensors().items()}

    def check(self, file: Any, prefix: str, shape: Any, dtype: torch.dtype) -> None:
        name, batch, heads = f"{prefix}calibration", file.batch, shape.heads
        width = {"query": (shape.key_dim,), "out": (shape.value_dim,), "lse": ()}
        for key, channels in width.items():
            sizes = (batch, heads, *channels)
            file.take(f"{name}.memory.{key}", sizes, torch.float32, unknown=key == "lse")
        for key in ("steps", "recomputed", "calibrated"):
            file.take(f"{name}.memory.{key}", (batch, heads), torch.float32, 0)
        for place in ("shelf", "gathered"):
            if any(each.startswith(f"{name}.store.{place}.") for each in file.left):
                self._check_store(file, f"{name}.store.{place}", shape, dtype)

    def _check_store(self, file: Any, name: str, shape: Any, dtype: torch.dtype) -> None:
        """Check what is set aside, in host memory (`shelf`) or on its way there."""
        packed = name.endswith("shelf")
        packed_as = {"bf16": torch.bfloat16, "int8": torch.int8}.get(self.part.store, dtype)
        forms = []
        for dim in (shape.key_dim, shape.value_dim):
            forms.append((dim, packed_as if packed else dtype))
            if packed and self.part.store == "int8":
                forms.append((1, torch.float32))
        first = file.left.get(f"{name}.0")
        slots = first.shape[2] if first is not None and first.dim() == 4 else None
        sizes = file.batch, shape.kv_heads, slots
        for i, (dim, form) in enumerate(forms):
            file.take(f"{name}.{i}", (*sizes, dim), form)
        last = f"{name}.{len(forms)}"
        file.take(last, sizes, (torch.int64, torch.int32), -1, file.seen - 1)
        if slots == 0 or (not packed and slots is not None and slots > GATHERED):
            raise file.bad(last, f"sets {slots} tokens aside at a time")

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        memory, store = (
            {
                name.removeprefix(prefix): tensor
                for name, tensor in tensors.items()
                if name.startswith(prefix)
            }
            for prefix in ("calibration.memory.", "calibration.store.")
        )
        self._memory, self._noted = {name: t.to(device) for name, t in memory.items()}, ()
        self._whole = bool(self._memory) and bool((self._memory["lse"] > NOTHING).all())
        self.store.load(store, device)


@torch.no_grad()
def offload_evicted(
    layers: Sequence[Calibration],
    pairs: Sequence[tuple[Tensor, Tensor]],
    positions: Tensor,
    whole: bool,
) -> None:
    """Store the token that leaves each of some layers, and fold it in, alike layers at once.

    Args:
        pairs: the key and value of each layer, (batch, kv_heads, 1, dim).
        positions: (layers * batch, kv_heads, 1) of these tokens, -1 = none leaves.
        whole: whether no position is -1.
    """
    batch = len(pairs[0][0])
    places = positions.split(batch)
    if len({(each.how, *(tensor.shape for tensor in each.held)) for each in layers}) > 1:
        for layer, pair, place in zip(layers, pairs, places, strict=True):
            offload_evicted([layer], [pair], place, whole)
        return
    held = [torch.cat(tensors) for tensors in zip(*(each.held for each in layers), strict=True)]
    key, value = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
    stored = None if whole else positions >= 0
    query, out, lse = held
    joined = join_token(query, out, lse, key, value, stored, *layers[0].how)
    outs, sums = (tensor.split(batch) for tensor in joined)
    for layer, pair, place, own, total in zip(layers, pairs, places, outs, sums, strict=True):
        layer.take_in((*pair, place), own, total, whole)
