"""The processes that a command runs in, as torchrun or accelerate launch has started them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from kvtool.errors import KvtoolError, UsageError

_PATIENCE = timedelta(days=7)  # for the slowest process; one that died is noticed at once

Value = TypeVar("Value")


@dataclass(frozen=True)
class Processes:
    """One of several processes that run the same command; by default the only one.

    Attributes:
        rank: place of this one, from 0.
        count: how many there are, on all hosts.
        local_rank: place among those of its host.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """Whether this is the process that talks to the user and writes documents."""
        return self.rank == 0

    def lead(self, act: Callable[[], Value]) -> Value:
        """Let the first process act while the others wait, and give its result to all of them.

        Raises:
            KvtoolError: what the first process raised; in the others, that it did.
        """
        if self.count == 1:
            return act()
        if not self.first:
            result, code = self._broadcast(None)
            if code:
                raise _follow(code)
            return result
        try:
            result = act()
        except KvtoolError as error:
            self._broadcast((None, error.exit_code))
            raise
        return self._broadcast((result, 0))[0]

    def wait(self) -> None:
        """Wait until every process has come here."""
        if self.count > 1:
            from torch import distributed

            with _noticing_the_dead():
                distributed.barrier()

    def _broadcast(self, value: Any) -> Any:
        from torch import distributed

        carrier = [value]
        with _noticing_the_dead():
            distributed.broadcast_object_list(carrier, src=0)
        return carrier[0]


def started() -> Processes:
    """Return which process of how many this is, by the variables that launchers set.

    Raises:
        UsageError: variables that contradict each other.
    """
    texts = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if texts["RANK"] is None or texts["WORLD_SIZE"] is None:
        return Processes()
    try:
        rank, count = int(texts["RANK"]), int(texts["WORLD_SIZE"])
        local = rank if texts["LOCAL_RANK"] is None else int(texts["LOCAL_RANK"])
    except ValueError:
        rank, count, local = 0, 0, 0
    if not 0 <= rank < count or local < 0:
        given = " ".join(f"{name}={text}" for name, text in texts.items() if text is not None)
        raise UsageError(
            f"the environment names no process of a group: {given}",
            hint="start with torchrun --nproc-per-node N -m kvtool .., or unset RANK",
        )
    return Processes(rank, count, local)


def check_alone(command: str) -> None:
    """Refuse to do the same work in each of several processes."""
    count = started().count
    if count > 1:
        raise UsageError(
            f"{count} processes were started, and kvtool {command} runs in one",
            hint="generate --tensor-parallel splits the model over them, eval shares its samples",
        )


@contextlib.contextmanager
def joined() -> Iterator[Processes]:
    """Connect this process with the others that were started with it.

    Raises:
        UsageError: no launcher has said where they meet.
        KvtoolError: they cannot be reached.
    """
    processes = started()
    if processes.count == 1:
        yield processes
        return
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise UsageError(
            f"{processes.count} processes, and nothing says where they meet (MASTER_ADDR, "
            "MASTER_PORT)",
            hint="start with torchrun --nproc-per-node N -m kvtool ..",
        )
    import torch
    from torch import distributed

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        distributed.init_process_group(backend, timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise KvtoolError(
            f"cannot reach the other processes: {str(error).splitlines()[0]}"
        ) from error
    try:
        yield processes
    finally:
        distributed.destroy_process_group()


def _follow(code: int) -> KvtoolError:
    return KvtoolError("process 0 has failed", exit_code=code)


@contextlib.contextmanager
def _noticing_the_dead() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise KvtoolError(
            "another process has ended before its work was done",
            hint="the same command goes on from what is finished",
        ) from error
