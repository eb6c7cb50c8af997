"""The second bundled model works in steps, under its own name."""

import pytest
import torch

from accuracy import measure
from kvtool.models.folder import find_source
from kvtool.models.load import load
from kvtool.models.notes import model_note
from kvtool.models.reference import path
from kvtool.models.reference.filler import Filler
from tests.models.test_reference_model import FILLER_SEED

NAME = "reference-trace"
MOST_BYTES = 2 * 2**20


def test_it_is_loaded_by_its_name():
    loaded, first = load(NAME), load()
    assert loaded.name == loaded.model.name_or_path == NAME
    assert loaded.config_hash != first.config_hash  # a cache of one is refused by the other
    assert loaded.model.config.max_position_embeddings == 1024
    assert loaded.tokenizer.get_vocab() == first.tokenizer.get_vocab()
    assert model_note(NAME) is None
    assert sum(file.stat().st_size for file in path(NAME).iterdir()) <= MOST_BYTES


def test_a_folder_of_its_name_goes_first(tmp_path, monkeypatch):
    assert find_source(NAME)[:2] == (NAME, str(path(NAME)))
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir()
    assert find_source(NAME)[:2] == (NAME, NAME)
    assert find_source(None)[:2] == ("reference", str(path()))


@pytest.mark.parametrize("tokens", [320, 563], ids=["33 steps", "64 steps"])
def test_nearly_every_chain_is_worked_out_to_its_end(tokens):
    model = load(NAME, dtype="float32").model
    with torch.no_grad():
        result = measure(model, "trace", tokens, samples=10, filler=Filler(FILLER_SEED, 50), seed=5)
    assert result["exact"] >= 0.9
