"""The script that gets novels reads a stand-in package, and the real one where it can be had."""

import gzip
import importlib.util
import io
import json
import subprocess
import sys
import tarfile
import zlib
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "recipes" / "texts.py"
LONG = "It was late, and nobody came. " * 150
NOVELS = {
    "one": ["ONE", "", "CHAPTER I", "", LONG.strip(), "went on.", "", "CHAPTER II", "", "Short."],
    "two": ["TWO", "", "Chapter 1", "", LONG.strip(), "", "", "Chapter 2", "", LONG.strip()],
}


@pytest.fixture
def texts(monkeypatch):
    """The script as a module, which reads JSON in place of what R serialises."""
    spec = importlib.util.spec_from_file_location("texts", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "read_r", json.loads)
    sums = {name: module.checksum(lines) for name, lines in NOVELS.items()}
    monkeypatch.setattr(module, "NOVELS", sums)
    return module


def package(novels, name="data.tar.xz"):
    """A package of Debian with the data of R's: an `ar` archive with a tar archive in it."""
    data, places = b"", {}
    for title, lines in novels.items():
        plain = json.dumps(lines).encode()
        chunk = len(plain).to_bytes(4, "big") + zlib.compress(plain)
        places[title] = [len(data), len(chunk)]
        data += chunk
    index = gzip.compress(json.dumps({"variables": places}).encode())
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:xz") as tar:
        for ending, content in (("rdx", index), ("rdb", data)):
            path = "./usr/lib/R/site-library/janeaustenr/data/Rdata."
            info = tarfile.TarInfo(path + ending)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    members = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", name: file.getvalue()}
    made = b"!<arch>\n"
    for title, content in members.items():
        made += f"{title:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
        made += content + b"\n" * (len(content) % 2)
    return made


def test_novels_are_read_and_written(texts, tmp_path, capsys):
    (tmp_path / "austen.deb").write_bytes(package(NOVELS))
    folder = tmp_path / "out"
    assert texts.main(["austen", "--deb", str(tmp_path / "austen.deb"), "-o", str(folder)]) == 0
    assert capsys.readouterr() == (
        "",
        f"wrote 2 novels, austen.txt, novels.jsonl and chapters.jsonl to {folder}\n",
    )
    one = f"ONE\n\nCHAPTER I\n\n{LONG.strip()} went on.\n\nCHAPTER II\n\nShort.\n"
    assert (folder / "one.txt").read_text() == one
    assert (folder / "austen.txt").read_text().startswith(one.rstrip() + "\n\nTWO\n")
    wholes = [json.loads(line) for line in (folder / "novels.jsonl").read_text().splitlines()]
    assert [row["book"] for row in wholes] == ["one", "two"]
    assert wholes[0]["text"] == one
    rows = [json.loads(line) for line in (folder / "chapters.jsonl").read_text().splitlines()]
    assert [row["book"] for row in rows] == ["one", "two", "two"]  # the first chapters first
    assert rows[0]["text"] == f"{LONG.strip()} went on."


def test_other_packages_are_refused(texts, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for content, told in [
        (None, "cannot read austen.deb: No such file"),
        (b"PK", "this is no package r-cran-janeaustenr that can be read: no archive of Debian"),
        (package({"one": NOVELS["one"]}), "the package has no `two`"),
        (package(NOVELS | {"two": ["Other."]}), "`two` in the package is another text"),
    ]:
        if content is not None:
            Path("austen.deb").write_bytes(content)
        assert texts.main(["austen", "--deb", "austen.deb"]) == 1
        assert capsys.readouterr().err.startswith(f"error: {told}")
        assert not Path("texts").exists()


@pytest.mark.slow
def test_the_real_package_holds_the_novels_of_the_checksums(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "austen", "-o", str(tmp_path)], capture_output=True, text=True
    )
    if done.returncode == 1 and ("apt-get" in done.stderr or "rdata" in done.stderr):
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    assert 3_900_000 < (tmp_path / "austen.txt").stat().st_size < 4_100_000
    rows = (tmp_path / "chapters.jsonl").read_text().splitlines()
    assert len(rows) == 268
    assert json.loads(rows[0])["text"].startswith("Emma Woodhouse, handsome, clever, and rich")
