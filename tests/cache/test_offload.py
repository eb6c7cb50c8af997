"""What is set aside in host memory comes back as it went in."""

import copy
import errno
import os
import tempfile

import pytest
import torch

from kvtool.cache.features.host import Store, pack, unpack
from kvtool.errors import KvtoolError


def tokens(first, count, batch=2):
    """Keys and values that encode their row, head and position."""
    positions = torch.arange(first, first + count, dtype=torch.int32)
    row, head = torch.arange(batch)[:, None, None], torch.arange(3)[None, :, None]
    number = (row * 100_000 + head * 10_000 + positions).float()
    keys = number[..., None].expand(-1, -1, -1, 4).contiguous()
    return keys, keys[..., :2] + 0.5, positions.expand(batch, 3, -1).contiguous()


def read(store, row, head):
    fetched = store.fetch([(row, head)], torch.device("cpu"))
    keys, values, _ = zip(*(piece.wait(torch.float32) for piece in fetched), strict=True)
    return torch.cat(keys, 2)[0, 0, :, 0], torch.cat(values, 2)[0, 0, :, 0]


def filled(form="exact"):
    store = Store(form)
    store.append(iter([tokens(0, 70), tokens(70, 30)]), 100, True)
    for position in range(100, 170):
        store.stage(tokens(position, 1), True)
    return store


@pytest.mark.parametrize("form", ["exact", "file"])
def test_tokens_come_back_head_by_head(form):
    store = filled(form)
    assert store.tokens == 170
    for row in range(2):
        for head in range(3):
            keys, values = read(store, row, head)
            expected = row * 100_000 + head * 10_000 + torch.arange(170).float()
            assert torch.equal(keys, expected)
            assert torch.equal(values, expected + 0.5)


def test_neighbouring_heads_come_at_once():
    store = filled()
    fetched = list(store.fetch([(0, 0), (0, 1), (1, 2)], torch.device("cpu")))
    assert [(chunk.entry, chunk.heads) for chunk in fetched[1:3]] == [
        (0, slice(0, 2)),
        (1, slice(2, 3)),
    ]
    assert [chunk.tensors[0].shape[1:3] for chunk in fetched] == [
        (2, 164),
        (2, 6),
        (1, 164),
        (1, 6),
    ]
    own = fetched[0].tensors[0], store.segments[0].tensors[0]
    assert own[0].data_ptr() == own[1].data_ptr()  # not copied


def test_parts_of_a_long_segment_lie_side_by_side():
    store = Store("exact")
    store.append(iter([tokens(0, 9000)]), 9000, True)
    fetched = list(store.fetch([(1, 0), (1, 1)], torch.device("cpu")))
    assert [chunk.tensors[0].shape[1:3] for chunk in fetched] == [(1, 8192), (1, 808)] * 2
    assert all(tensor.is_contiguous() for chunk in fetched for tensor in chunk.tensors)


def test_few_tokens_wait_on_the_device_for_more():
    store = filled()
    assert store.staged == 6
    per_token = 2 * 3 * ((4 + 2) * 4 + 4)
    assert store.host_bytes == 164 * per_token
    assert store.device_bytes == 16 * per_token


def test_shelves_stay_few():
    store = Store("exact")
    for first in range(0, 4000, 16):
        store.append(iter([tokens(first, 16)]), 16, True)
    assert len(store.segments) <= 4
    assert torch.equal(read(store, 0, 0)[0], torch.arange(4000).float())


@pytest.mark.parametrize(("form", "bytes_of_pair"), [("bf16", 12), ("int8", 6 + 8)])
def test_smaller_forms(form, bytes_of_pair):
    store = filled(form)
    assert store.host_bytes == 164 * 2 * 3 * (bytes_of_pair + 4)
    tensor = torch.randn(2, 3, 50, 16, generator=torch.Generator().manual_seed(0))
    back = unpack(list(pack(tensor, form)), torch.float32)
    step = 2**-8 if form == "bf16" else 1 / 254  # half a step of the largest number of a token
    assert (back - tensor).abs().max() <= tensor.abs().amax() * step * 1.01
    zero = unpack(list(pack(torch.zeros(1, 1, 1, 4), form)), torch.float32)
    assert zero.tolist() == [[[[0.0] * 4]]]


def test_missing_tokens_are_told():
    store = Store("exact")
    keys, values, positions = tokens(0, 5)
    positions[1, 2, 3:] = -1
    store.append(iter([(keys, values, positions)]), 5, False)
    pieces = list(store.fetch([(0, 0), (1, 2)], torch.device("cpu")))
    assert pieces[0].wait(torch.float32)[2][0].tolist() == [[True] * 5]
    assert pieces[1].wait(torch.float32)[2][0].tolist() == [[True] * 3 + [False] * 2]


def test_rows_follow_the_batch_without_moving_shelves():
    store = filled()
    before = store.segments[0].tensors[0].data_ptr()
    store.map_entries(lambda t: t[torch.tensor([1, 1, 0])], 2)
    store.map_entries(lambda t: t.repeat_interleave(2, 0), 3)
    store.stage(tokens(170, 1, batch=6), True)
    assert store.segments[0].tensors[0].data_ptr() == before
    for row, own in enumerate([1, 1, 1, 1, 0, 0]):
        keys, _ = read(store, row, 2)
        assert torch.equal(keys[:-1], own * 100_000 + 20_000 + torch.arange(170).float())
        assert keys[-1] == row * 100_000 + 20_170
    for position in range(171, 300):
        store.stage(tokens(position, 1, batch=6), True)
    keys, _ = read(store, 5, 0)
    assert torch.equal(keys[:170], torch.arange(170).float())
    assert torch.equal(keys[170:], 500_000 + torch.arange(170, 300).float())


def test_copies_share_shelves_and_go_their_own_way():
    store = filled()
    other = copy.deepcopy(store)
    assert other.segments[0] is store.segments[0]
    other.stage(tokens(170, 1), True)
    assert (store.tokens, other.tokens) == (170, 171)
    assert torch.equal(read(store, 1, 1)[0], 110_000 + torch.arange(170).float())


@pytest.mark.parametrize("form", ["exact", "int8", "file"])
def test_files(form):
    store = filled(form)
    store.map_entries(lambda t: t[torch.tensor([1, 0])], 2)
    again = Store(form)
    again.load(store.tensors(), torch.device("cpu"))
    assert (again.tokens, again.staged) == (store.tokens, store.staged)
    for a, b in zip(read(store, 0, 2), read(again, 0, 2), strict=True):
        assert torch.equal(a, b)


def test_a_disk_without_space_is_told_before_its_mapping_is_written_to(monkeypatch):
    """Beyond what a sparse file was given, a full disk ends the process (SIGBUS)."""
    asked = []

    def refuse(file, start, size):
        asked.append(size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse, raising=False)
    with pytest.raises(KvtoolError, match=r"cannot set aside .* No space left on device") as caught:
        filled("file")
    assert asked == [2 * 3 * 100 * 4 * 4]  # keys of all tokens, joined
    assert "store=int8" in caught.value.hint


def test_a_folder_that_takes_no_files_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(KvtoolError, match=r"cannot set aside .* No such file or directory"):
        filled("file")
