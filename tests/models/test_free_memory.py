"""The memory that is free: of the machine, of a container, of GPUs."""

import torch

from kvtool.models import placement as room
from kvtool.models.placement import free_memory


def test_a_machine_tells_what_is_free():
    device, free = free_memory("cpu")
    assert device == "cpu"
    assert 2**24 < free < 2**50


def write(folder, **files):
    folder.mkdir()
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")
    return folder


def test_a_container_has_what_its_limit_leaves(tmp_path, monkeypatch):
    info = tmp_path / "meminfo"
    info.write_text("MemTotal:  9000 kB\nMemFree: 1 kB\nMemAvailable:    5000 kB\n")
    monkeypatch.setattr(room, "_MEMORY", info)
    monkeypatch.setattr(room, "_GROUP", tmp_path / "gone")
    monkeypatch.setattr(room, "_GROUP_OLD", tmp_path / "gone")
    assert free_memory("cpu") == ("cpu", 5000 * 1024)
    stat = "anon 70\ninactive_file 300\n"
    files = {"memory__max": 4000, "memory__current": 1500, "memory__stat": stat}
    monkeypatch.setattr(room, "_GROUP", write(tmp_path / "group", **files))
    assert free_memory("cpu") == ("cpu", 4000 - 1500 + 300)
    (tmp_path / "group" / "memory.max").write_text("max\n")
    assert free_memory("cpu") == ("cpu", 5000 * 1024)
    old = {"memory__limit_in_bytes": 900, "memory__usage_in_bytes": 1000, "memory__stat": stat}
    monkeypatch.setattr(room, "_GROUP_OLD", write(tmp_path / "old", **old))
    assert free_memory("cpu") == ("cpu", 0)


def test_other_devices_tell_what_they_can(monkeypatch):
    monkeypatch.setattr(room, "_free_ram", lambda: 70)
    assert free_memory("mps") == ("mps", 70)  # which shares the machine's memory
    monkeypatch.setattr(torch.xpu, "mem_get_info", {"xpu:1": (30, 500)}.__getitem__)
    assert free_memory("xpu:1") == ("xpu:1", 30)
    assert free_memory("mtia") == ("mtia", None)


def test_gpus_add_up_where_a_model_is_spread(monkeypatch):
    free = {"cuda:0": 100, "cuda:1": 30}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (free[str(place)], 500))
    assert free_memory("cuda:1") == ("cuda:1", 30)
    assert free_memory("cuda:0", spread=True) == ("cuda:0 + cuda:1", 130)
