"""What is fed: a prompt of no tokens is refused before anything is read from it."""

from types import SimpleNamespace

import pytest
import torch

import kvtool
from kvtool.errors import UsageError
from kvtool.generation import prefill
from kvtool.generation.feeding import wait
from tests.models_for_tests import peaky_model


@pytest.mark.parametrize(
    ("mode", "width", "mask"), [("full", 0, None), ("block:4", 3, torch.zeros(2, 3))]
)
def test_a_prompt_of_no_tokens_is_refused(mode, width, mask):
    model = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(model, "h2o", 16, prefill=mode)
    with pytest.raises(UsageError, match="the prompt is empty"):
        prefill(model, cache, torch.ones((2, width), dtype=torch.long), mask)


def test_a_clock_waits_for_the_device_of_the_model(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    for device in ("cpu", "xpu:1"):
        wait(SimpleNamespace(device=torch.device(device)))
    assert waited == [torch.device("xpu:1")]


def test_the_last_row_comes_to_the_product_with_the_vocabulary_as_rows_of_its_own():
    """On a CPU torch takes 20 times as long for a bfloat16 row that is cut out of a block."""
    model = kvtool.attach(peaky_model("llama"))
    rows = []
    model.lm_head.register_forward_hook(lambda _module, given, _out: rows.append(given[0]))
    prefill(model, kvtool.build_cache(model, "full"), torch.ones(1, 9, dtype=torch.long))
    assert [row.shape[1] for row in rows] == [1]
    assert rows[0].stride(0) == rows[0].shape[2]
