"""How many bytes of tensors are alive: what a call must give back."""

from __future__ import annotations

import gc

import torch


def live_bytes(device: torch.device) -> int:
    """Return the bytes that tensors hold: those asked for on a GPU, or of Python's on a CPU.

    What torch's allocator rounds up to depends on what was freed before.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()  # the first matrix product has made them
        return torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            if storage.device.type == device.type:  # and not a compiler's substitute
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
