"""Get real texts that nobody has to pay for or agree to, for haystacks and perplexity.

    python recipes/texts.py austen [--deb FILE] [-o texts/austen]

austen: the six novels of Jane Austen, 4 MB of text (about a million tokens), from Debian's package
r-cran-janeaustenr (MIT; the texts are in the public domain). It is fetched by `apt-get download`,
or given with --deb; `pip install rdata` reads it. Every novel is held against its checksum. The
folder then has

    austen.txt      all novels, a paragraph a line: --data haystack=texts/austen/austen.txt
    chapters.jsonl  their chapters, the first of each novel first: --data ppl=..
    novels.jsonl    each novel as a whole: --data ppl=..
    emma.txt ..     each novel
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from kvtool.documents.files import write_text

PACKAGE = "r-cran-janeaustenr"
NOVELS = {  # the name of each in the package, and the SHA-256 of its lines
    "emma": "dd08b340a56ad4a0a00718d5682528a5a5886ae0aef91c9e0fa528074fa64b75",
    "mansfieldpark": "e0e9ef3863ea77f51f6070062ee0dd50ad9b933223880617629e4e4963ea40ff",
    "northangerabbey": "8618a5acf5be50cc6e9b7680c7469fb6012649ab08c709dfc63c6367989fd31d",
    "persuasion": "726513a6c18bb678427bcbcf7c72d0d20816a67c25b0471b26ddcabf3ebac140",
    "prideprejudice": "2e44edaa4946d64ad541c68e0224f5d672f43bf3ce2a8a0b0637ad5e02fc6eb3",
    "sensesensibility": "0996d90842bbe8093f3b8142c1e77d1b20cff52d1d0615f3ed67733653e74e26",
}
_DATA = "./usr/lib/R/site-library/janeaustenr/data/Rdata."
_CHAPTER = re.compile(r"^(CHAPTER|Chapter) [IVXLC\d]+\.?$")
_SHORTEST = 4000  # letters of a chapter


class TextsError(Exception):
    """Why there are no texts, in one line."""


def austen(deb: Path | None) -> dict[str, list[str]]:
    """Return the lines of each novel.

    Args:
        deb: the package; None: it is downloaded.

    Raises:
        TextsError: no package, no `rdata`, other texts than expected.
    """
    if deb is not None:
        return read_novels(_read(deb))
    with tempfile.TemporaryDirectory() as folder:
        return read_novels(_read(download(PACKAGE, Path(folder))))


def download(package: str, folder: Path) -> Path:
    """Download a package of Debian into a folder.

    Raises:
        TextsError: there is no apt-get, or it fails.
    """
    instead = f"give a downloaded {package}_*.deb with --deb"
    if shutil.which("apt-get") is None:
        raise TextsError(f"no apt-get on this system; {instead}")
    done = subprocess.run(
        ["apt-get", "download", package], cwd=folder, capture_output=True, text=True
    )
    found = sorted(folder.glob("*.deb"))
    if done.returncode != 0 or not found:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise TextsError(f"apt-get download {package} failed ({said[-1]}); {instead}")
    return found[0]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TextsError(f"cannot read {path}: {error.strerror}") from None


def read_novels(deb: bytes, checksums: dict[str, str] | None = None) -> dict[str, list[str]]:
    """Return the lines of each novel in a package.

    Args:
        checksums: the SHA-256 of each; None: of the real ones.

    Raises:
        TextsError: it is no such package, or holds other texts.
    """
    checksums = NOVELS if checksums is None else checksums
    try:
        found = dict(_objects(deb))
    except (KeyError, ValueError, OSError, tarfile.TarError, zlib.error, EOFError) as error:
        raise TextsError(f"this is no package {PACKAGE} that can be read: {error}") from None
    for name, expected in checksums.items():
        if name not in found:
            raise TextsError(f"the package has no `{name}`")
        if checksum(found[name]) != expected:
            raise TextsError(f"`{name}` in the package is another text than the one expected")
    return {name: found[name] for name in checksums}


def checksum(lines: Sequence[str]) -> str:
    """Return the SHA-256 of lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _objects(deb: bytes) -> Iterator[tuple[str, list[str]]]:
    """Yield the vectors of texts in a package's lazy data.

    The index names for each a place and a length in the data: four bytes of its plain length, and a
    compressed serialised vector.
    """
    with tarfile.open(fileobj=io.BytesIO(_member(deb, "data.tar"))) as tar:
        index, data = (_file(tar, _DATA + ending) for ending in ("rdx", "rdb"))
    for name, (start, length) in read_r(gzip.decompress(index))["variables"].items():
        chunk = data[start : start + length]
        yield str(name), [str(line) for line in read_r(zlib.decompress(chunk[4:]))]


def _member(archive: bytes, name: str) -> bytes:
    """Return the first file of an `ar` archive whose name begins so."""
    if not archive.startswith(b"!<arch>\n"):
        raise ValueError("no archive of Debian")
    at = 8
    while at + 60 <= len(archive):
        head, size = archive[at : at + 60], int(archive[at + 48 : at + 58])
        if head.startswith(name.encode()):
            return archive[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    raise KeyError(f"no {name}")


def _file(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    if file is None:
        raise KeyError(f"{name} is no file")
    return file.read()


def read_r(data: bytes) -> Any:
    """Read a serialised value of R: a dictionary for a named list, else an array.

    Raises:
        TextsError: `rdata` is not installed.
    """
    try:
        parser, conversion = (import_module(f"rdata.{name}") for name in ("parser", "conversion"))
    except ImportError:
        raise TextsError("reading the package needs rdata: pip install rdata") from None
    return conversion.convert(parser.parse_data(data, extension=".rds"))


def paragraphs(lines: Sequence[str]) -> list[str]:
    """Join the lines of each paragraph.

    >>> paragraphs(["It was", "late.", "", "", "He left."])
    ['It was late.', 'He left.']
    """
    found: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            found[-1].append(line.strip())
        elif found[-1]:
            found.append([])
    return [" ".join(part) for part in found if part]


def chapters(text: Sequence[str]) -> list[str]:
    """Return the text of each chapter that is not short, without its heading."""
    found: list[list[str]] = []
    for paragraph in text:
        if _CHAPTER.match(paragraph):
            found.append([])
        elif found:
            found[-1].append(paragraph)
    joined = ["\n\n".join(part) for part in found]
    return [part for part in joined if len(part) >= _SHORTEST]


def write(novels: dict[str, list[str]], folder: Path) -> None:
    """Write novels, all of them together, and as rows, whole and by chapters in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {name: paragraphs(lines) for name, lines in novels.items()}
    novels = {name: "\n\n".join(text) + "\n" for name, text in texts.items()}
    for name, novel in novels.items():
        write_text(folder / f"{name}.txt", novel)
    write_text(folder / "austen.txt", "\n".join(novels.values()))
    wholes = [{"book": name, "text": novel} for name, novel in novels.items()]
    _write_rows(folder / "novels.jsonl", wholes)
    parts = {name: chapters(text) for name, text in texts.items()}
    rows = [
        {"book": name, "text": parts[name][number]}
        for number in range(max(map(len, parts.values())))
        for name in parts
        if number < len(parts[name])
    ]
    _write_rows(folder / "chapters.jsonl", rows)


def _write_rows(path: Path, rows: Sequence[dict[str, str]]) -> None:
    lines = (json.dumps(row, ensure_ascii=False) for row in rows)
    write_text(path, "".join(f"{line}\n" for line in lines))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", choices=["austen"])
    parser.add_argument("--deb", type=Path, metavar="FILE", help="the package, in place of apt-get")
    parser.add_argument("-o", "--output", type=Path, default=None, metavar="DIR")
    asked = parser.parse_args(arguments)
    folder = asked.output or Path("texts") / asked.text
    try:
        novels = austen(asked.deb)
    except TextsError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    write(novels, folder)
    files = "austen.txt, novels.jsonl and chapters.jsonl"
    sys.stderr.write(f"wrote {len(novels)} novels, {files} to {folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
