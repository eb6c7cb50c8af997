"""Files that lie beside the code: the bundled model, prompts, the page's template."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from kvtool.errors import KvtoolError

_PACKAGE = Path(__file__).parent
_CODE = (".py", ".yaml", ".json")


def data_file(name: str) -> Path:
    """Return a file or folder by its path inside the package.

    Raises:
        KvtoolError: it is not there: an installation without the package's data.
    """
    path = _PACKAGE / name
    if not path.exists():
        raise KvtoolError(
            f"kvtool was installed without its file `{name}`",
            hint="pip install --force-reinstall --no-deps kvtool",
        )
    return path


@lru_cache(maxsize=1)
def package_hash() -> str:
    """Return the sha256 of the package's code and of the data that it reads, bar its model."""
    digest = hashlib.sha256()
    for path in sorted(path for path in _PACKAGE.rglob("*") if path.suffix in _CODE):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(_PACKAGE).as_posix()} {len(data)}\n".encode() + data)
    return digest.hexdigest()
