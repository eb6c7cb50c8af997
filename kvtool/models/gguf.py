"""Find GGUF files, llama.cpp's format for models, and refuse those that cannot be read."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvtool.documents.files import check_name, check_unicode, expand
from kvtool.errors import UsageError
from kvtool.extras import require
from kvtool.models.gguf_header import GgufHeader, read_header

SUFFIX = ".gguf"
_REPOSITORY = re.compile(r"\w[\w.-]*(/[\w.-]+)?")  # an ID of the hub
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
    if len(files) > 1:
        raise UsageError(
            f"model folder `{name}` holds {len(files)} GGUF files", hint=f"-m {folder / files[0]}"
        )
    return GgufFile(str(folder), files[0], here=True)


def check_gguf(name: str, gguf: GgufFile) -> None:
    """Refuse, without importing torch, a file that cannot be read here.

    Of a file on the hub nothing is known before it is here.

    Args:
        name: of the model.

    Raises:
        UsageError: a package is missing, or the file is none that holds a model.
    """
    check_unicode(gguf.file, "the GGUF file")
    require("gguf", needed_by=f"model `{name}`, a GGUF file,")
    if gguf.here:
        read_model_header(name, gguf)


def read_model_header(name: str, gguf: GgufFile) -> GgufHeader:
    """Read the head of a file that holds a whole model.

    Raises:
        UsageError: it does not.
    """
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
    if kind != "model" or header.text("general.architecture") is None:
        what = "names no architecture" if kind == "model" else f"holds no model, but: {kind}"
        raise UsageError(f"`{name}` {what}", hint="give the GGUF file of the whole model")
    return header
