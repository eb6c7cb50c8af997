"""Evicted keys and values in host memory, fetched head by head, and how held queries attend them.

Tokens that arrive one by one gather on the device until there are enough for one copy. A segment in
host memory is written once and then only read: copies of a cache share it, and batch entries follow
without moving it. With a GPU segments are pinned, and `fetch` copies one chunk ahead, beside the
computation. A segment is stored exactly, in bfloat16, or as int8 with scales.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby

import torch
from torch import Tensor

from kvtool.cache.slots.part import tensor_bytes
from kvtool.errors import KvtoolError
from kvtool.maths.attention import (
    attention_weights_lse,
    can_fuse,
    dot_products,
    fused_group_attention,
    group_queries,
    join_attention,
    weighted_values,
)
from kvtool.policies.evicted.calidrop import GATHERED
from kvtool.sizes import bytes_in_words


def head_runs(pairs: list[tuple[int, int]]) -> Iterator[tuple[int, slice]]:
    """Join neighbouring heads of a sequence.

    >>> list(head_runs([(0, 0), (0, 1), (0, 3), (1, 3)]))
    [(0, slice(0, 2, None)), (0, slice(3, 4, None)), (1, slice(3, 4, None))]

    Args:
        pairs: (row, KV head), in ascending order.
    """
    start = 0
    for i, (row, head) in enumerate(pairs, 1):
        if i == len(pairs) or pairs[i] != (row, head + 1):
            yield row, slice(pairs[start][1], head + 1)
            start = i


def pack(tensor: Tensor, form: str) -> tuple[Tensor, ...]:
    """Bring keys or values into the form in which they are stored.

    Returns:
        One tensor; for int8 numbers and their scales, (.., 1) float32, one per token and head.
    """
    if form == "bf16":
        return (tensor.bfloat16(),)
    if form == "int8":
        scale = tensor.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        return (tensor.float() / scale).round().to(torch.int8), scale
    return (tensor,)


def unpack(packed: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Dequantise them."""
    if len(packed) == 1:
        return packed[0] if packed[0].dtype == dtype else packed[0].to(dtype)
    numbers, scale = packed
    return (numbers * scale).to(dtype)


_CHUNK = 8192  # tokens that are fetched at a time
_JOINED = 512  # tokens up to which segments are joined whenever more come

Tokens = tuple[Tensor, Tensor, Tensor]  # keys, values, positions


@dataclass(frozen=True)
class Segment:
    """Tokens of a batch in host memory.

    Attributes:
        tensors: keys, values and positions, (rows, kv_heads, slots, dim) and without dim, positions
            -1 where nothing is; for int8 keys and values are followed by their scales.
        entries: which row of these each batch entry has; None: its own.
        whole: whether no position is -1.
    """

    tensors: tuple[Tensor, ...]
    entries: tuple[int, ...] | None
    whole: bool

    def __deepcopy__(self, memo: dict) -> Segment:
        return self  # never changed

    @property
    def slots(self) -> int:
        """Tokens of a head."""
        return self.tensors[-1].shape[2]

    def by_entry(self) -> tuple[Tensor, ...]:
        """The tensors with a row for each batch entry."""
        entries = self.entries
        return self.tensors if entries is None else tuple(t[list(entries)] for t in self.tensors)


@dataclass(frozen=True)
class Chunk:
    """Tokens of neighbouring heads of a sequence on their way to the device.

    Attributes:
        entry, heads: whose they are.
        tensors: as of a segment, of one row: (1, heads, tokens, ..).
        whole: whether no position is -1.
        arrival: what to wait for before they are used, on a GPU.
    """

    entry: int
    heads: slice
    tensors: tuple[Tensor, ...]
    whole: bool
    arrival: torch.cuda.Event | None = None

    def moved(self, device: torch.device) -> Chunk:
        """The same on a device, which the host waits for."""
        return replace(self, tensors=tuple(tensor.to(device) for tensor in self.tensors))

    def wait(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values (1, heads, tokens, dim), and which of them are there; None: all."""
        if self.arrival is not None:
            stream = torch.cuda.current_stream(self.tensors[0].device)
            stream.wait_event(self.arrival)
            for tensor in self.tensors:
                tensor.record_stream(stream)
        *pairs, positions = self.tensors
        half = len(pairs) // 2
        keys, values = unpack(pairs[:half], dtype), unpack(pairs[half:], dtype)
        return keys, values, None if self.whole else positions >= 0


class Store:
    """All that a layer has set aside: `exact`, `bf16`, `int8`, or in mapped files (`file`)."""

    def __init__(self, form: str) -> None:
        self.form = form
        self.segments: list[Segment] = []
        self.staging: tuple[Tensor, ...] = ()  # buffers on the device
        self.staged = 0  # tokens in them
        self._staged_whole = True
        self._pinned = False

    @property
    def tokens(self) -> int:
        """Tokens of a head, at most."""
        return sum(segment.slots for segment in self.segments) + self.staged

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory."""
        return sum(tensor_bytes(segment.tensors) for segment in self.segments)

    @property
    def device_bytes(self) -> int:
        """Bytes of what is staged on the device."""
        return tensor_bytes(self.staging)

    # ---- how tokens enter

    def append(self, parts: Iterable[Tokens], count: int, whole: bool) -> None:
        """Put some tokens up in host memory.

        Args:
            parts: keys and values (batch, kv_heads, tokens, dim) and positions, -1 = nothing there,
                one after the other; `count` tokens together.
            whole: whether no position is -1.
        """
        self._unstage()
        self._put_up((self._packed(part) for part in parts), count, whole)

    def stage(self, part: tuple[Tensor, ...], whole: bool) -> None:
        """Take in a few tokens, which wait on the device for more."""
        if self.staged + part[0].shape[2] > GATHERED:
            self._unstage()
        if not self.staging:
            with torch.inference_mode(False):
                self.staging = tuple(
                    torch.zeros(
                        (*t.shape[:2], GATHERED, *t.shape[3:]), dtype=t.dtype, device=t.device
                    )
                    for t in part
                )
            self._pinned = part[0].device.type == "cuda"
        place = slice(self.staged, self.staged + part[0].shape[2])
        for buffer, new in zip(self.staging, part, strict=True):
            buffer[:, :, place] = new
        self.staged = place.stop
        self._staged_whole &= whole

    def staged_tokens(self) -> tuple[Tensor, ...]:
        """What gathers on the device."""
        return tuple(t[:, :, : self.staged] for t in self.staging)

    def _unstage(self) -> None:
        if self.staged:
            part = self._packed(self.staged_tokens())
            self._put_up(iter([part]), self.staged, self._staged_whole)
        self.staging, self.staged, self._staged_whole = (), 0, True

    def _packed(self, part: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        keys, values, positions = part
        self._pinned = keys.device.type == "cuda"
        return (*pack(keys, self.form), *pack(values, self.form), positions)

    def _put_up(self, parts: Iterator[tuple[Tensor, ...]], slots: int, whole: bool) -> None:
        """Put up a segment, joined with those before it that are short, or no longer than it is."""
        before: list[Segment] = []
        while self.segments and self.segments[-1].entries is None:
            if self.segments[-1].slots > max(slots, _JOINED):
                break
            before.insert(0, self.segments.pop())
            slots += before[0].slots
            whole &= before[0].whole
        self.add(chain((segment.tensors for segment in before), parts), slots, whole)

    def add(self, parts: Iterable[tuple[Tensor, ...]], slots: int, whole: bool) -> None:
        """Put up a segment of `slots` tokens that come in parts, packed."""
        segment: list[Tensor] = []
        start = 0
        for part in parts:
            if not segment:
                segment = [
                    self._allocate((*t.shape[:2], slots, *t.shape[3:]), t.dtype) for t in part
                ]
            place = slice(start, start + part[0].shape[2])
            for buffer, new in zip(segment, part, strict=True):
                buffer[:, :, place].copy_(new)
            start = place.stop
        self.segments.append(Segment(tuple(segment), None, whole))

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            if self.form != "file":
                return torch.empty(shape, dtype=dtype, pin_memory=self._pinned)
            flat = _map_file(torch.Size(shape).numel(), dtype)
        return flat.view(shape)

    # ---- how they are read

    def fetch(self, pairs: list[tuple[int, int]], device: torch.device) -> Iterator[Chunk]:
        """Bring what is stored of some (row, KV head) to the device, chunk by chunk.

        On a GPU the first chunk is under way when this returns, before it is asked for.
        """
        chunks = self._chunks(pairs)
        if device.type == "cpu":
            return chunks
        if device.type != "cuda":
            return (chunk.moved(device) for chunk in chunks)
        ahead = _one_ahead(chunks, device)
        first = next(ahead, None)
        return iter(()) if first is None else chain([first], ahead)

    def _chunks(self, pairs: list[tuple[int, int]]) -> Iterator[Chunk]:
        for entry, heads in head_runs(pairs):
            for segment in self.segments:
                own = entry if segment.entries is None else segment.entries[entry]
                # a part of several heads would lie in pieces, which takes another copy to a GPU
                each = [heads] if segment.slots <= _CHUNK else _one_by_one(heads)
                for some in each:
                    for start in range(0, segment.slots, _CHUNK):
                        part = slice(start, min(start + _CHUNK, segment.slots))
                        tensors = tuple(t[own : own + 1, some, part] for t in segment.tensors)
                        yield Chunk(entry, some, tensors, segment.whole)
            if self.staged:
                part = slice(0, self.staged)
                tensors = tuple(t[entry : entry + 1, heads, part] for t in self.staging)
                yield Chunk(entry, heads, tensors, self._staged_whole)

    def positions(self, entry: int) -> Tensor:
        """Positions of what is stored of a batch entry, (kv_heads, tokens), -1 = nothing."""
        parts = [
            segment.tensors[-1][entry if segment.entries is None else segment.entries[entry]]
            for segment in self.segments
        ]
        if self.staged:
            parts.append(self.staged_tokens()[-1][entry].cpu())
        return torch.cat(parts, -1)

    # ---- batch entries, and files

    def map_entries(self, change: Callable[[Tensor], Tensor], batch: int) -> None:
        """Let sequences follow the batch: those on segments by their number, the others moved."""
        chosen = change(torch.arange(batch)).tolist()
        self.segments = [
            replace(
                segment, entries=tuple((segment.entries or range(batch))[entry] for entry in chosen)
            )
            for segment in self.segments
        ]
        if self.staging:
            self.staging = tuple(change(tensor) for tensor in self.staging)

    def tensors(self) -> dict[str, Tensor]:
        """What a file holds of it, on the host."""
        segments = [segment.by_entry() for segment in self.segments]
        whole = [torch.cat(parts, 2) for parts in zip(*segments, strict=True)]
        named = {f"shelf.{i}": tensor for i, tensor in enumerate(whole)}
        return named | {f"gathered.{i}": t.cpu() for i, t in enumerate(self.staged_tokens())}

    def load(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Take back what `tensors` gave."""
        self._pinned = device.type == "cuda"
        segment, gathered = (
            tuple(tensors[name] for name in sorted(tensors) if name.startswith(prefix))
            for prefix in ("shelf.", "gathered.")
        )
        if segment:
            self.add([segment], segment[-1].shape[2], bool((segment[-1] >= 0).all()))
        if gathered:
            whole = bool((gathered[-1] >= 0).all())
            self.stage(tuple(t.to(device) for t in gathered), whole)


def _map_file(size: int, dtype: torch.dtype) -> Tensor:
    """Return numbers in a temporary file, whose disk space is taken at once."""
    try:
        with tempfile.NamedTemporaryFile(prefix="kvtool-") as file:  # the mapping outlives it
            if size and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
            return torch.from_file(file.name, shared=True, size=size, dtype=dtype)
    except OSError as error:
        raise KvtoolError(
            f"cannot set aside {bytes_in_words(size * dtype.itemsize)} of evicted tokens in "
            f"`{tempfile.tempdir}`: {error.strerror or error}",
            hint="set TMPDIR to a folder with more space, or store=exact or store=int8",
        ) from error


def _one_by_one(heads: slice) -> list[slice]:
    return [slice(head, head + 1) for head in range(heads.start, heads.stop)]


def _one_ahead(chunks: Iterator[Chunk], device: torch.device) -> Iterator[Chunk]:
    """Start to copy each chunk before the one in front of it is used."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # what gathers may just be written
    under_way = None
    for chunk in chunks:
        with torch.cuda.stream(stream):
            tensors = tuple(t.to(device, non_blocking=True) for t in chunk.tensors)
            arriving = replace(chunk, tensors=tensors, arrival=stream.record_event())
        if under_way is not None:
            yield under_way
        under_way = arriving
    if under_way is not None:
        yield under_way


NOTHING = float("-inf")
"""The log-sum-exp over no tokens."""


def attend_tokens(
    grouped: Tensor,
    keys: Tensor,
    values: Tensor,
    stored: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Attend some tokens by queries of the same heads.

    Args:
        grouped: (batch, kv_heads, group, rows, head_dim).
        keys, values: (batch, kv_heads, tokens, dim).
        stored: bool (batch, kv_heads, tokens), where there is one; None: everywhere.
        scale, softcap: as for `attention_weights`.

    Returns:
        (batch, kv_heads, group, rows, value_dim) and (batch, kv_heads, group, rows) float32.
    """
    if stored is None and softcap is None and can_fuse(grouped, keys, values):
        out, lse = fused_group_attention(grouped, keys, values, scale)
        return out.float(), lse
    visible = None if stored is None else stored[..., None, None, :]
    weights, lse = attention_weights_lse(
        grouped, keys, scale=scale, softcap=softcap, visible=visible
    )
    return weighted_values(weights, values).float().unflatten(1, grouped.shape[1:3]), lse


@torch.no_grad()
def attend_chunks(
    query: Tensor,
    kv_heads: int,
    value_dim: int,
    fetched: Iterator[Chunk],
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Attend what is fetched, by queries (batch, heads, rows, head_dim).

    Returns:
        (batch, heads, rows, value_dim) and (batch, heads, rows) float32, -inf for other heads.
    """
    grouped = group_queries(query, kv_heads)
    out = torch.zeros(*grouped.shape[:-1], value_dim, dtype=torch.float32, device=query.device)
    lse = torch.full(grouped.shape[:-1], NOTHING, dtype=torch.float32, device=query.device)
    begun: set[tuple[int, int]] = set()
    for (entry, run), chunks in groupby(fetched, lambda chunk: (chunk.entry, chunk.heads)):
        own = slice(entry, entry + 1), run
        parts = (_attend_chunk(grouped[own], chunk, scale, softcap) for chunk in chunks)
        part = next(parts)
        for other in parts:
            part = join_attention(*part, *other)
        heads = {(entry, head) for head in range(run.start, run.stop)}
        if heads & begun:
            part = join_attention(out[own], lse[own], *part)
        out[own], lse[own] = part
        begun |= heads
    return out.flatten(1, 2), lse.flatten(1, 2)


def _attend_chunk(
    grouped: Tensor, chunk: Chunk, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    keys, values, stored = chunk.wait(grouped.dtype)
    return attend_tokens(grouped, keys, values, stored, scale, softcap)


def join_token(
    query: Tensor,
    out: Tensor,
    lse: Tensor,
    key: Tensor,
    value: Tensor,
    stored: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Join one token in: its weight among itself is 1, and its logit is its log-sum-exp.

    Args:
        query, out, lse: (batch, heads, dim) float32 and without dim, of attending other tokens.
        key, value: (batch, kv_heads, 1, dim) of the token.
        stored: bool (batch, kv_heads, 1), where there is one; None: everywhere.
    """
    kv_heads = key.shape[1]
    logit = dot_products(group_queries(query[:, :, None].to(key.dtype), kv_heads), key).mul_(scale)
    if softcap is not None:
        logit = logit.div_(softcap).tanh_().mul_(softcap)
    if stored is not None:
        logit = logit.masked_fill_(~stored[..., None, None], NOTHING)
    values = value.float().expand(-1, -1, lse.shape[1] // kv_heads, -1).flatten(1, 2)
    if stored is not None:
        return join_attention(out, lse, values, logit.flatten(1))
    own = logit.flatten(1)
    weight = torch.sigmoid(lse - own)[..., None]
    return torch.lerp(values, out, weight), torch.logaddexp(lse, own)
