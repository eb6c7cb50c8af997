"""Cache files: damaged in their bytes, and altered under a checksum that is made right."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from random import Random

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import kvtool
from kvtool.cache.tensor_files.tensor_file import digest_of
from kvtool.generation import compress, decode_step
from tests.fuzz.contract import Case
from tests.fuzz.mutate import mutate_bytes, mutate_data, odd_word
from tests.models_for_tests import peaky_model, random_ids

POLICIES = [
    *("full", "h2o", "roco+caote", "d2o", "h2o+d2o-alloc", "adakv(window=4)", "h2o+ada"),
    *("streaming(positions=cache)", "sirllm(sinks=2)", "streaming+cam", "pyramidkv(window=4)"),
    *("snapkv(window=4)+calidrop(store=int8)", "h2o+caote+calidrop", "quest", "sparq"),
    *("rocketkv(window=4)", "rocketkv-mt(window=4)", "duoattention", "h2o+d2o-merge"),
    "snapkv(window=4)+refit(queries=4)",
    *("h2o+int8", "full+fp8", "snapkv(window=4)+int4", "h2o+ada+int4(rotate=false)", "h2o+k8v4"),
]
_DTYPES = [
    torch.float32,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
    torch.bool,
]


def read_parts(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return metadata and tensors of a cache file."""
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
        return metadata, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def write_sealed(path: Path, metadata: dict[str, str], tensors: dict[str, Tensor]) -> None:
    """Write a cache file whose checksum is that of its content."""
    metadata = {name: value for name, value in metadata.items() if name != "sha256"}
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(tensors, path, metadata | {"sha256": digest_of(tensors, metadata)})


class _Caches:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "a.safetensors"
        self.model = kvtool.attach(peaky_model("llama", head_dim=32))
        self.files = []
        for i, policy in enumerate(POLICIES):
            budget = None if policy == "full" else "60%" if i % 3 else 16
            batch = 2 if i % 4 == 0 else 1
            ids = random_ids(40, batch=batch)
            mask = torch.ones_like(ids)
            mask[:1, : 9 * (batch - 1)] = 0
            cache = kvtool.build_cache(self.model, policy, budget)
            with torch.no_grad():
                compress(self.model, cache, ids, mask if batch > 1 else None)
                for token in (3, 4)[: i % 3]:
                    decode_step(self.model, cache, torch.full((batch,), token))
            cache.remember(
                torch.cat([ids, torch.tensor([[3, 4]])[:, : i % 3].expand(batch, -1)], 1)
            )
            kvtool.save_cache(cache, self.path, model=self.model)
            self.files.append(self.path.read_bytes())

    def _load(self) -> None:
        """Load the file and go on from it."""
        cache = kvtool.load_cache(self.path, self.model)
        with torch.no_grad():
            logits = decode_step(self.model, cache, torch.full((len(cache.tokens_seen()),), 5))
        if not logits.isfinite().all():
            raise AssertionError("a cache that makes logits that are not finite")
        cache.report()


class DamagedCaches(_Caches):
    name = "cache files, damaged"

    def case(self, random: Random) -> Case:
        data = random.choice(self.files)
        damaged = mutate_bytes(random, data)
        self.path.write_bytes(damaged)
        same = damaged == data
        return lambda: self._refused(same)

    def _refused(self, same: bool) -> None:
        self._load()
        assert same, "a damaged file has been loaded"


class SealedCaches(_Caches):
    name = "cache files, sealed"

    def case(self, random: Random) -> Case:
        self.path.write_bytes(random.choice(self.files))
        metadata, tensors = read_parts(self.path)
        for name in [name for name in sorted(tensors) if random.random() < 0.5]:
            tensors[name] = _other_content(random, name, tensors[name])
        for _ in range(random.choice([0, 0, 0, 0, 1, 1, 2])):
            if random.random() < 0.35:
                self._alter_metadata(random, metadata)
            else:
                self._alter_tensor(random, tensors)
        write_sealed(self.path, metadata, tensors)
        return self._load

    def _alter_metadata(self, random: Random, metadata: dict[str, str]) -> None:
        name = random.choice(sorted(metadata))
        kind = random.randrange(6)
        if kind == 0:
            metadata.pop(name)
        elif kind == 1:
            metadata[name] = odd_word(random).replace("\x00", "")
        elif kind == 2:
            metadata["policy"] = random.choice(POLICIES)
        elif kind == 3:
            metadata[random.choice(["tokens_seen", "seen"])] = str(random.randrange(-2, 100))
        elif kind == 4:
            metadata["budget"] = random.choice(["1", "0", "16", "30%", "1KiB", "x", "-1", ""])
        else:
            plans = [[], {}, {"kind": "plan"}, mutate_data(random, {"kind": "plan", "a": [1]})]
            metadata["plan"] = json.dumps(random.choice(plans))

    def _alter_tensor(self, random: Random, tensors: dict[str, Tensor]) -> None:
        if not tensors:
            return
        name = random.choice(sorted(tensors))
        tensor = tensors[name]
        generator = torch.Generator().manual_seed(random.randrange(2**31))
        kind = random.randrange(9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if kind == 0:
                del tensors[name]
            elif kind == 1:
                tensors[name] = tensor.to(random.choice(_DTYPES))
            elif kind == 2:
                tensors[name] = _reshaped(random, tensor)
            elif kind == 3:
                tensors[random.choice([f"{name}x", "layer.9.keys", "y"])] = tensor
            elif kind == 4:
                other = random.choice(sorted(tensors))
                tensors[name], tensors[other] = tensors[other], tensor
            elif kind == 5 and tensor.numel():
                new = tensor.clone()
                new.view(-1)[random.randrange(tensor.numel())] = _odd_number(random, tensor.dtype)
                tensors[name] = new
            elif kind == 6:
                tensors[name] = torch.full_like(tensor, _odd_number(random, tensor.dtype))
            elif kind == 7 and tensor.dim():
                order = torch.randperm(tensor.shape[-1], generator=generator)
                tensors[name] = tensor[..., order]
            else:
                tensors[name] = torch.zeros_like(tensor) - 1 if tensor.is_signed() else tensor


def _other_content(random: Random, name: str, tensor: Tensor) -> Tensor:
    """Return keys and values of the same kind: scaled, turned round or exchanged."""
    if name.rpartition(".")[2] not in ("keys", "values"):
        return tensor
    kind = random.randrange(4)
    if kind == 0:
        return tensor * random.choice([0.0, 0.5, -1.0, 3.0])
    return tensor.flip(3) if kind == 1 else tensor.roll(1, 1) if kind == 2 else tensor


def _reshaped(random: Random, tensor: Tensor) -> Tensor:
    axis = random.randrange(tensor.dim()) if tensor.dim() else 0
    kind = random.randrange(6)
    if kind == 0 or not tensor.dim():
        return tensor.flatten()
    if kind == 1:
        return tensor.narrow(axis, 0, max(0, tensor.shape[axis] - 1))
    if kind == 2:
        return torch.cat([tensor, tensor], axis)
    if kind == 3:
        return tensor.narrow(axis, 0, 0)
    if kind == 4:
        return tensor[None]
    return tensor.transpose(0, -1)


def _odd_number(random: Random, dtype: torch.dtype) -> float | int:
    if dtype == torch.bool:
        return random.choice([0, 1])
    if dtype.is_floating_point:
        return random.choice([float("nan"), float("inf"), -float("inf"), 0.0, -1.0, 6e4, 1e-7])
    limits = torch.iinfo(dtype)
    return random.choice(
        [limits.min, limits.max, 0, 1, 39, 40, 41, limits.max // 2, limits.max - 1]
    )


class MetadataAlone(_Caches):
    """What the command line reads of a cache before it loads the model."""

    name = "cache files, metadata"

    def case(self, random: Random) -> Case:
        self.path.write_bytes(random.choice(self.files))
        metadata, tensors = read_parts(self.path)
        if random.random() < 0.5:
            metadata["note"] = odd_word(random).replace("\x00", "")
        for _ in range(random.choice([0, 0, 0, 0, 1, 2])):
            name = random.choice(sorted(metadata))
            if random.random() < 0.3:
                metadata.pop(name)
            else:
                metadata[name] = odd_word(random).replace("\x00", "")
        save_file(tensors, self.path, metadata)
        return self._open

    def _open(self) -> None:
        from tests.fuzz.contract import command

        command("generate", "--cache", str(self.path), "--prompt", "x", "--dry-run")
