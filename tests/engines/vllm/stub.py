"""What the connector imports of vLLM, and the few objects that it is given, without vLLM."""

from __future__ import annotations

import importlib
import logging
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import torch

CONNECTOR = "kvtool.engines.vllm.connector"


class Base:
    """As `KVConnectorBase_V1`."""

    def __init__(self, vllm_config, role, kv_cache_config):
        self._kv_transfer_config, self._metadata = vllm_config.kv_transfer_config, None

    def _get_connector_metadata(self):
        return self._metadata


class Logger(logging.Logger):
    def __init__(self, name):
        super().__init__(name)
        self.said = []

    def handle(self, record):
        self.said.append(record.getMessage())

    warning_once = logging.Logger.warning


def load(monkeypatch, rank=0, size=1):
    """Import the connector over a stub of vLLM, in a process of a tensor-parallel group."""
    roles = SimpleNamespace(SCHEDULER="scheduler", WORKER="worker")
    parts = {
        "distributed.kv_transfer.kv_connector.v1.base": {
            "KVConnectorBase_V1": Base,
            "KVConnectorMetadata": type("KVConnectorMetadata", (), {}),
            "KVConnectorRole": roles,
        },
        "distributed.parallel_state": {
            "get_tensor_model_parallel_rank": lambda: rank,
            "get_tensor_model_parallel_world_size": lambda: size,
        },
        "logger": {"init_logger": Logger},
        "model_executor.models.utils": {"extract_layer_index": extract_layer_index},
    }
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    for name, members in parts.items():
        names = name.split(".")
        for end in range(1, len(names) + 1):
            whole = f"vllm.{'.'.join(names[:end])}"
            if whole not in sys.modules:
                monkeypatch.setitem(sys.modules, whole, ModuleType(whole))
        vars(sys.modules[f"vllm.{name}"]).update(members)
    monkeypatch.delitem(sys.modules, CONNECTOR, raising=False)
    module = importlib.import_module(CONNECTOR)
    monkeypatch.delitem(sys.modules, CONNECTOR)
    return module


def extract_layer_index(name):
    [index] = [int(part) for part in name.split(".") if part.isdecimal()]
    return index


def config(model_config, folder, block=32, **changes):
    """As `VllmConfig`."""
    extra = {} if folder is None else {"folder": str(folder)}
    transfer = SimpleNamespace(
        get_from_extra_config=extra.get,
        kv_load_failure_policy=changes.get("failure", "fail"),
    )
    parallel = SimpleNamespace(
        decode_context_parallel_size=changes.get("context", 1), prefill_context_parallel_size=1
    )
    model = SimpleNamespace(
        hf_text_config=model_config,
        get_vocab_size=lambda: model_config.vocab_size,
        dtype=torch.float32,
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=parallel,
        model_config=model,
        cache_config=SimpleNamespace(block_size=block),
    )


class Request:
    """As vLLM's `Request`, as far as the connector looks at it."""

    def __init__(self, name, ids, *, params=None, lora=None, pooling=False, **sampling):
        self.request_id, self.prompt_token_ids = name, ids
        self.kv_transfer_params, self.lora_request = params, lora
        sampling = {"prompt_logprobs": None, "repetition_penalty": 1.0} | sampling
        self.sampling_params = None if pooling else SimpleNamespace(**sampling)
        self.skip_reading_prefix_cache = sampling["prompt_logprobs"] is not None
        self.cache_salt, self.block_hashes = None, []
        self.update_block_hashes()

    @property
    def num_tokens(self):
        return len(self.prompt_token_ids)

    def update_block_hashes(self):
        self.block_hashes.append((self.cache_salt, tuple(self.prompt_token_ids)))


@dataclass
class Layer:
    """As an attention layer of an engine, whose pages are (slots, kv_heads, head_dim)."""

    num_kv_heads: int
    head_size: int
    slots: int
    kv_cache: torch.Tensor = None
    impl: SimpleNamespace = field(init=False)

    def __post_init__(self):
        self.kv_cache = torch.zeros(2, self.slots, self.num_kv_heads, self.head_size)
        self.impl = SimpleNamespace(do_kv_cache_update=self._write)

    def _write(self, layer, keys, values, pages, places):
        assert layer is self
        pages[0, places], pages[1, places] = keys, values


class Engine:
    """A scheduler and a worker over one connector module, which run one step at a time."""

    def __init__(self, module, settings, layers, blocks=40, groups=1):
        pages = SimpleNamespace(kv_cache_groups=[None] * groups)
        roles = module.KVConnectorRole
        self.scheduler = module.KvtoolConnector(settings, roles.SCHEDULER, pages)
        self.worker = module.KvtoolConnector(settings, roles.WORKER, pages)
        self.block, self.layers, self.said = (
            settings.cache_config.block_size,
            layers,
            module.logger.said,
        )
        self.free = list(range(blocks))[::-1]
        self.blocks = {}

    def step(self, *requests, computed=0):
        """Begin requests together; return for each how many tokens come from elsewhere, and the
        failed blocks."""
        claimed = []
        for request in requests:
            self.scheduler.on_new_request(request)
            tokens, later = self.scheduler.get_num_new_matched_tokens(request, computed)
            assert later is False
            assert tokens == 0 or not request.skip_reading_prefix_cache
            assert tokens + computed < request.num_tokens
            own = [self.free.pop() for _ in range(-(-request.num_tokens // self.block))]
            self.blocks[request.request_id] = own
            held = SimpleNamespace(get_block_ids=lambda own=own: (own,))
            self.scheduler.update_state_after_alloc(request, held, tokens)
            claimed.append(tokens)
        self.worker._metadata = self.scheduler.build_connector_meta(None)
        self.worker.start_load_kv(SimpleNamespace(no_compile_layers=self.layers))
        self.worker.wait_for_layer_load("any")
        self.worker.wait_for_save()
        failed = self.worker.get_block_ids_with_load_errors()
        assert self.worker.get_block_ids_with_load_errors() == set()
        return claimed, failed

    def read(self, request, layer, slots):
        """Keys and values of a request's first slots, as attention would read them."""
        own = self.blocks[request.request_id]
        places = [own[i // self.block] * self.block + i % self.block for i in range(slots)]
        return self.layers[layer].kv_cache[:, places]
