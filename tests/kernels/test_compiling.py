"""The kernels compile to machine code as real calls would, and fit into the memory of a program."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from tests.kernels.compiling import SHARED

CASES = ("usual", "ones", "plain", "mla", "narrow", "96", "wide")


def check(arch: int, dtype: str, *cases: str) -> None:
    """In a process of its own, which does not interpret."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling", str(arch), dtype, *cases],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 8
    assert max(found.values()) <= SHARED[arch] * 1024, found


@pytest.mark.exhaustive
def test_kernels_compile():
    check(86, "bf16", "usual", "ones")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "dtype"), [*((arch, "bf16") for arch in SHARED), (80, "fp16"), (86, "fp32")]
)
def test_kernels_compile_for_all_sizes(arch, dtype):
    odd = () if dtype == "fp32" else ("odd",)  # 71 queries of one head in float32 need more memory
    check(arch, dtype, *CASES, *odd)
