"""CUDA graphs as torch records them, on a pretended device that has torch's rules."""

import gc
import threading
import time
import weakref
from contextlib import contextmanager

import pytest
import torch

from kvtool.generation import graphs
from kvtool.generation.graphs import CudaRecording


class Generator:
    """Whose state is told that a recording has begun, and draws nothing until it has ended."""

    def __init__(self, offset=0):
        self.offset, self.waits = offset, False

    def clone_state(self):
        return Generator(self.offset)

    def graphsafe_set_state(self, other):
        self.__dict__ |= vars(other)


class Device:
    """Streams, and the graph that is being recorded.

    Attributes:
        recorded: the stream of each recording, in order.
        broken: whether something has happened that no graph can hold.
    """

    def __init__(self):
        self._here = threading.local()
        self.recorded, self.graphs, self.broken = [], [], False
        self.own, self.busy = Generator(), None

    @property
    def stream(self):
        return getattr(self._here, "stream", "default")

    @contextmanager
    def on(self, stream):
        before, self._here.stream = self.stream, stream
        try:
            yield
        finally:
            self._here.stream = before


class Graph:
    def __init__(self, device):
        self._device, self._generators = device, [device.own]
        device.graphs.append(weakref.ref(self))

    def register_generator_state(self, generator):
        self._generators.append(generator)

    def capture_begin(self, capture_error_mode):
        device = self._device
        assert capture_error_mode == "thread_local"
        assert device.busy is None, "only one capture may be underway at a time"
        assert device.stream != "default"
        device.busy, device.broken = self, False
        device.recorded.append(device.stream)
        for each in self._generators:
            each.waits = True

    def capture_end(self):
        device = self._device
        if device.busy is not self:
            raise RuntimeError("capture_end() called before capture_begin()")
        device.busy = None
        if device.broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        for each in self._generators:
            each.waits = False


@pytest.fixture
def device(monkeypatch):
    found = Device()
    graphs._recording_stream.cache_clear()
    for name, value in {
        "CUDAGraph": lambda: Graph(found),
        "Stream": lambda device: f"a stream of {device}",
        "stream": found.on,
        "device": lambda device: found.on(found.stream),
        "current_device": lambda: 0,
        "default_generators": [found.own],
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(CudaRecording, "_failed", [])
    yield found
    graphs._recording_stream.cache_clear()


CUDA = torch.device("cuda:1")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_fails_while_it_is_recorded_leaves_torch_as_it_was(device, error):
    """What it has raised is raised; its stream is left, and random numbers are drawn again."""
    generator = Generator(offset=8)

    def run():
        device.broken = True
        raise error("operation not permitted when stream is capturing")

    with pytest.raises(error, match="not permitted"):
        CudaRecording(CUDA).record(run, [generator])
    assert (device.busy, device.stream) == (None, "default")
    assert (generator.waits, device.own.waits) == (False, False)
    assert generator.offset == 8
    gc.collect()
    assert device.graphs[0]() is not None  # which torch's allocator would call
    assert CudaRecording(CUDA).record(lambda: "logits", [generator]) == "logits"


def test_what_fails_at_the_end_is_said(device):
    def run():
        device.broken = True

    with pytest.raises(RuntimeError, match="a previous error during capture"):
        CudaRecording(CUDA).record(run, [])
    assert (device.busy, device.stream, device.own.waits) == (None, "default", False)


def test_threads_record_one_after_the_other_on_the_stream_of_a_device(device):
    found = []

    def run():
        time.sleep(0.02)
        return device.stream

    def record():
        found.append(CudaRecording(CUDA).record(run, []))

    threads = [threading.Thread(target=record) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == device.recorded == ["a stream of cuda:1"] * 3
    assert len({CudaRecording(torch.device("cuda", i)).record(run, []) for i in range(2)}) == 2
