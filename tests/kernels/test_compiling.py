"""The kernels compile to machine code, and fit into the shared memory of every GPU since 2020."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SHARED = 99 * 1024  # bytes a program may take on the smallest of these GPUs


def shared_memory(*args: str) -> dict[str, int]:
    """Bytes that each kernel takes; in a process of its own, which does not interpret."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling", *args],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(*args: str) -> None:
    found = shared_memory(*args)
    assert len(found) >= 4
    assert max(found.values()) <= SHARED, found


def test_kernels_compile():
    check("80", "bf16", "64")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "90"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("dim", ["80", "128", "256"])
def test_kernels_compile_everywhere(arch, dtype, dim):
    check(arch, dtype, dim)
