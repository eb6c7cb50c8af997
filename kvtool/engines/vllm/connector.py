"""Load exported caches into vLLM's pages: a KV connector, which needs no change to vLLM.

The scheduler's half recognises a prompt by its virtual ids and claims their slots as computed
elsewhere. The workers' half writes keys and values into the blocks of these slots, through the call
by which the attention backend writes its own. vLLM's prefix cache then shares the blocks.

What cannot be served is refused, one request alone: its slots are claimed, reported as failed, and
vLLM ends it with an error. Nothing of it is shared, since its blocks get a name of their own. So a
virtual prompt is never read as text. This module imports vllm, torch and safetensors only.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index

from kvtool.engines.vllm.folder import Folder
from kvtool.engines.vllm.format import Exported, facts_of
from kvtool.engines.vllm.ids import FEWEST, are_virtual

logger = init_logger("vllm.kvtool")

_NAME = "kvtool"  # in a request's kv_transfer_params: the cache that it asks for
_HELD_BYTES = 1 << 30  # of caches that a worker keeps in host memory
_DRAFT = "draft_model."  # before the names of a draft model's layers


@dataclass(frozen=True)
class Load:
    """Slots of a request that are loaded before the next step.

    Attributes:
        blocks: of the request, from the first slot on.
        start, end: the slots to load.
        digest: of the cache.
        refusal: why nothing is loaded; empty: it is.
    """

    request: str
    blocks: list[int]
    start: int
    end: int
    path: str = ""
    digest: str = ""
    refusal: str = ""


@dataclass
class Loads(KVConnectorMetadata):
    """What the workers load before a step."""

    loads: list[Load] = field(default_factory=list)


@dataclass(frozen=True)
class Asked:
    """What a request with a virtual prompt gets: a cache, or the reason why it is refused."""

    cache: Exported | None = None
    refusal: str = ""


class KvtoolConnector(KVConnectorBase_V1):
    """Serves the caches of a folder: `kv_connector_extra_config={"folder": ..}`."""

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None
    ) -> None:
        """Check that the engine can load caches.

        Raises:
            ValueError: no folder, or a setting of the engine under which it cannot.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        folder = self._kv_transfer_config.get_from_extra_config("folder", None)
        if not folder or not Path(folder).is_dir():
            raise ValueError(
                f"kvtool: kv_connector_extra_config needs `folder`, a folder of exported caches; "
                f"got {folder!r}"
            )
        _check_engine(vllm_config, self._kv_transfer_config, kv_cache_config)
        model = vllm_config.model_config
        self._block = vllm_config.cache_config.block_size
        self._vocabulary = model.get_vocab_size()
        self._folder = Folder(Path(folder), facts_of(model.hf_text_config), logger.warning)
        self._asked: dict[str, Asked] = {}
        self._loads: list[Load] = []
        self._held = HeldCaches(model.dtype)
        self._failed: set[int] = set()
        if role == KVConnectorRole.SCHEDULER:
            self._folder.scan()
            logger.info("kvtool: %d caches in %s", len(self._folder), folder)

    # ---- in the scheduler

    def on_new_request(self, request: Any) -> None:
        asked = self._examine(request)
        if asked is None:
            return
        self._asked[request.request_id] = asked
        vars(request).update(skip_reading_prefix_cache=False)  # or the ids are read as text
        if asked.refusal:
            logger.error("kvtool: request %s is refused: %s", request.request_id, asked.refusal)
            _set_apart(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        asked = self._asked.get(request.request_id)
        if asked is None:
            return 0, False
        slots = min(FEWEST, request.num_tokens - 1) if asked.cache is None else len(asked.cache.ids)
        return max(0, slots - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        asked = self._asked.get(request.request_id)
        if asked is None or num_external_tokens == 0:
            return
        own, cache = blocks.get_block_ids()[0], asked.cache
        if cache is None:
            refused = Load(request.request_id, own, 0, num_external_tokens, refusal=asked.refusal)
            self._loads.append(refused)
            return
        end, digest = len(cache.ids), cache.metadata["digest"]
        start = end - num_external_tokens
        load = Load(request.request_id, own, start, end, str(cache.path), digest)
        self._loads.append(load)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        loads, self._loads = self._loads, []
        return Loads(loads)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._asked.pop(request.request_id, None)
        return False, None

    def _examine(self, request: Any) -> Asked | None:
        """Return what a request gets; None: its prompt is text."""
        ids = request.prompt_token_ids or []
        given = request.kv_transfer_params
        name = given.get(_NAME) if isinstance(given, dict) else None
        virtual = are_virtual(ids, self._vocabulary)
        if not virtual and name is None:
            return None
        if not virtual:
            return Asked(refusal=f"it asks for `{name}`, and its prompt has no virtual ids")
        cache = self._folder.find(ids)
        if cache is None:
            return Asked(refusal=f"no cache in {self._folder.path} has its virtual ids")
        refusal = self._folder.refusal(cache) or _refuse(request, ids, cache, name)
        if refusal:
            return Asked(refusal=refusal)
        if getattr(request.sampling_params, "repetition_penalty", 1.0) != 1.0:
            logger.warning_once(
                "kvtool: repetition_penalty counts virtual ids as if they were text"
            )
        return Asked(cache)

    # ---- in the workers

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        for load in metadata.loads:
            try:
                if load.refusal:
                    raise ValueError(load.refusal)
                self._load(load, forward_context.no_compile_layers)
            except Exception as error:  # of any kind: it ends this request alone
                logger.error("kvtool: request %s cannot be served: %s", load.request, error)
                last = -(-load.end // self._block)
                self._failed.update(load.blocks[load.start // self._block : last])

    def _load(self, load: Load, layers: dict[str, Any]) -> None:
        """Write the slots of a cache into the blocks of a request."""
        cache = self._held.open(load.path, load.digest)
        slots = torch.arange(load.start, load.end)
        blocks = torch.tensor(load.blocks)
        places = blocks[slots // self._block] * self._block + slots % self._block
        own = slice(load.start, load.end)
        written = 0
        for name, layer in layers.items():
            pages = getattr(layer, "kv_cache", None)
            if pages is None or not hasattr(layer, "impl") or name.startswith(_DRAFT):
                continue
            index = extract_layer_index(name)
            if index >= cache.layers:  # of a draft model that goes on counting
                continue
            keys, values = (states[own] for states in cache.layer(index))
            if keys.shape[1:] != (layer.num_kv_heads, layer.head_size):
                raise ValueError(f"layer {index} has other heads than the cache {load.path}")
            states = (each.to(pages.device, non_blocking=True) for each in (keys, values))
            layer.impl.do_kv_cache_update(layer, *states, pages, places.to(pages.device))
            written += 1
        if written == 0:
            raise ValueError("the engine has no attention layers that kvtool knows")

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return

    def wait_for_save(self) -> None:
        return


def _check_engine(config: Any, transfer: Any, pages: Any) -> None:
    """Refuse settings of an engine under which caches cannot be loaded."""
    reason, parallel = None, config.parallel_config
    if getattr(transfer, "kv_load_failure_policy", "fail") != "fail":
        reason = "kv_load_failure_policy must be `fail`: else virtual ids are read as text"
    elif len(getattr(pages, "kv_cache_groups", ())) > 1:
        reason = "layers of several kinds need --disable-hybrid-kv-cache-manager"
    elif any(
        getattr(parallel, f"{kind}_context_parallel_size", 1) > 1 for kind in ("decode", "prefill")
    ):
        reason = "context parallelism spreads the slots of a text, and is not supported"
    if reason is not None:
        raise ValueError(f"kvtool: {reason}")


def _refuse(request: Any, ids: list[int], cache: Exported, name: str | None) -> str:
    """Say why a request cannot be answered from a cache; empty: it can."""
    slots = len(cache.ids)
    if name is not None and name != cache.name:
        return f"it asks for `{name}`, and its virtual ids are those of `{cache.name}`"
    if tuple(ids[:slots]) != cache.ids:
        return f"it has a part of the virtual ids of `{cache.name}`, or other ones behind"
    if len(ids) == slots:
        return f"no question is behind the virtual ids of `{cache.name}`"
    if request.lora_request is not None:
        return f"`{cache.name}` was read without the LoRA adapter"
    if request.sampling_params is None:
        return "a pooling model looks at the prompt, of which only keys and values are left"
    if request.sampling_params.prompt_logprobs is not None:
        return "the prompt's log-probabilities (prompt_logprobs, echo) need the text itself"
    return ""


def _set_apart(request: Any) -> None:
    """Give the blocks of a request names of their own in the prefix cache, so that none share."""
    vars(request).update(cache_salt=uuid4().hex)  # which vLLM reads for the first block
    request.block_hashes.clear()
    request.update_block_hashes()


class HeldCache:
    """The KV heads of a cache that this worker has, by layer.

    Attributes:
        layers: how many layers the cache has.
    """

    def __init__(self, path: str, digest: str, dtype: torch.dtype) -> None:
        """Read a file.

        Raises:
            ValueError: it is another cache by now.
        """
        self.nbytes, self._states = 0, dict[int, tuple[Tensor, Tensor]]()
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("digest") != digest:
                raise ValueError(f"`{path}` holds another cache by now")
            self.layers = int(metadata["layers"])
            for i in range(self.layers):
                pair = []
                for part in ("keys", "values"):
                    states = file.get_slice(f"layer.{i}.{part}")
                    own = states[own_heads(states.get_shape()[0])]
                    pair.append(own.transpose(0, 1).to(dtype).contiguous())
                self._states[i] = pair[0], pair[1]
                self.nbytes += sum(each.nbytes for each in pair)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer: (slots, kv_heads, head_dim)."""
        return self._states[index]


class HeldCaches:
    """Caches in host memory, those used last."""

    def __init__(self, dtype: torch.dtype, most: int = _HELD_BYTES) -> None:
        self._dtype, self._most = dtype, most
        self._held: OrderedDict[str, HeldCache] = OrderedDict()

    def open(self, path: str, digest: str) -> HeldCache:
        """Return a cache, which is read where it is not held. Its file must be there.

        Raises:
            OSError: it is not.
            ValueError: the file holds another one.
        """
        os.stat(path)
        found = self._held.pop(digest, None) or HeldCache(path, digest, self._dtype)
        self._held[digest] = found
        while len(self._held) > 1 and sum(each.nbytes for each in self._held.values()) > self._most:
            self._held.popitem(last=False)
        return found


def own_heads(total: int) -> slice:
    """Return the KV heads of this tensor-parallel rank, as vLLM splits or repeats them."""
    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    if total >= size:
        each = total // size
        return slice(rank * each, (rank + 1) * each)
    head = rank // (size // total)
    return slice(head, head + 1)
