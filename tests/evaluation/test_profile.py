"""A profile from Python in one call: by name or of a loaded model, of built-in or given texts."""

import json

import pytest
import torch
from safetensors.torch import load_file

import kvtool
from kvtool.errors import UsageError
from kvtool.models.load import load

TEXT = "The old lamp was near the school. The quiet falcon was behind the tower. " * 12
SETTINGS = {"samples": 2, "tokens": 96, "metrics": "entropy,f_variance"}


def test_a_call_is_the_command_with_the_same_settings(tmp_path):
    from kvtool.cli.main import main

    document = kvtool.profile(**SETTINGS, heads=tmp_path / "own.heads.safetensors")
    flags = ["--samples", "2", "--tokens", "96", "--metrics", "entropy,f_variance"]
    path = tmp_path / "own.json"
    own = load_file(tmp_path / "own.heads.safetensors")
    assert main(["profile", *flags, "-o", str(path), "-q"]) == 0
    read, called = json.loads(path.read_text()), document.to_data()
    assert read.pop("heads_file")["path"] == called.pop("heads_file")["path"]
    assert read == called
    again = load_file(tmp_path / "own.heads.safetensors")
    assert own.keys() == again.keys() != set()
    assert all(torch.equal(own[name], again[name]) for name in own)


def test_given_texts_of_a_loaded_model_are_what_is_read():
    loaded = load()
    before = loaded.model.config._attn_implementation
    one = kvtool.profile(loaded.model, [TEXT], tokenizer=loaded.tokenizer, **SETTINGS)
    assert loaded.model.config._attn_implementation == before
    assert (one.data.source, one.data.samples, one.data.tokens) == ("texts", 2, 96)
    other = kvtool.profile(loaded, [TEXT.replace("falcon", "tiger")], **SETTINGS)
    assert other.data.fingerprint != one.data.fingerprint
    assert other.metrics.entropy != one.metrics.entropy
    with pytest.raises(UsageError, match="texts: none has 96 tokens, the longest has"):
        kvtool.profile(loaded, ["The old lamp"], **SETTINGS)


def test_memory_alone_needs_no_weights(monkeypatch):
    monkeypatch.setattr("kvtool.models.attached.load", lambda *a, **k: pytest.fail("loaded"))
    document = kvtool.profile(metrics=["memory"])
    assert document.metrics.memory is not None
    with pytest.raises(UsageError, match="no metric `nonsense`"):
        kvtool.profile(metrics="nonsense")
