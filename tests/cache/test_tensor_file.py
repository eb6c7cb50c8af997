"""Safetensors files of our own writing: readable by the format's library, never mapped."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save, save_file

import kvtool
from kvtool.cache.tensor_files import tensor_file
from kvtool.cache.tensor_files.tensor_file import (
    _DTYPES,
    DamagedFile,
    TensorFile,
    digest_of_file,
    file_parts,
    write_tensors,
)
from kvtool.documents import files
from kvtool.documents.files import digest, write_text
from kvtool.errors import KvtoolError

TENSORS = {
    **{name: torch.arange(1, 7).view(2, 3).to(dtype) for name, dtype in _DTYPES.items()},
    "no dimension": torch.tensor(3.5, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 4),
    "empty inside": torch.zeros(3, 0, 2, dtype=torch.int8),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "strided": torch.arange(20, dtype=torch.int16)[1::3],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "negated": torch.tensor([1 + 2j]).conj().imag,
    "conjugate": torch.tensor([1 + 2j, 3j]).conj(),
    "a weight": torch.nn.Parameter(torch.ones(2)),
    "NaN": torch.tensor([float("nan"), float("-inf"), -0.0]),
    "Größe \U0001f600 \"'\\\n": torch.ones(1),
}
LABELS = {"kind": "x", "naïve \U0001f600": 'a "text"\\ of\n\t\x00 lines', "empty": ""}


def as_bytes(tensor):
    plain = (
        tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    )
    return plain.dtype, plain.shape, plain.flatten().view(torch.uint8).tolist()


def test_every_kind_of_tensor_is_read_by_the_formats_library_and_by_us(tmp_path):
    path = tmp_path / "a.safetensors"
    write_tensors(path, TENSORS, LABELS)
    assert os.listdir(tmp_path) == ["a.safetensors"]
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == LABELS
        assert set(file.keys()) == TENSORS.keys()
        theirs = {name: file.get_tensor(name) for name in TENSORS}
    with path.open("rb", buffering=0) as raw:
        own = TensorFile(raw)
        assert own.metadata == LABELS
        ours = {name: own.read(name) for name in own.names}
    for name, tensor in TENSORS.items():
        assert as_bytes(theirs[name]) == as_bytes(ours[name]) == as_bytes(tensor), name
    assert digest_of_file(TENSORS, LABELS) == digest(path)


def test_a_file_of_the_formats_library_is_read(tmp_path):
    tensors = {f"{i}": torch.randn(i, 3).to(d) for i, d in enumerate(_DTYPES.values())}
    save_file(tensors, tmp_path / "a")
    with (tmp_path / "a").open("rb", buffering=0) as raw:
        file = TensorFile(raw)
        assert file.metadata == {}
        for name, tensor in tensors.items():
            assert as_bytes(file.read(name)) == as_bytes(tensor)


def test_tensors_of_one_dtype_are_written_byte_for_byte_as_the_library_does():
    tensors = {"b": torch.randn(3), "a": torch.randn(2, 2), "ä": torch.zeros(0)}
    for labels in ({}, {"a": "é\n\0"}):
        assert b"".join(file_parts(tensors, labels)) == save(tensors, labels or None)


def with_header(header, rest):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest


def entry(**change):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | change


DAMAGED = {
    "nothing": b"",
    "a short length": b"\1\0",
    "a length beyond the file": (1 << 40).to_bytes(8, "little") + b"{}",
    "no JSON": with_header(b"{,", b""),
    "no UTF-8": with_header(b'{"\xff":1}', b""),
    "a list": with_header([], b""),
    "deep": with_header(b"[" * 200_000, b""),
    "twice": with_header(b'{"a":{"dtype":"U8"},"a":{"dtype":"U8"}}', b""),
    "metadata": with_header({"__metadata__": {"a": 1}}, b""),
    "an unknown dtype": with_header({"a": entry(dtype="F3")}, bytes(8)),
    "no dtype": with_header({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "dtype of a list": with_header({"a": entry(dtype=["F32"])}, bytes(8)),
    "a shape of another size": with_header({"a": entry(shape=[3])}, bytes(8)),
    "a negative shape": with_header({"a": entry(shape=[-2])}, bytes(8)),
    "a shape of truths": with_header({"a": entry(shape=[True, 2])}, bytes(8)),
    "a huge shape": with_header({"a": entry(shape=[1 << 62, 1 << 62])}, bytes(8)),
    "a fraction": with_header({"a": entry(data_offsets=[0, 8.0])}, bytes(8)),
    "three offsets": with_header({"a": entry(data_offsets=[0, 8, 8])}, bytes(8)),
    "backwards": with_header({"a": entry(data_offsets=[8, 0])}, bytes(8)),
    "a hole": with_header({"a": entry(data_offsets=[4, 12])}, bytes(12)),
    "overlapping": with_header({"a": entry(), "b": entry()}, bytes(8)),
    "too long": with_header({"a": entry()}, bytes(9)),
    "too short": with_header({"a": entry()}, bytes(7)),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused(case, tmp_path):
    (tmp_path / "a").write_bytes(DAMAGED[case])
    with (tmp_path / "a").open("rb", buffering=0) as raw, pytest.raises(DamagedFile):
        TensorFile(raw)
    with pytest.raises(KvtoolError, match="truncated or damaged"):
        kvtool.load_cache(tmp_path / "a", None)


def test_sizes_beside_a_zero_that_overflow_are_refused(tmp_path):
    header = {"a": entry(shape=[1 << 62, 1 << 62, 0], data_offsets=[0, 0])}
    (tmp_path / "a").write_bytes(with_header(header, b""))
    with (tmp_path / "a").open("rb", buffering=0) as raw, pytest.raises(DamagedFile):
        TensorFile(raw).read("a")


def test_a_file_cut_short_while_it_is_read_is_damaged_and_ends_nothing(tmp_path):
    path = tmp_path / "a"
    write_tensors(path, {"a": torch.zeros(1 << 16), "b": torch.ones(1 << 16)}, {})
    with path.open("rb", buffering=0) as raw:
        file = TensorFile(raw)
        first = file.read("a")
        os.truncate(path, 4096)
        with pytest.raises(DamagedFile, match="ends too early"):
            file.read("b")
    assert not first.any(), "which was read into memory of its own"


def draw(path):
    from kvtool.report.panels import new_figure
    from kvtool.report.panels import save as save_figure

    save_figure(new_figure(1, 1), path)


WRITERS = {
    "a.txt": lambda path: write_text(path, "text"),
    "a.safetensors": lambda path: write_tensors(path, {"a": torch.zeros(3)}, {}),
    "a.png": draw,
    "a.svg": draw,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_writer_fills_the_temporary_that_is_locked(name, tmp_path, monkeypatch):
    """One that puts another file in its place leaves the lock with a file that is gone."""
    locked, make = [], files._make_temporary

    def made(path, **options):
        handle, temporary = make(path, **options)
        locked.append(os.fstat(handle).st_ino)
        return handle, temporary

    monkeypatch.setattr(files, "_make_temporary", made)
    WRITERS[name](tmp_path / name)
    assert locked == [(tmp_path / name).stat().st_ino]


def test_many_writers_of_one_file_all_succeed(tmp_path):
    path = tmp_path / "a.safetensors"

    def write(number):
        for _ in range(25):
            write_tensors(path, {"a": torch.full((5000,), float(number))}, {"a": str(number)})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    with safe_open(path, framework="pt") as file:
        assert set(file.get_tensor("a").tolist()) == {float(file.metadata()["a"])}
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_a_full_disk_and_an_interrupt_in_the_middle_leave_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"a": torch.zeros(3)}, {})
    before, resource = path.read_bytes(), pytest.importorskip("resource")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
    try:
        with pytest.raises(KvtoolError, match=r"cannot write `.*a.safetensors`: File too large"):
            write_tensors(path, {"a": torch.zeros(1 << 19)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    parts = tensor_file.file_parts

    def interrupted(*given):
        yield next(parts(*given))
        raise KeyboardInterrupt

    monkeypatch.setattr(tensor_file, "file_parts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_tensors(path, {"a": torch.zeros(9)}, {})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_no_second_copy_of_all_tensors_is_made():
    """Parts are the tensors' own memory, one after the other."""
    tensors = {"a": torch.zeros(4), "b": torch.zeros(4)}
    parts = file_parts(tensors, {})
    next(parts)
    for tensor in tensors.values():
        part = next(parts)
        tensor += 1
        assert part.tobytes() == tensor.numpy().tobytes()
