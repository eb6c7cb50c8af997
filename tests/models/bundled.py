"""The bundled model as it ships, and the smaller one before it, which tests of machinery run on.

The small one has half the layers and answers as well where nothing but needles is asked; files that
older versions wrote were written by it. Tests of what a reader sees take the one that ships.
"""

from pathlib import Path

from kvtool.models import reference

FIRST = Path(__file__).parent / "first"
shipped = reference.path  # before `put_in_place`


def _path(name: str = "reference") -> Path:
    return FIRST if name == "reference" else shipped(name)


def put_in_place() -> None:
    """Let `reference` be the small model in this process, whoever asks for its folder."""
    reference.path = _path
