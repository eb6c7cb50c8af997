"""Peak memory, of every GPU that a model is on."""

import torch

from kvtool.evaluation.bench.meter import Peak, watched_devices


class Spread(torch.nn.Module):
    """A model of which only the places of its weights matter."""

    device = torch.device("cuda:0")

    def __init__(self, *places):
        super().__init__()
        self.places = [torch.device(place) for place in places]

    def parameters(self):
        return [type("Weight", (), {"device": place}) for place in self.places]


def test_all_gpus_of_a_model_are_watched(monkeypatch):
    gpus = watched_devices(Spread("cuda:0", "cuda:2", "cuda:0", "meta", "cpu"))
    assert gpus == [torch.device("cuda:0"), torch.device("cuda:2")]
    held = {gpus[0]: [100, 150], gpus[1]: [30, 95]}
    reset = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda gpu: held[gpu][0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda gpu: held[gpu][1])
    assert Peak(gpus).growth() == 50 + 65
    assert reset == gpus


def test_without_a_gpu_the_process_is_watched():
    model = Spread("cpu", "meta")
    model.device = torch.device("cpu")
    assert watched_devices(model) == [torch.device("cpu")]
    peak = Peak([torch.device("cpu")])
    block = torch.ones(64 * 2**20 // 4)
    assert 60 * 2**20 < peak.growth() < 200 * 2**20
    del block
