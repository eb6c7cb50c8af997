"""The list of planted faults fits the package as it is."""

from tests.planted_faults import FAULTS, ROOT, check


def test_each_fault_can_be_planted():
    assert check(FAULTS) == []
    assert [test for fault in FAULTS for test in fault.tests if not (ROOT / test).exists()] == []
