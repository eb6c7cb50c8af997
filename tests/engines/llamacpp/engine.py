"""llama.cpp itself, by its C API: the library of one wheel, the declarations of another.

    pip download --no-deps xllamacpp llama-cpp-py-sync; unzip both into one folder

The folder is KVTOOL_LLAMACPP_WHEELS. Only `python -m tests.engines.llamacpp` needs it.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import torch

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}


def folder() -> Path:
    return Path(os.environ["KVTOOL_LLAMACPP_WHEELS"])


class Engine:
    """A model in llama.cpp, and one context of it."""

    ffi: Any = None
    lib: Any = None

    def __init__(
        self, model: Path, *, kind="f16", flash=True, context=2048, streams=1, threads=1
    ) -> None:
        self._open()
        lib, parameters = self.lib, self.lib.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(str(model).encode(), parameters)
        assert self.model != self.ffi.NULL, model
        settings = lib.llama_context_default_params()
        settings.n_ctx = context * streams
        settings.n_batch = settings.n_ubatch = 512
        settings.n_seq_max, settings.kv_unified = streams, streams == 1
        settings.n_threads = settings.n_threads_batch = threads
        settings.flash_attn_type = int(flash)
        settings.type_k = settings.type_v = TYPES[kind]
        self.context = lib.llama_init_from_model(self.model, settings)
        assert self.context != self.ffi.NULL
        self.vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)

    @classmethod
    def _open(cls) -> None:
        if cls.ffi is not None:
            return
        from cffi import FFI

        declared = folder() / "llama_cpp_py_sync" / "_cffi_bindings.py"
        [text] = [
            node.value.value
            for node in ast.parse(declared.read_text()).body
            if isinstance(node, ast.Assign) and node.targets[0].id == "_LLAMA_H_CDEF"
        ]
        cls.ffi = FFI()
        cls.ffi.cdef(text)
        cls.lib = cls.ffi.dlopen(str(folder() / "xllamacpp" / "xllamacpp.abi3.so"))
        cls.silent = cls.ffi.callback("ggml_log_callback", lambda *_: None)
        cls.lib.llama_log_set(cls.silent, cls.ffi.NULL)
        cls.lib.llama_backend_init()

    def read(self, ids: list[int], place: int = 0, size: int = 512) -> torch.Tensor:
        """Feed tokens to sequence 0 from a position on; return the logits of each."""
        lib, rows = self.lib, []
        for start in range(0, len(ids), size):
            part = ids[start : start + size]
            batch = lib.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i] = token, place + start + i
                batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
            assert lib.llama_decode(self.context, batch) == 0
            for i in range(len(part)):
                row = lib.llama_get_logits_ith(self.context, i)
                data = bytearray(self.ffi.buffer(row, 4 * self.vocabulary))
                rows.append(torch.frombuffer(data, dtype=torch.float32))
            lib.llama_batch_free(batch)
        return torch.stack(rows)

    def save(self, path: Path, ids: list[int]) -> int:
        return self.lib.llama_state_seq_save_file(
            self.context, str(path).encode(), 0, self.ffi.new("int32_t[]", ids), len(ids)
        )

    def restore(self, path: Path) -> list[int]:
        """Load a state into sequence 0; return its ids, none where llama.cpp refuses it."""
        ids, count = self.ffi.new("int32_t[]", 1 << 16), self.ffi.new("size_t *")
        name = str(path).encode()
        done = self.lib.llama_state_seq_load_file(self.context, name, 0, ids, 1 << 16, count)
        return list(ids[0 : count[0]]) if done else []
