import pytest
import torch

import kvtool
from kvtool.documents.memory import ModelShape
from kvtool.generation import prefill
from kvtool.profiling.memory_table import memory_table
from tests.models_for_tests import family_model

GIB = 2**30


def held(table, tokens):
    """Bytes of one row, layer by layer."""
    used = 0
    for size, window in zip(table.layer_bytes_per_token, table.layer_window, strict=True):
        used += size * (tokens if window is None or window > tokens else window)
    return used


@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "falcon", "deepseek_v3", "falcon_h1", "gemma3n", "gemma4", "llama4"]
)
def test_bytes_are_those_of_the_tensors_of_a_full_cache(name):
    model = kvtool.attach(family_model(name))
    cache = kvtool.build_cache(model, "full")
    prefill(model, cache, torch.full((3, 40), 7))
    table = memory_table(model.config, "float32")
    used = 3 * held(table, 40)
    assert used == cache.report().kv_bytes
    shape = ModelShape.of(model.config, name=name, dtype="float32")
    assert shape.kv_bytes_per_token == sum(table.layer_bytes_per_token)
    assert (shape.layers, len(shape.layer_types)) == (4, 4)
    if name not in ("deepseek_v3", "gemma4"):  # latents; heads of two sizes
        attending = sum(size > 0 for size in table.layer_bytes_per_token)
        assert shape.kv_bytes_per_token == 2 * attending * shape.kv_heads * shape.head_dim * 4


def llama(**changes):
    from transformers import LlamaConfig

    # Llama 3.1 8B: 2 x 32 layers x 8 heads x 128 x 2 bytes = 128 KiB per token
    sizes = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    }
    return LlamaConfig(**sizes | changes)


def test_a_known_model_takes_what_everybody_says():
    table = memory_table(llama(), "bfloat16")
    assert sum(table.layer_bytes_per_token) == 128 * 1024
    at = {c: dict(zip(table.batches, row, strict=True)) for c, row in _rows(table)}
    assert at[131072][1] == 16 * GIB
    assert at[16384][4] == 8 * GIB
    fits = dict(zip(table.memory, table.largest_context, strict=True))
    assert fits[16 * GIB] == [131072, 32768, 8192, 2048]
    rows = dict(zip(table.memory, table.largest_batch, strict=True))
    assert rows[24 * GIB][table.contexts.index(131072)] == 1
    assert rows[8 * GIB][table.contexts.index(131072)] == 0


def _rows(table):
    return zip(table.contexts, table.bytes, strict=True)


def test_what_is_said_to_fit_fits_and_one_more_token_does_not():
    model = family_model("gemma3")  # two of four layers slide
    table = memory_table(model.config, "float32")
    for size, row in zip(table.memory, table.largest_context, strict=True):
        for rows, tokens in zip(table.batches, row, strict=True):
            at = [rows * held(table, n) for n in (tokens, tokens + 1)]
            assert at[0] <= size < at[1]


def test_windows_alone_fit_any_context():
    table = memory_table(family_model("mistral-window").config, "float32")
    assert table.layer_window == [23] * 4
    assert {tokens for row in table.largest_context for tokens in row} == {None}


def test_contexts_end_with_the_trained_one():
    assert memory_table(llama(max_position_embeddings=6000)).contexts == [1024, 4096, 6000]


def test_the_dtype_is_that_of_the_checkpoint_unless_told():
    assert memory_table(llama(dtype="bfloat16"), "auto").dtype == "bfloat16"
    assert memory_table(llama(dtype="bfloat16"), "float32").dtype == "float32"
    assert memory_table(llama()).dtype == "float32"
