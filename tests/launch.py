"""Several processes of one program, with the environment that torchrun gives them."""

import os
import socket
import subprocess
import sys
from pathlib import Path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launch(count: int, *arguments: str, folder: Path, **variables: str) -> list[subprocess.Popen]:
    """Start `python ARGUMENTS` in a number of processes that know of each other."""
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            | {"PYTHONFAULTHANDLER": "1"}  # a crash of native code says where Python was
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
            | variables,
        )
        for rank in range(count)
    ]


def finish(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """Return exit code, stdout and stderr of each."""
    try:
        ends = [process.communicate(timeout=900) for process in processes]
    finally:
        for process in processes:
            process.kill()  # where one has not come to its end in time, or this was interrupted
    return [(p.returncode, *end) for p, end in zip(processes, ends, strict=True)]
