"""`generate` of an attached model: it looks at the cache it is given, or makes one for each call.

transformers cuts off as many tokens of a text as its cache has seen, whatever they are. So a used
cache that comes with another text would go on from the old one, unnoticed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from kvtool.cache.hooks.blocks import Block, CacheMaker, block_of_call, check_threads
from kvtool.cache.hooks.replacement import Replacement
from kvtool.cache.hooks.same_cache import holding
from kvtool.cache.whole.cache import KVCache
from kvtool.errors import UsageError
from kvtool.policies.policy import Policy
from kvtool.transformers_versions import given_cache, with_cache

LOCK = threading.RLock()  # of all models: a lock on a model could not be copied with it
_DEFAULT_NEW_TOKENS = 20  # of transformers, by default
PLAIN_CACHES = ("dynamic", "hybrid", "hybrid_chunked", "sliding_window")
"""Values of `cache_implementation` that ask for no more than the layers' own windows."""
_ASSISTED = ("assistant_model", "prompt_lookup_num_tokens")


class GenerateCalls(Replacement):
    """Replaces `generate`, and is called as transformers' own.

    A call that brings no cache gets a fresh one, where `set_maker` or `open_block` says of what.
    """

    method = "generate"

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._for_good: CacheMaker | None = None
        self._blocks: list[Block] = []
        self._running = 0
        self._at_end: Callable[[PreTrainedModel], object] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a copy of the model takes along: no call that runs here, and no open block."""
        return super().__getstate__() | {"_blocks": [], "_running": 0, "_at_end": None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = dict(zip(self.__signature__.parameters, args, strict=False)) | kwargs
        with LOCK:
            maker = None if given_cache(kwargs) is not None else self._maker()
            self._running += 1
        try:
            return self._run(kwargs, maker)
        finally:
            with LOCK:
                self._running -= 1
                self._end()

    def _maker(self) -> CacheMaker | None:
        """What the running call is given a cache of."""
        block = block_of_call(self.model, self._blocks)
        return self._for_good if block is None else block.maker

    def _run(self, kwargs: dict[str, Any], maker: CacheMaker | None) -> Any:
        cache = given_cache(kwargs)
        kind = self._setting(kwargs, "cache_implementation")
        if kind is not None and (isinstance(cache, KVCache) or (cache is None and maker)):
            if kind not in PLAIN_CACHES:
                raise UsageError(
                    f"cache_implementation={kind!r} asks for another cache than kvtool's",
                    hint="set it to None in the call and in model.generation_config",
                )
            kwargs["cache_implementation"] = None  # transformers takes none beside a cache
        if cache is None and maker is not None:
            cache = maker.make(self.model)
            cache.expect_tokens(self._setting(kwargs, "max_new_tokens") or 0)
        if cache is not None or "past_key_values" in kwargs:
            kwargs = with_cache(kwargs, cache)
        if not isinstance(cache, KVCache):
            with holding(self.model, None):
                return self.own(**kwargs)
        cache.check_whole()
        self._check_assisted(kwargs, cache.policy)
        ids = kwargs.get("inputs") if kwargs.get("inputs") is not None else kwargs.get("input_ids")
        if cache.get_seq_length() > 0 and isinstance(ids, Tensor):
            check_continues(cache, ids)
        if cache.link.rope is not None:
            cache.choose_rope(self._lengths(kwargs, ids))
        try:
            with cache.running.generating(), holding(self.model, cache):
                out = self.own(**kwargs)
        finally:
            if cache.get_seq_length() == 0:
                cache.forget_rope()
        texts = out if isinstance(out, Tensor) else out.sequences
        cache.remember(texts.cpu() if self._entries_are_texts(kwargs, cache, texts) else None)
        cache.end_with(None)
        return out

    def _setting(self, kwargs: dict[str, Any], name: str) -> Any:
        """Return a setting of a call: its own, that of the configuration it brings, the model's."""
        if name in kwargs:
            return kwargs[name]
        given: GenerationConfig | None = kwargs.get("generation_config")
        own = getattr(given, name, None)
        return own if own is not None else getattr(self.model.generation_config, name, None)

    def _check_assisted(self, kwargs: dict[str, Any], policy: Policy) -> None:
        """Refuse assisted generation over a cache that would not give what it gives without."""
        if policy.attends_all and policy.codec is None:
            return
        why = "what a compressed cache has evicted for them is gone"
        if policy.attends_all:
            why = f"`{policy}` reads tokens that come together otherwise than one by one"
        elif policy.stores_all:
            why = f"the tables of `{policy}` do not go back"
        for name in _ASSISTED:
            if self._setting(kwargs, name) is not None:
                raise UsageError(
                    f"assisted generation ({name}) takes tokens back, and {why}",
                    hint=f"generate without {name}, or with policy full",
                )

    def _lengths(self, kwargs: dict[str, Any], ids: Tensor | None) -> list[int]:
        """Return how many tokens each text of a call has at its end, at most."""
        given = kwargs.get("inputs_embeds")
        given = ids if given is None else given
        if given is None:  # the call begins with the token that begins texts
            return [1 + (self._setting(kwargs, "max_new_tokens") or _DEFAULT_NEW_TOKENS)]
        mask = kwargs.get("attention_mask")
        if mask is None and not given.is_floating_point():
            mask = self._guessed_mask(kwargs, given)
        width, padding = given.shape[1], torch.zeros(len(given), dtype=torch.long)
        if isinstance(mask, Tensor) and mask.dim() == 2:
            width = max(width, mask.shape[1])
            padding = (mask == 0).sum(1).cpu()
        new, longest = (self._setting(kwargs, f"max_{name}") for name in ("new_tokens", "length"))
        if new is None:
            new = _DEFAULT_NEW_TOKENS if longest is None else longest - width
        names = ("num_beams", "num_return_sequences")
        copies = max(self._setting(kwargs, name) or 1 for name in names)
        return [width + max(new, 1) - int(own) for own in padding for _ in range(copies)]

    def _guessed_mask(self, kwargs: dict[str, Any], ids: Tensor) -> Tensor | None:
        """Return the mask that transformers makes of the padding tokens in a text."""
        padding, ends = (self._setting(kwargs, f"{name}_token_id") for name in ("pad", "eos"))
        ends = ends if isinstance(ends, list) else [ends]
        return None if padding is None or padding in ends else ids != padding

    def _entries_are_texts(self, kwargs: dict[str, Any], cache: KVCache, texts: Tensor) -> bool:
        """Return whether the returned sequences are what the cache's batch entries have read."""
        beams = (self._setting(kwargs, "num_beams") or 1) > 1
        whole = texts.shape[1] >= cache.get_seq_length()  # embeddings are no part of them
        return whole and not beams and len(texts) == len(cache.tokens_seen())

    # ---- what calls without a cache get

    def set_maker(self, maker: CacheMaker) -> None:
        """Give every call outside of blocks a fresh cache from here on."""
        with LOCK:
            self._for_good = maker

    def open_block(
        self,
        maker: CacheMaker,
        frame: FrameType,
        at_end: Callable[[PreTrainedModel], object] | None,
    ) -> Block:
        """Give every call inside a block a fresh cache until the block is closed.

        Raises:
            UsageError: another thread gives this model's calls other caches.
        """
        with LOCK:
            check_threads(self._blocks, maker)
            block = Block(self.model, maker, frame)
            self._blocks.append(block)
            self._at_end = self._at_end or at_end
            return block

    def close_block(self, block: Block) -> None:
        """Let the block around it hold again, or none."""
        with LOCK:
            block.close()
            self._blocks.remove(block)
            self._end()

    def _end(self) -> None:
        if self._running or self._blocks or self._for_good is not None or self._at_end is None:
            return
        at_end, self._at_end = self._at_end, None
        at_end(self.model)


def check_continues(cache: KVCache, ids: Tensor) -> None:
    """Refuse a text that does not begin with what a cache has read.

    Args:
        ids: (batch, n) int64, the whole text.
    """
    seen, known = cache.get_seq_length(), cache.input_ids
    hint = "a cache serves one text: build one for each, or use kvtool.compressed"
    if ids.shape[1] <= seen:
        raise UsageError(
            f"the cache has read {seen} tokens, and the text has {ids.shape[1]}", hint=hint
        )
    if known is None:
        return
    begun = known[:, :seen].to(ids.device)
    if len(begun) != len(ids):
        raise UsageError(f"the cache holds {len(begun)} texts, and {len(ids)} are given", hint=hint)
    differs = begun != ids[:, : begun.shape[1]]
    if bool(torch.any(differs)):
        place = int(differs.any(0).nonzero()[0])
        raise UsageError(
            f"the cache has read another text: its token {place} differs from the one given",
            hint=hint,
        )
