"""Many clients at a server for some time: `python -m tests.engines.load --seconds 150`.

Answers are compared with those of the same requests alone. Beside them go, with --hostile, a client
that sends bodies of 30 MiB and ten that open connections and send nothing. What is printed: wrong
answers, the median and the longest time of an answer, and the server's memory, threads and files.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from tests.engines.serving import Server, process

TEXT = "The secret code for falcon: 7429103. The old lamp was near the school. "


def requests() -> list[dict]:
    """Twelve requests of several lengths, greedy, so that each has one answer."""
    places = range(12)
    return [
        {"prompt": TEXT * (1 + place % 4) + f"Then {place}", "max_tokens": 4 + 3 * (place % 5)}
        for place in places
    ]


def ask(server: Server, body: dict) -> str:
    status, answer = server.ask("/v1/completions", body)
    assert status == 200, answer
    return answer["choices"][0]["text"]


def held(pid: int) -> dict[str, int]:
    """What a process holds: MiB, threads, open files."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    mib = int(status["VmRSS"].split()[0]) >> 10
    most = int(status["VmHWM"].split()[0]) >> 10
    return {"MiB": mib, "most MiB": most, "threads": int(status["Threads"]), "files": files}


def clients(server: Server, count: int, seconds: float, right: list[str]) -> tuple[int, list]:
    """Let clients ask in turn; return wrong answers and the seconds of all."""
    end, wrong, times = time.monotonic() + seconds, [], []

    def work(seed: int) -> None:
        draw, bodies = random.Random(seed), requests()
        while time.monotonic() < end:
            place, begun = draw.randrange(len(bodies)), time.monotonic()
            text = ask(server, bodies[place])
            times.append(time.monotonic() - begun)
            if text != right[place]:
                wrong.append((place, text))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return len(wrong), times


def hostile(server: Server, ended: threading.Event) -> None:
    """Send bodies of 30 MiB one after another, and hold ten connections that say nothing."""
    address = urlsplit(server.address)
    idle = [socket.create_connection((address.hostname, address.port)) for _ in range(10)]
    body = json.dumps({"prompt": "the lamp is old " * (30 * 2**16), "max_tokens": 1}).encode()
    while not ended.is_set():
        with suppress(OSError):
            server.ask("/v1/completions", body)
    for each in idle:
        each.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--hostile", action="store_true")
    given = parser.parse_args()
    with process("-p", "h2o", "-b", "64", "--port", "0") as (started, server):
        right = [ask(server, body) for body in requests()]
        before, ended = held(started.pid), threading.Event()
        if given.hostile:
            threading.Thread(target=hostile, args=(server, ended)).start()
        wrong, times = clients(server, given.clients, given.seconds, right)
        ended.set()
        after = held(started.pid)
    lines = (
        f"{len(times)} answers, {wrong} wrong",
        f"seconds: median {statistics.median(times):.2f}, longest {max(times):.2f}",
        f"before {before}, after {after}",
    )
    sys.stdout.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    main()
