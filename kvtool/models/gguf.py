"""Find GGUF files, llama.cpp's format for models, and read their heads without a library."""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.documents.files import check_downloaded, check_name, check_unicode, expand
from kvtool.errors import UsageError
from kvtool.extras import require
from kvtool.models.gguf_ends import LONGEST_WORD, TOKENS, WORDS

SUFFIX = ".gguf"
_REPOSITORY = re.compile(r"\w[\w.-]*(/[\w.-]+)?")  # an ID of the hub
_VERSIONS = (2, 3)
_TEXT, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_NUMBERS |= {12: "d"}
_SIZE = struct.Struct("<Q")  # of a text, before it
_PROJECTOR = b"general.architecture" + struct.pack("<IQ", _TEXT, 4) + b"clip"
_FLOATS = {0: "float32", 1: "float16", 30: "bfloat16"}
CHECKPOINT_HINT = "give the checkpoint that it was made from, a folder or hub ID with safetensors"


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file.

    Attributes:
        place: the folder that holds it, or the hub's ID of its repository.
        file: its name there.
        here: whether it is on this machine.
    """

    place: str
    file: str
    here: bool

    @property
    def path(self) -> Path:
        """Where it is on this machine."""
        return Path(self.place) / self.file


def find_gguf(model: str) -> GgufFile | None:
    """Return the GGUF file that a model's name is for: a file, a folder with one, `REPO:FILE`.

    Returns:
        None where it is for something else.

    Raises:
        UsageError: no such file, or a folder with several.
    """
    home = expand(model)
    check_name(home, "--model")
    if model.strip() and home.is_dir():
        return _only_one(model, home)
    if not model.lower().endswith(SUFFIX):
        return None
    if home.is_file():
        return GgufFile(str(home.parent), home.name, here=True)
    place, colon, file = model.rpartition(":")
    folder = expand(place)
    if colon and (folder / file).is_file():
        return GgufFile(str(folder), file, here=True)
    if colon and not folder.exists() and _REPOSITORY.fullmatch(place):
        return GgufFile(place, file, here=False)
    raise UsageError(
        f"GGUF file `{model}` does not exist", hint=f"of the hub: REPO:{Path(model).name}"
    )


def _only_one(name: str, folder: Path) -> GgufFile | None:
    """Return the GGUF file of a folder that holds no other weights."""
    names: list[str] = []
    with suppress(OSError):  # of a folder that may not be read, loading says more
        names = os.listdir(folder)
    files = sorted(each for each in names if each.lower().endswith(SUFFIX))
    if not files or any(each.startswith(("model.safetensors", "pytorch_model")) for each in names):
        return None
    alone = len(files) == 1
    files = [each for each in files if alone or not _is_projector(folder / each)] or files
    if len(files) > 1:
        raise UsageError(
            f"model folder `{name}` holds {len(files)} GGUF files", hint=f"-m {folder / files[0]}"
        )
    return GgufFile(str(folder), files[0], here=True)


def _is_projector(file: Path) -> bool:
    """Return whether a file makes images into embeddings for the model beside it."""
    with suppress(OSError), file.open("rb") as data:
        return file.name.lower().startswith("mmproj") or _PROJECTOR in data.read(4096)
    return False


def check_gguf(name: str, gguf: GgufFile) -> None:
    """Refuse, without importing torch, a file that cannot be read here.

    Of a file on the hub nothing is known before it is here.

    Raises:
        UsageError: a package is missing, or the file is none that holds a model.
    """
    check_unicode(gguf.file, "the GGUF file")
    require("gguf", needed_by=f"model `{name}`, a GGUF file,")
    if gguf.here:
        read_model_header(name, gguf)


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says of itself.

    Attributes:
        settings: by name; of an array, how many entries it has.
        tensors: the type of each tensor by name, as a number of ggml.
        words: the ids of the tokens that may end an answer, by text.
    """

    settings: Mapping[str, Any]
    tensors: Mapping[str, int]
    words: Mapping[str, int]

    def text(self, name: str) -> str | None:
        """Return a setting that is a text, None where there is none."""
        value = self.settings.get(name)
        return value if isinstance(value, str) else None

    @property
    def dtype(self) -> str:
        """The dtype to unpack the weights into: their own, or `bfloat16` where they are packed."""
        kinds = set(self.tensors.values())
        if not kinds <= set(_FLOATS):
            return "bfloat16"
        halves = kinds - {0}  # norms are float32 in files of 16 bits, too
        return _FLOATS[max(halves, default=0)]

    @property
    def scales_rotations(self) -> bool:
        """Whether RoPE rotates keys by other angles than its base alone gives."""
        kind = self.text(f"{self.text('general.architecture')}.rope.scaling.type")
        named = any(name.startswith(("rope_freqs", "rope_factors")) for name in self.tensors)
        return named or kind not in (None, "none")


def read_header(path: Path, name: str) -> GgufHeader:
    """Read the head of a file.

    Raises:
        UsageError: no GGUF file, or not a whole one.
        OSError: it cannot be read.
    """
    check_downloaded(path)
    with path.open("rb") as file:
        start = file.read(8)
        if start[:4] != b"GGUF":
            raise UsageError(f"`{name}` is no GGUF file")
        version = int.from_bytes(start[4:], "little")
        if len(start) == 8 and version not in _VERSIONS:
            raise UsageError(f"`{name}` is a GGUF file of version {version}, kvtool reads 2 and 3")
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(data).header()
        except (struct.error, KeyError, ValueError):
            raise UsageError(f"`{name}` is not a whole GGUF file") from None


class _Reader:
    """Walks over the head of a file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.place = 8
        self.known: dict[str, int] = {}  # where the last list of texts has those in `WORDS`

    def header(self) -> GgufHeader:
        """Read settings, then the list of tensors; the last of these has to begin in the file."""
        found, kinds, words, last = {}, {}, dict[str, int](), 0
        tensors, settings = self.numbers("QQ")
        for _ in range(settings):
            name = self.text()
            found[name] = self.value(*self.numbers("I"))
            words = self.known if name == TOKENS else words
        for _ in range(tensors):
            name = self.text()
            (axes,) = self.numbers("I")
            self.skip(8 * axes)
            kinds[name], offset = self.numbers("IQ")
            last = max(last, offset)
        self.skip(last)
        return GgufHeader(found, kinds, words)

    def value(self, kind: int) -> Any:
        """Read a setting; of an array, how many entries it has."""
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self.numbers(_NUMBERS[kind])[0]
        kind, count = self.numbers("IQ")
        if kind != _TEXT:
            self.skip(count * struct.calcsize(f"<{_NUMBERS[kind]}"))
            return count
        self.known = {}
        for index in range(count):
            (size,) = _SIZE.unpack_from(self.data, self.place)
            self.skip(8 + size)
            if (
                size <= LONGEST_WORD
                and (text := self.data[self.place - size : self.place]) in WORDS
            ):
                self.known[text.decode()] = index
        return count

    def text(self) -> str:
        start = self.place + 8
        self.skip(*self.numbers("Q"))
        return self.data[start : self.place].decode()

    def numbers(self, kinds: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{kinds}", self.data, self.place)
        self.place += struct.calcsize(f"<{kinds}")
        return values

    def skip(self, count: int) -> None:
        self.place += count
        if self.place > len(self.data):
            raise ValueError("the file ends within its head")


def read_model_header(name: str, gguf: GgufFile) -> GgufHeader:
    """Read the head of a file that holds a whole model."""
    try:
        header = read_header(gguf.path, name)
    except OSError as error:
        raise UsageError(f"cannot read `{gguf.path}`: {error.strerror or error}") from None
    if header.settings.get("split.count", 1) not in (0, 1):
        raise UsageError(
            f"`{name}` is one of {header.settings['split.count']} parts of a model",
            hint="join them: llama-gguf-split --merge",
        )
    kind = header.text("general.type") or "model"
    kind = "a projector of images" if header.text("general.architecture") == "clip" else kind
    if kind != "model" or header.text("general.architecture") is None:
        what = "names no architecture" if kind == "model" else f"holds no model, but: {kind}"
        raise UsageError(f"`{name}` {what}", hint="give the GGUF file of the whole model")
    return header
