"""The file of numbers per head beside a profile, under a checksum, and query centres in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvtool.cache.tensor_files.tensor_file import DamagedFile, TensorFile, digest_of
from kvtool.documents.files import expand
from kvtool.errors import UsageError
from kvtool.maths.pairs import pair_count
from kvtool.maths.rotation import Rotation
from kvtool.model_shape import LayerShape
from kvtool.policies.evidence import QueryCentres

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


CENTRES, LENGTHS = "query_centres", "query_lengths"
FREQUENCIES, LAYOUT = "query_frequencies", "query_layout"
NAMES = (CENTRES, LENGTHS, FREQUENCIES, LAYOUT)
_CLOSE = 1e-4  # relative difference of frequencies that dtypes explain


def rotation_numbers(rotation: Rotation | None, dim: int) -> tuple[Tensor, Tensor]:
    """Write down how a layer rotates.

    Returns:
        (1, pairs) float64 radians a position, 0 for pairs that it does not rotate. And (1, 2): how
        many pairs it rotates, and 1 where the numbers of a pair are neighbours, else 0.
    """
    frequencies, layout = torch.zeros(1, pair_count(dim)), [0.0, 0.0]
    if rotation is not None:
        own = rotation.frequencies.cpu()
        frequencies[0, : len(own)] = own
        layout = [len(own), rotation.interleaved]
    return frequencies.double(), torch.tensor([layout], dtype=torch.float64)


def read_centres(
    path: str,
    policy: str,
    shapes: Sequence[LayerShape | None],
    rotations: Mapping[int, Rotation | None],
) -> dict[int, QueryCentres]:
    """Read the centres of each layer whose budget is free.

    Args:
        policy: the name of the one that needs them.
        shapes: of all layers of the model.
        rotations: of its attention layers.

    Raises:
        UsageError: no such file, one that was changed, or one of another model.
    """
    found = read_heads(path, NAMES, policy=policy, what="query centres")
    free = [i for i, shape in enumerate(shapes) if shape is not None and shape.window is None]
    wrong = _wrong_sizes(found, len(shapes))
    for i in free:
        wrong = wrong or _wrong_layer(found, i, shapes[i], rotations[i])
    if wrong is not None:
        raise UsageError(
            f"`{path}` holds query centres of another model: {wrong}",
            hint=f"kvtool profile -m MODEL --metrics {CENTRES} -o profile.yaml",
        )
    return {i: QueryCentres(found[CENTRES][i].float(), found[LENGTHS][i].float()) for i in free}


def _wrong_sizes(found: Mapping[str, Tensor], layers: int) -> str | None:
    """Say what of the tensors as wholes does not fit, None if all does."""
    if any(tensor.dim() != 3 or not tensor.is_floating_point() for tensor in found.values()):
        return "its tensors have other axes"
    own = {len(tensor) for tensor in found.values()}
    return None if own == {layers} else f"{max(own)} layers, not {layers}"


def _wrong_layer(
    found: Mapping[str, Tensor], layer: int, shape: LayerShape | None, rotation: Rotation | None
) -> str | None:
    """Say what of a layer does not fit, None if all does."""
    assert shape is not None, "a layer that stores"
    own = {name: tensor[layer] for name, tensor in found.items()}
    if not all(tensor.isfinite().all() for tensor in own.values()):
        return f"none for layer {layer}"
    heads, dim = own[CENTRES].shape
    if (heads, dim) != (shape.heads, shape.key_dim):
        sizes = f"{heads} query heads of {dim} numbers"
        return f"layer {layer} has {sizes}, not {shape.heads} of {shape.key_dim}"
    frequencies, layout = rotation_numbers(rotation, dim)
    expected = {LENGTHS: (heads, pair_count(dim)), FREQUENCIES: frequencies.shape}
    expected[LAYOUT] = layout.shape
    if any(own[name].shape != size for name, size in expected.items()):
        return f"layer {layer} has other numbers of pairs"
    same = torch.equal(own[LAYOUT].double().round(), layout)
    if not same or not torch.allclose(own[FREQUENCIES].double(), frequencies, _CLOSE, 0):
        return f"layer {layer} rotates in another way"
    return None
