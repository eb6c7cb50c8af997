"""Run commands one after another, some of them killed at one of their writes.

One request a line on stdin, `{"folder": .., "arguments": [..], "kill_at": n or null, "bytes": n or
null}`; one answer a line on stdout: the exit code (-9: killed) and how many writes the command has
begun. A write is what Python reports to its audit hooks of files under the working folder, just
before it happens: opened for writing, renamed, deleted, and so on. With `bytes` the system kills
the command (-25) in the middle of the write that takes a file beyond that number. Each command is
forked from a process that has imported everything and has one thread, so that it takes no time to
start.
"""

import json
import os
import resource
import signal
import sys

_WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate"}
_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def is_write(event, arguments, folder):
    opened = event == "open" and arguments[2] is not None and arguments[2] & _FLAGS
    if not opened and event not in _WRITES:
        return False
    path = arguments[0]
    return isinstance(path, (str, bytes, os.PathLike)) and os.path.abspath(
        os.fsdecode(path)
    ).startswith(folder)


def run(folder, arguments, kill_at, bytes=None):
    """Return the exit code and the count of writes."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.chdir(folder)
            code = in_child(arguments, kill_at, bytes, theirs)
        finally:
            os._exit(code)
    os.close(theirs)
    told = b""
    while part := os.read(ours, 4096):
        told += part
    os.close(ours)
    status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status), len(told)


def in_child(arguments, kill_at, limit, pipe):
    from kvtool.cli.main import main

    folder, writes = os.getcwd() + os.sep, 0
    silent = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(silent, descriptor)

    def hook(event, values):
        nonlocal writes
        if not is_write(event, values, folder):
            return
        writes += 1
        if writes == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(pipe, b".")

    sys.addaudithook(hook)
    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # which Python ignores
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return main(arguments)


if __name__ == "__main__":
    import torch

    import kvtool.cli.main
    import kvtool.generation
    import kvtool.models.load  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run(**json.loads(line))) + "\n")
        sys.stdout.flush()
