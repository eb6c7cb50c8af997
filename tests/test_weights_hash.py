"""One hash of all weights: any edit changes it, and where weights rest does not."""

import copy
import gc
import hashlib
import json
import os
from weakref import WeakKeyDictionary

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import kvtool.weights_hash
from kvtool.errors import KvtoolError
from kvtool.weights_hash import weights_hash
from tests.models_for_tests import peaky_model


def slow_hash(model):
    """The hash written from its description, one tensor after the other."""
    lines = []
    for name, tensor in model.state_dict().items():
        label = f"{tensor.dtype} {list(tensor.shape)}".encode()
        content = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        lines.append(f"{name} {hashlib.sha256(label + content).hexdigest()}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_hash_is_of_every_byte(dtype):
    model = peaky_model("llama").to(dtype)
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(
        model.model.layers[0].mlp.up_proj.weight.t().contiguous().t()
    )
    assert weights_hash(model) == slow_hash(model)


def edit_in_place(weight):
    with torch.no_grad():
        weight[-1, -3] += 1


def edit_data(weight):
    weight.data[-1, -3] += 1  # which leaves the version counter alone


def edit_numpy(weight):
    weight.detach().numpy()[-1, -3] += 1


def swap_rows(weight):
    weight.data.copy_(weight.data[torch.arange(len(weight)).roll(1)])


@pytest.mark.parametrize("edit", [edit_in_place, edit_data, edit_numpy, swap_rows])
def test_an_edit_is_noticed_after_the_hash_is_known(edit):
    model = peaky_model("llama")
    before = weights_hash(model)
    assert weights_hash(model) == before
    original = model.model.layers[1].self_attn.k_proj.weight.detach().clone()
    edit(model.model.layers[1].self_attn.k_proj.weight)
    assert weights_hash(model) != before
    assert weights_hash(model) == slow_hash(model)
    model.model.layers[1].self_attn.k_proj.weight.data.copy_(original)
    assert weights_hash(model) == before


def test_a_buffer_a_replaced_weight_and_a_dtype_count():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.arange(7.0))
            self.register_buffer("scale", torch.tensor(3.0))
            self.register_buffer("empty", torch.zeros(0, 4))
            self.register_buffer("one", torch.ones(2, 2).t()[:1, 1:])  # of a stride that is not 1
            self.register_buffer("turns", torch.tensor([1 + 2j]))
            self.register_buffer("scratch", torch.zeros(2), persistent=False)

    hashes = set()
    model = Odd()
    hashes.add(weights_hash(model))
    model.scratch += 1
    assert weights_hash(model) in hashes
    model.scale += 1
    hashes.add(weights_hash(model))
    model.weight = nn.Parameter(torch.arange(7.0) + 1)
    hashes.add(weights_hash(model))
    model.half()
    hashes.add(weights_hash(model))
    assert len(hashes) == 4


def test_unchanged_tensors_are_hashed_once(monkeypatch):
    model = peaky_model("llama")
    first = weights_hash(model)
    shadow, hashed = hashlib.sha256, []

    class Counting:
        def __init__(self, content=b""):
            self.own = shadow(content)

        def update(self, content):
            hashed.append(len(bytes(content)))
            self.own.update(content)

        def digest(self):
            return self.own.digest()

        def hexdigest(self):
            return self.own.hexdigest()

    monkeypatch.setattr(kvtool.weights_hash.hashlib, "sha256", Counting)
    assert weights_hash(model) == first
    assert max(hashed, default=0) < 512  # tails of the sums alone
    model.lm_head.weight.data += 1
    weights_hash(model)
    assert hashed.count(model.lm_head.weight.nbytes) == 1
    assert sum(size >= 512 for size in hashed) == 1


def test_what_is_known_goes_with_its_model(monkeypatch):
    """In a table of its own: models of other tests may go meanwhile."""
    monkeypatch.setattr(kvtool.weights_hash, "_KNOWN", WeakKeyDictionary())
    model = peaky_model("llama")
    weights_hash(model)
    assert len(kvtool.weights_hash._KNOWN) == 1
    del model
    gc.collect()
    assert not kvtool.weights_hash._KNOWN


def test_copies_compiled_and_threads_agree(monkeypatch):
    model = peaky_model("llama")
    expected = weights_hash(model)
    assert weights_hash(copy.deepcopy(model)) == expected
    assert weights_hash(torch.compile(model)) == expected
    monkeypatch.setattr(kvtool.weights_hash, "_ALONE", 0)
    assert weights_hash(copy.deepcopy(model)) == expected


def test_offloaded_weights_are_read_where_they_rest(tmp_path):
    whole = peaky_model("llama")
    whole.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu"}
    places |= {"model.norm": "disk", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    offloaded = type(whole).from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "weights"
    )
    assert any(weight.is_meta for weight in offloaded.parameters())
    assert weights_hash(offloaded) == weights_hash(whole)


@pytest.mark.filterwarnings("ignore")  # torch.ao.quantization is to move
def test_quantised_and_meta_models_have_a_hash():
    hashes = set()
    for bias in (0.0, 1.0):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        with torch.no_grad():
            plain[1].weight[3, 3] += bias
        model = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear})
        hashes |= {weights_hash(model), weights_hash(model), weights_hash(plain)}
    hashes.add(weights_hash(nn.Linear(8, 8, device="meta")))
    hashes.add(weights_hash(nn.Linear(8, 9, device="meta")))
    assert len(hashes) == 6


def checkpoint(folder, **change):
    folder.mkdir(exist_ok=True)
    save_file({"a": torch.zeros(3), "b": torch.ones(4)} | change, folder / "model.safetensors")
    return folder


def test_a_folder_is_hashed_by_its_weight_files(tmp_path):
    first = weights_hash(checkpoint(tmp_path / "a"))
    assert weights_hash(str(checkpoint(tmp_path / "b"))) == first
    (tmp_path / "b" / "training_args.bin").write_bytes(b"other")
    (tmp_path / "b" / "README.md").write_text("other")
    assert weights_hash(tmp_path / "b") == first
    assert weights_hash(checkpoint(tmp_path / "b", a=torch.ones(3))) != first


def test_a_known_file_that_changes_in_place_is_read_again(tmp_path):
    """Its size and inode stay, and the time of its change is set back."""
    path = checkpoint(tmp_path / "a") / "model.safetensors"
    old = 10**9
    os.utime(path, ns=(old, old))
    first = weights_hash(tmp_path / "a")
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    os.utime(path, ns=(old, old))
    assert weights_hash(tmp_path / "a") != first


def test_a_file_of_some_age_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(kvtool.weights_hash, "_RACY", 0)
    before = kvtool.weights_hash._hash_bytes.cache_info()
    hashes = {weights_hash(checkpoint(tmp_path / "a")), weights_hash(tmp_path / "a")}
    after = kvtool.weights_hash._hash_bytes.cache_info()
    assert (len(hashes), after.misses - before.misses, after.hits - before.hits) == (1, 1, 1)


def test_shards_are_those_of_the_index(tmp_path):
    for name in ("one", "two", "stray"):
        save_file({name: torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"one": "one.safetensors", "two": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    first = weights_hash(tmp_path)
    (tmp_path / "stray.safetensors").unlink()
    assert weights_hash(tmp_path) == first
    save_file({"two": torch.ones(2)}, tmp_path / "two.safetensors")
    assert weights_hash(tmp_path) != first
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(KvtoolError, match="cannot read the weights in"):
        weights_hash(tmp_path)


def test_folders_without_weights_are_refused(tmp_path):
    with pytest.raises(KvtoolError, match="holds no weight files"):
        weights_hash(tmp_path)
    with pytest.raises(KvtoolError, match=r"cannot read the weights in .*No such file"):
        weights_hash(tmp_path / "none")
