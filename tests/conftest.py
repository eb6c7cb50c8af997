"""Tests run on one thread: their tensors are tiny, and waiting threads cost more than they give.

So do the processes that they start, whose sums would otherwise differ in the last digits. Without a
GPU, Triton's interpreter runs the kernels; it has to be chosen before Triton is imported.

The bundled model is a small one here (`tests.models.bundled`); processes that tests start run the
one that ships, and so do tests that take `shipped_model`.

Hypothesis judges no example by its seconds, which say how busy a machine is.
"""

import gc
import importlib.util
import os

import pytest
import torch

from kvtool.models import reference
from tests.models.bundled import put_in_place, shipped
from tests.tiers import in_part, mark_the_rest, read_part

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
torch.set_num_threads(1)
put_in_place()
if importlib.util.find_spec("hypothesis"):  # not on every machine with a GPU
    from hypothesis import HealthCheck, settings

    slow = [HealthCheck.too_slow]
    settings.register_profile("any machine", deadline=None, suppress_health_check=slow)
    settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="I/N", help="run one of N parts of the cases")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.part:
        read_part(config.option.part)


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_the_rest(items)
    if config.option.part:
        part = read_part(config.option.part)
        items[:] = [item for item in items if in_part(item.nodeid, *part)]


def pytest_collection_finish() -> None:
    """Leave modules and cases to no collection of garbage: a fifth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture
def shipped_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `reference` be the model that ships here too, as in processes that the test starts."""
    monkeypatch.setattr(reference, "path", shipped)
