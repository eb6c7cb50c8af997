"""The kernels compile to machine code as real calls would, and fit into the memory of a program."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from kvtool.kernels.checks import CODES
from tests.kernels.compiling import SHARED

CASES = ("usual", "ones", "plain", "mla", "narrow", "96", "wide")


def compile_kernels(arch: int, dtype: str, *cases: str) -> dict:
    """In a process of its own, which does not interpret."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling", str(arch), dtype, *cases],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(arch: int, dtype: str, *cases: str) -> None:
    found = compile_kernels(arch, dtype, *cases)["shared"]
    assert len(found) == 8
    assert max(found.values()) <= SHARED[arch] * 1024, found


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", [80, 90])
def test_codes_are_loaded_16_bytes_a_thread(arch):
    """Also those of int4 with 64 channels, whose 32 bytes are two loads."""
    loads = compile_kernels(arch, "bf16", "narrow", "96", "plain")["loads"]
    assert len(loads) == 3 * len(CODES)
    for load in loads:
        assert load["wide"] == load["all"], load


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
