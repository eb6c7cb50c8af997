"""The file of numbers per head beside a profile: sealed by a checksum, which is compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from kvtool.cache.tensor_files.tensor_file import DamagedFile, TensorFile, digest_of
from kvtool.documents.files import expand
from kvtool.errors import UsageError

_SEAL = "sha256"


def heads_metadata(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return what such a file says of itself, its checksum included."""
    metadata = {"kind": "kvtool.heads", "schema_version": "1"}
    return metadata | {_SEAL: digest_of(tensors, metadata)}


def read_heads(path: str, names: Sequence[str], *, policy: str, what: str) -> dict[str, Tensor]:
    """Read some numbers from such a file; one that kvtool has not written may have no checksum.

    Args:
        names: of the tensors; the first is the metric that measures them.
        policy, what: who needs them, and what they are, in the words of an error.

    Raises:
        UsageError: no such file, one without them, or one that was changed since it was sealed.
    """
    if not expand(path).is_file():
        raise UsageError(f"{policy}: no file of {what} at `{path}`")
    try:
        with expand(path).open("rb", buffering=0) as raw:
            file = TensorFile(raw)
            metadata = dict(file.metadata)
            seal = metadata.pop(_SEAL, None)
            found = {name: file.read(name) for name in (names if seal is None else file.names)}
            wanted = {name: found[name] for name in names}
    except (DamagedFile, OSError, KeyError) as error:
        raise UsageError(
            f"`{path}` holds no `{names[0]}`",
            hint=f"written by kvtool profile --metrics {names[0]} -o profile.yaml, beside it",
        ) from error
    if seal is not None and seal != digest_of(found, metadata):
        raise UsageError(f"`{path}` was changed after it was written: its checksum does not match")
    return wanted
