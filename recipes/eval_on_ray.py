"""Share a run of `kvtool eval` among the machines of a Ray cluster.

    python recipes/eval_on_ray.py 2 -t niah -p h2o+caote -b 64 --lengths 256 -f text -o runs/two

starts two processes, on a GPU each where the cluster has as many. All machines see this folder, and
have the same Python environment. Without a cluster, Ray starts one on this machine.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import ray


@ray.remote
class Process:
    """One process of the run, on a machine that Ray chooses."""

    def meet(self) -> tuple[str, int]:
        """Return an address of this machine that is free."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return ray.util.get_node_ip_address(), listener.getsockname()[1]

    def run(self, variables: dict[str, str], folder: str, arguments: list[str]) -> int:
        """Run `kvtool eval` as that process, and return its exit code."""
        command = [sys.executable, "-m", "kvtool", "eval", *arguments]
        return subprocess.run(command, cwd=folder, env=os.environ | variables).returncode


def main() -> None:
    """Take the number of processes, and what `kvtool eval` takes."""
    count, arguments = int(sys.argv[1]), sys.argv[2:]
    ray.init(include_dashboard=False)
    gpus = int(ray.cluster_resources().get("GPU", 0) >= count)
    place = Process.options(num_cpus=1, num_gpus=gpus, scheduling_strategy="SPREAD")
    processes = [place.remote() for _ in range(count)]
    address, port = ray.get(processes[0].meet.remote())
    where = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    codes = [
        process.run.remote({**where, "RANK": str(rank), "LOCAL_RANK": "0"}, os.getcwd(), arguments)
        for rank, process in enumerate(processes)
    ]
    sys.exit(max(ray.get(codes)))


if __name__ == "__main__":
    main()
