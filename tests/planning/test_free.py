"""A plan for more memory than is free."""

from types import SimpleNamespace

import pytest

from kvtool.errors import UsageError
from kvtool.planning.free import check_free

GIB = 2**30
PLAN = SimpleNamespace(device=SimpleNamespace(memory=16 * GIB))


def test_it_is_said_with_both_numbers():
    told = "the plan is for a memory of 16.0 GiB, and 8.0 GiB are free on cuda"
    assert check_free(PLAN, "cuda", 8 * GIB, strict=False) == f"warning: {told}"
    with pytest.raises(UsageError, match=told):
        check_free(PLAN, "cuda", 8 * GIB, strict=True)


@pytest.mark.parametrize("free", [None, 15 * GIB, 16 * GIB])
def test_what_a_device_always_takes_is_no_reason(free):
    assert check_free(PLAN, "cuda", free, strict=True) is None


def test_a_plan_for_no_device_runs_anywhere():
    assert check_free(SimpleNamespace(device=None), "cpu", 1, strict=True) is None
