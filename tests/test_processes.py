"""Which process of how many this is."""

import pytest
import torch

from kvtool.errors import UsageError
from kvtool.models.placement import resolve_device
from kvtool.processes import Processes, joined, started


def setenv(monkeypatch, **variables):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Processes()),
        ({"WORLD_SIZE": "4"}, Processes()),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, Processes(5, 8, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, Processes(3, 4, 3)),
    ],
)
def test_the_launcher_says_which_process_this_is(monkeypatch, variables, expected):
    setenv(monkeypatch, **variables)
    assert started() == expected
    assert started().first == (expected.rank == 0)


@pytest.mark.parametrize("rank", ["-1", "2", "first"])
def test_a_rank_outside_the_group_is_refused(monkeypatch, rank):
    setenv(monkeypatch, RANK=rank, WORLD_SIZE="2")
    with pytest.raises(UsageError, match=f"names no process of a group: RANK={rank} WORLD_SIZE=2"):
        started()


def test_one_process_acts_by_itself(monkeypatch):
    setenv(monkeypatch)
    with joined() as processes:
        assert processes.lead(lambda: 7) == 7
        processes.wait()
    assert not torch.distributed.is_initialized()


def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    setenv(monkeypatch, RANK="6", WORLD_SIZE="8", LOCAL_RANK="2")
    assert resolve_device("auto") == "cuda:2"
    setenv(monkeypatch, RANK="5", WORLD_SIZE="8", LOCAL_RANK="5")
    assert resolve_device("auto") == "cuda:1"
    setenv(monkeypatch)
    assert resolve_device("auto") == "cuda"
