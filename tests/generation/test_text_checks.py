"""Tokens and positions without an embedding are one line, as is memory that has run out."""

import pytest
import torch

import kvtool
from kvtool import generation
from kvtool.cli.main import main
from kvtool.errors import UsageError, is_out_of_memory
from kvtool.generation.feeding import learned_positions
from tests.models_for_tests import peaky_model, random_ids


class Words:
    """As much of a tokenizer as an answer needs."""

    def batch_decode(self, rows, **unused):
        return [" ".join(map(str, row)) for row in rows]


def say(model, ids, new):
    cache = kvtool.build_cache(model, "full")
    return generation.generate(model, Words(), cache, ids, max_new_tokens=new)


@pytest.mark.parametrize("token", [96, -1])
def test_a_token_beyond_the_embeddings_is_named(token):
    model = kvtool.attach(peaky_model("llama"))
    ids = random_ids(9)
    ids[0, 3] = token
    with pytest.raises(UsageError, match=f"has token {token}, and the model has embeddings for 96"):
        say(model, ids, 3)
    assert len(say(model, random_ids(9), 3).token_ids[0]) == 3


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_are_a_limit_up_to_the_last_token_that_is_fed(family):
    model = kvtool.attach(peaky_model(family, max_position_embeddings=64))
    assert learned_positions(model) == 64
    model.generation_config.eos_token_id = None
    assert say(model, random_ids(60), 5).new_tokens == 5
    with pytest.raises(UsageError, match="60 tokens and 6 new ones are more than the 64") as caught:
        say(model, random_ids(60), 6)
    assert "--max-new-tokens 5" in caught.value.hint
    with pytest.raises(UsageError, match="65 tokens and 1 new ones are more than the 64 positions"):
        say(model, random_ids(65), 1)


def test_a_cache_goes_on_no_further_than_that():
    model = kvtool.attach(peaky_model("gpt2", max_position_embeddings=64))
    cache = kvtool.build_cache(model, "h2o", 20)
    generation.compress(model, cache, random_ids(60))
    with pytest.raises(UsageError, match="60 tokens and 9 new ones are more than"):
        generation.generate(model, Words(), cache, None, max_new_tokens=9)


def test_rotated_positions_have_no_such_limit():
    assert learned_positions(peaky_model("llama")) is None


def test_memory_that_runs_out_on_a_cpu_is_one_line(monkeypatch, capsys):
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)

    def fail(*unused, **options):
        raise caught.value

    monkeypatch.setattr("kvtool.models.attached.load", fail)
    assert main(["generate", "-p", "h2o", "-q", "--prompt", "a"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: out of memory\nhint: ")
