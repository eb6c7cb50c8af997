"""Open blocks of `kvtool.compressed`, and the one that a call of `generate` is made in.

A context variable holds them: each task has a context of its own, which `asyncio.to_thread` copies.
Generators share the context of whoever drives them, so the block of one that is suspended does not
count. A call from a context without any open block (a streamer's thread, an executor's) belongs to
the blocks that are open, if they agree.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType

from transformers import PreTrainedModel

from kvtool.cache.whole.cache import KVCache
from kvtool.cache.whole.settings import CacheSettings
from kvtool.errors import UsageError

_GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


@dataclass(frozen=True)
class CacheMaker:
    """What every call is given a cache of.

    Attributes:
        settings: what distinguishes two of them.
        make: returns an empty cache for the model.
    """

    settings: CacheSettings
    make: Callable[[PreTrainedModel], KVCache]

    @property
    def name(self) -> str:
        """Policy and budget, in words."""
        budget = self.settings.budget
        return f"{self.settings.policy}" + ("" if budget is None else f" at {budget}")


class Block:
    """A block of `kvtool.compressed` over one model, from its beginning to its end.

    Attributes:
        maker: what its calls are given caches of.
        thread: that opened it.
        around: blocks whose code waits until this one ends.
        open: whether it has not ended.
    """

    def __init__(self, model: PreTrainedModel, maker: CacheMaker, frame: FrameType) -> None:
        """Open a block in the running context."""
        self.maker, self.thread, self.open = maker, threading.get_ident(), True
        self.model = weakref.ref(model)
        frame, here = _owner(frame), _HERE.get()
        self._generator = frame if frame.f_code.co_flags & _GENERATOR else None
        around = [block for block in here if block.open and not block.suspended]
        self.around = () if self._generator is not None else tuple(around)
        _HERE.set((*here, self))

    def close(self) -> None:
        """End it; contexts that were copied from this one may still name it."""
        self.open, self._generator, self.around = False, None, ()
        _HERE.set(tuple(block for block in _HERE.get() if block is not self))

    @property
    def suspended(self) -> bool:
        """Whether a generator opened it that does not run now."""
        return self._generator is not None and self._generator.f_back is None


_HERE: ContextVar[tuple[Block, ...]] = ContextVar("kvtool_blocks", default=())


def _owner(frame: FrameType) -> FrameType:
    """Find the function whose `with` statement it is: helpers of contextlib only pass it on."""
    while frame.f_code.co_flags & _GENERATOR and _of_contextlib(frame.f_back):
        while frame.f_back is not None and _of_contextlib(frame.f_back):
            frame = frame.f_back
        frame = frame.f_back or frame
    return frame


def _of_contextlib(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_globals.get("__name__") == "contextlib"


def block_of_call(model: PreTrainedModel, blocks: Sequence[Block]) -> Block | None:
    """Find the block that the running call of a model is made in.

    Raises:
        UsageError: it could be one of several that differ, or belongs to none that is open.
    """
    if not blocks:
        return None
    here = _HERE.get()
    mine = [block for block in here if block in blocks]
    entered = [block for block in mine if not block.suspended]
    if entered:
        return entered[-1]
    found = mine or list(blocks)
    found = [block for block in found if not any(block in other.around for other in found)]
    last = found[-1]
    if any(block.maker.settings != last.maker.settings for block in found):
        names = ", ".join(dict.fromkeys(block.maker.name for block in found))
        raise UsageError(
            f"this model's calls are compressed by {names} at the same time, "
            "and this call could belong to any of them",
            hint="call generate where the block is open: asyncio.to_thread takes its context along"
            ", run_in_executor and new threads do not",
        )
    ended = any(not block.open and block.model() is model for block in here)
    here_too = any(block.thread == threading.get_ident() for block in found)
    if not mine and (ended or here_too):
        raise UsageError(
            "this call is outside of the open kvtool.compressed block, which compresses this "
            f"model's calls by {last.maker.name}: its own has ended, or is another task's",
            hint='open a block here, too ("full" keeps everything), '
            "or set the policy for good: kvtool.attach(model, policy=..)",
        )
    return last


def check_threads(blocks: Sequence[Block], maker: CacheMaker) -> None:
    """Refuse to open a block beside one of another thread that wants something else."""
    for other in blocks:
        if other.thread != threading.get_ident() and other.maker.settings != maker.settings:
            raise UsageError(
                f"another thread compresses this model's calls by {other.maker.name}, "
                f"and this one wants {maker.name}",
                hint="load the model once more, or let one block end first",
            )
