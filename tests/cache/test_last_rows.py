"""The last queries of a prompt that comes in several blocks."""

from types import SimpleNamespace

import torch

import kvtool
from kvtool.cache.steps.attend_block import _last_spans
from tests.models_for_tests import peaky_model


def test_queries_of_an_earlier_block_see_up_to_themselves():
    """Of tokens that see one another, only those of the running block see later ones."""
    model = kvtool.attach(peaky_model("llama"))
    layer = kvtool.build_cache(model, "snapkv(window=4)", 12).slot_layers[0]
    spans = torch.tensor([[[7, 9], [7, 9], [7, 9]]])
    view = SimpleNamespace(above=None)
    block = SimpleNamespace(new=torch.tensor([[7, 8, 9]]), view=view)
    found = _last_spans(layer, spans, block, torch.tensor([[6, 7, 8, 9]]))
    assert found.tolist() == [[[6, 6], [7, 9], [7, 9], [7, 9]]]
