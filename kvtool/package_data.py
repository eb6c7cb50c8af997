"""Files that lie beside the code: the bundled model, prompts, the page's template."""

from __future__ import annotations

from pathlib import Path

from kvtool.errors import KvtoolError

_PACKAGE = Path(__file__).parent


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
