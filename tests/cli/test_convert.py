"""`kvtool convert`: what it writes, and what it refuses."""

import json
import os
from types import SimpleNamespace

import pytest
import torch

from kvtool.models.load import load, read_config
from kvtool.plain_config import PlainConfig
from kvtool.transformers_versions import reads_plain_configs
from tests.models import tiny_gguf

pytest.importorskip("gguf", reason="GGUF files need the package gguf")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", packed=True)


def test_a_folder_is_the_model_of_the_file(kvtool, written, tmp_path):
    done = kvtool("convert", str(written), "out", "--dtype", "float32", "--progress")
    assert (done.code, done.out) == (0, "")
    assert "GGUF tensors" in done.err
    assert done.err.endswith("wrote out; kvtool generate -m out reads it\n")
    file, folder = load(str(written)), load(str(tmp_path / "out"))
    assert file.config_hash == folder.config_hash
    weights = folder.model.state_dict()
    for name, weight in file.model.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    for text in ("the sea\n   12 7", "<|im_end|>the"):
        assert folder.tokenizer(text)["input_ids"] == file.tokenizer(text)["input_ids"]
    assert folder.tokenizer.chat_template == tiny_gguf.TEMPLATE
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config
    if reads_plain_configs():
        assert isinstance(read_config("out"), PlainConfig)


@pytest.mark.parametrize(("dtype", "stored"), [("auto", "bfloat16"), ("float16", "float16")])
def test_dtype(kvtool, written, tmp_path, dtype, stored):
    (tmp_path / "out").mkdir()  # an empty folder will do
    done = kvtool("convert", "-q", str(written), "out", "--dtype", dtype)
    assert (done.code, done.out, done.err) == (0, "", "")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == stored


REFUSED = {
    "nothing": ([], 2, "no file is given", "kvtool convert FILE.gguf FOLDER"),
    "not empty": (["FILE", "full"], 2, "`full` is no empty folder", "a new folder"),
    "a file": (["FILE", "note"], 2, "`note` is no empty folder", "a new folder"),
    "no parent": (["FILE", "gone/out"], 2, "gone` does not exist", "mkdir -p"),
    "no GGUF": (["reference", "out"], 2, "`reference` is no GGUF file", "FILE.gguf FOLDER"),
    "missing": (["gone.gguf", "out"], 2, "GGUF file `gone.gguf` does not exist", "REPO:"),
    "cut": (["cut.gguf", "out"], 1, "cannot read the configuration of model `cut.gguf`", ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(kvtool, written, tmp_path, name):
    arguments, code, message, hint = REFUSED[name]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    (tmp_path / "note").touch()
    (tmp_path / "cut.gguf").write_bytes(written.read_bytes()[:-8])
    files = sorted(os.listdir())
    done = kvtool("convert", "-q", *(str(written) if a == "FILE" else a for a in arguments))
    lines = done.err.splitlines()
    assert done.code == code, done.err
    assert message in lines[0]
    assert hint in lines[-1]
    assert len(lines) == 1 + bool(hint)
    assert sorted(os.listdir()) == files


def test_a_full_disk_leaves_nothing(kvtool, written, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    model = SimpleNamespace(save_pretrained=fail)
    monkeypatch.setattr(
        "kvtool.models.checkpoint.load_gguf_weights",
        lambda *_, **__: (model, {"mismatched_keys": [], "missing_keys": []}),
    )
    done = kvtool("convert", "-q", str(written), "out")
    assert done.code == 1
    assert "out`: No space left on device" in done.err
    assert os.listdir() == []
