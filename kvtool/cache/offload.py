"""Keys and values in host memory: appended to, fetched head by head, never changed.

What arrives token by token gathers on the device until there is enough for one copy. A shelf in
host memory is written once and then only read: copies of a cache share it, and rows of a batch are
repeated or reordered without moving it. With a GPU shelves are pinned, and `fetch` copies one piece
ahead on a stream of its own, beside what is computed meanwhile.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from kvtool.policies.evicted.calidrop import GATHERED

_PIECE = 8192  # tokens of a head that are fetched at a time

Tokens = tuple[Tensor, Tensor, Tensor]  # keys, values, positions


@dataclass(frozen=True)
class Shelf:
    """Tokens of a batch in host memory.

    Attributes:
        tensors: keys, values and positions, (rows, kv_heads, slots, dim) and without dim, positions
            -1 where nothing is; for int8 keys and values are followed by their scales.
        rows: which row of these each row of the batch has; None: its own.
        whole: whether no position is -1.
    """

    tensors: tuple[Tensor, ...]
    rows: tuple[int, ...] | None
    whole: bool

    def __deepcopy__(self, memo: dict) -> Shelf:
        return self  # never changed

    @property
    def slots(self) -> int:
        """Tokens of a head."""
        return self.tensors[-1].shape[2]

    def by_row(self) -> tuple[Tensor, ...]:
        """The tensors with a row for each row of the batch."""
        return (
            self.tensors if self.rows is None else tuple(t[list(self.rows)] for t in self.tensors)
        )


@dataclass(frozen=True)
class Piece:
    """Tokens of one head on their way to the device.

    Attributes:
        row, head: whose they are.
        tensors: as of a shelf, without the first two axes.
        whole: whether no position is -1.
        arrival: what to wait for before they are used, on a GPU.
    """

    row: int
    head: int
    tensors: tuple[Tensor, ...]
    whole: bool
    arrival: torch.cuda.Event | None = None

    def moved(self, device: torch.device) -> Piece:
        """The same on a device, which the host waits for."""
        return replace(self, tensors=tuple(tensor.to(device) for tensor in self.tensors))

    def open(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values (tokens, dim), and which of them are there; None: all."""
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
    """Everything that a layer has set aside.

    Args:
        form: `exact`, `bf16`, `int8`, or `file`: exact, in temporary files that are mapped.
    """

    def __init__(self, form: str) -> None:
        self.form = form
        self.shelves: list[Shelf] = []
        self.gathering: Tokens | None = None  # buffers on the device
        self.gathered = 0  # tokens in them
        self._gathered_whole = True
        self._pinned = False

    @property
    def tokens(self) -> int:
        """Tokens of a head, at most."""
        return sum(shelf.slots for shelf in self.shelves) + self.gathered

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory."""
        return sum(_bytes(shelf.tensors) for shelf in self.shelves)

    @property
    def device_bytes(self) -> int:
        """Bytes of what gathers on the device."""
        return _bytes(self.gathering or ())

    # ---- how tokens enter

    def append(self, parts: Iterable[Tokens], count: int, whole: bool) -> None:
        """Put some tokens up in host memory.

        Args:
            parts: keys and values (batch, kv_heads, tokens, dim) and positions, -1 = nothing there,
                one after the other; `count` tokens together.
            whole: whether no position is -1.
        """
        self._shelve()
        self._put_up((self._packed(part) for part in parts), count, whole)

    def gather(self, part: Tokens, whole: bool) -> None:
        """Take in a few tokens, which wait on the device for more."""
        if self.gathered + part[0].shape[2] > GATHERED:
            self._shelve()
        if self.gathering is None:
            with torch.inference_mode(False):
                self.gathering = tuple(
                    torch.zeros(
                        (*t.shape[:2], GATHERED, *t.shape[3:]), dtype=t.dtype, device=t.device
                    )
                    for t in part
                )
            self._pinned = part[0].device.type == "cuda"
        place = slice(self.gathered, self.gathered + part[0].shape[2])
        for buffer, new in zip(self.gathering, part, strict=True):
            buffer[:, :, place] = new
        self.gathered = place.stop
        self._gathered_whole &= whole

    def gathered_tokens(self) -> tuple[Tensor, ...]:
        """What gathers on the device."""
        return tuple(t[:, :, : self.gathered] for t in self.gathering or ())

    def _shelve(self) -> None:
        if self.gathered:
            part = self._packed(self.gathered_tokens())
            self._put_up(iter([part]), self.gathered, self._gathered_whole)
        self.gathering, self.gathered, self._gathered_whole = None, 0, True

    def _packed(self, part: Tokens) -> tuple[Tensor, ...]:
        keys, values, positions = part
        self._pinned = keys.device.type == "cuda"
        return (*pack(keys, self.form), *pack(values, self.form), positions)

    def _put_up(self, parts: Iterator[tuple[Tensor, ...]], slots: int, whole: bool) -> None:
        """Put up a shelf, joined with those before it that are no longer than it is.

        So shelves stay few, as the digits of a number, and a token is copied a logarithmic number
        of times.
        """
        before: list[Shelf] = []
        while self.shelves and self.shelves[-1].rows is None and self.shelves[-1].slots <= slots:
            before.insert(0, self.shelves.pop())
            slots += before[0].slots
            whole &= before[0].whole
        self.add(chain((shelf.tensors for shelf in before), parts), slots, whole)

    def add(self, parts: Iterable[tuple[Tensor, ...]], slots: int, whole: bool) -> None:
        """Put up a shelf of `slots` tokens that come in parts, packed."""
        shelf: list[Tensor] = []
        start = 0
        for part in parts:
            if not shelf:
                shelf = [self._allocate((*t.shape[:2], slots, *t.shape[3:]), t.dtype) for t in part]
            place = slice(start, start + part[0].shape[2])
            for buffer, new in zip(shelf, part, strict=True):
                buffer[:, :, place].copy_(new)
            start = place.stop
        self.shelves.append(Shelf(tuple(shelf), None, whole))

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            if self.form != "file":
                return torch.empty(shape, dtype=dtype, pin_memory=self._pinned)
            with tempfile.NamedTemporaryFile(prefix="kvtool-") as file:  # the mapping outlives it
                size = torch.Size(shape).numel()
                flat = torch.from_file(file.name, shared=True, size=size, dtype=dtype)
        return flat.view(shape)

    # ---- how they are read

    def fetch(self, pairs: list[tuple[int, int]], device: torch.device) -> Iterator[Piece]:
        """Bring what is stored of some (row, KV head) to the device, piece by piece.

        On a GPU the first piece is under way when this returns, before it is asked for.
        """
        pieces = self._pieces(pairs)
        if device.type != "cuda":
            return (piece.moved(device) for piece in pieces)
        ahead = _one_ahead(pieces, device)
        first = next(ahead, None)
        return iter(()) if first is None else chain([first], ahead)

    def _pieces(self, pairs: list[tuple[int, int]]) -> Iterator[Piece]:
        for row, head in pairs:
            for shelf in self.shelves:
                own = row if shelf.rows is None else shelf.rows[row]
                for start in range(0, shelf.slots, _PIECE):
                    part = slice(start, start + _PIECE)
                    tensors = tuple(t[own, head, part] for t in shelf.tensors)
                    yield Piece(row, head, tensors, shelf.whole)
            if self.gathered:
                tensors = tuple(t[row, head] for t in self.gathered_tokens())
                yield Piece(row, head, tensors, self._gathered_whole)

    # ---- rows of the batch, and files

    def map_rows(self, change: Callable[[Tensor], Tensor], batch: int) -> None:
        """Let rows follow the batch: those on shelves by their number, the others moved."""
        chosen = change(torch.arange(batch)).tolist()
        self.shelves = [
            replace(shelf, rows=tuple((shelf.rows or range(batch))[row] for row in chosen))
            for shelf in self.shelves
        ]
        if self.gathering is not None:
            self.gathering = tuple(change(tensor) for tensor in self.gathering)

    def tensors(self) -> dict[str, Tensor]:
        """What a file holds of it, on the host."""
        shelves = [shelf.by_row() for shelf in self.shelves]
        whole = [torch.cat(parts, 2) for parts in zip(*shelves, strict=True)]
        named = {f"shelf.{i}": tensor for i, tensor in enumerate(whole)}
        return named | {f"gathered.{i}": t.cpu() for i, t in enumerate(self.gathered_tokens())}

    def load(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Take back what `tensors` gave."""
        self._pinned = device.type == "cuda"
        shelf, gathered = (
            tuple(tensors[name] for name in sorted(tensors) if name.startswith(prefix))
            for prefix in ("shelf.", "gathered.")
        )
        if shelf:
            self.add([shelf], shelf[-1].shape[2], bool((shelf[-1] >= 0).all()))
        if gathered:
            whole = bool((gathered[-1] >= 0).all())
            self.gather(tuple(t.to(device) for t in gathered), whole)


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
    """Bring them back."""
    if len(packed) == 1:
        return packed[0].to(dtype)
    numbers, scale = packed
    return (numbers * scale).to(dtype)


def _one_ahead(pieces: Iterator[Piece], device: torch.device) -> Iterator[Piece]:
    """Start to copy each piece before the one in front of it is used."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # what gathers may just be written
    under_way = None
    for piece in pieces:
        with torch.cuda.stream(stream):
            tensors = tuple(t.to(device, non_blocking=True) for t in piece.tensors)
            arriving = replace(piece, tensors=tensors, arrival=stream.record_event())
        if under_way is not None:
            yield under_way
        under_way = arriving
    if under_way is not None:
        yield under_way


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
