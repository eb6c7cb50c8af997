import pytest

import kvtool
from kvtool.evaluation.samples.sample import token_counter
from kvtool.models.load import load


@pytest.fixture(scope="module")
def loaded():
    """The bundled model with kvtool's attention; each test file has its own."""
    loaded = load()
    kvtool.attach(loaded.model)
    return loaded


@pytest.fixture(scope="module")
def counter(loaded):
    """How the bundled tokenizer measures text."""
    return token_counter(loaded.tokenizer, 8192)
