"""Prompts that the variants of a sample have in common, each read in one run of the model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtool.cache.features.repetition import Repetition
from kvtool.generation.shared_prefill import can_share, prefill_shared

if TYPE_CHECKING:
    from torch import Tensor

    from kvtool.cache.whole.cache import KVCache
    from kvtool.planning.variants import Variant


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt that a cache has taken in.

    Attributes:
        logits: (batch, vocab) float32, of the next token, on the CPU.
        seconds: of the run, for all its caches together.
    """

    cache: KVCache
    logits: Tensor
    seconds: float


class SharedPrompts:
    """The prompts of the running sample that variants read together."""

    def __init__(self) -> None:
        self.begin([])

    def begin(self, readers: Sequence[Any]) -> None:
        """Begin a sample, which will be measured with these benches."""
        self._readers = readers
        self._read: dict[tuple[object, ...], dict[Variant, ReadPrompt]] = {}

    def take(
        self, reader: Any, own: KVCache, ids: Tensor, new_tokens: int, length: int = 0
    ) -> ReadPrompt | None:
        """Return the cache of a variant that holds a prompt; None where it has to read it alone.

        Whoever asks first has it read for all that can. Those that have it repeated read it with
        the other budgets of their policy only, as they know the words.

        Args:
            own: the variant's cache, still empty, which knows how the prompt is repeated.
            ids: (1, n) int64.
            new_tokens: how many will be generated after it, as far as is known.
            length: tokens of the whole text; see `KVCache.expect_length`.
        """
        part = Repetition.of(own)
        words = None if part is None else (str(own.policy), part.instructions)
        key = tuple(ids[0].tolist()), new_tokens, length, words
        if key not in self._read:
            self._read[key] = {}
            try:
                self._read[key] = self._read_together(own, ids, new_tokens, length)
            except Exception:  # any: each variant reads alone, and says what is wrong with it
                return None
        return self._read[key].pop(reader.variant, None)

    def _read_together(
        self, own: KVCache, ids: Tensor, new_tokens: int, length: int
    ) -> dict[Variant, ReadPrompt]:
        caches = {}
        for reader in self._readers:
            cache = _ready(reader, own, ids.shape[1])
            if cache is not None:
                caches[reader.variant] = cache
        if len(caches) < 2:
            return {}
        start = time.perf_counter()
        model, all_caches = self._readers[0].model, list(caches.values())
        logits = prefill_shared(model, all_caches, ids, new_tokens=new_tokens, length=length).cpu()
        seconds = time.perf_counter() - start
        for cache in caches.values():
            cache.remember(ids.cpu(), logits)
        return {variant: ReadPrompt(cache, logits, seconds) for variant, cache in caches.items()}


def _ready(reader: Any, own: KVCache, tokens: int) -> KVCache | None:
    """Return an empty cache of a variant that can take a prompt in with another variant's own."""
    try:
        cache = reader.new_cache()
        cache.budgets.check([tokens])
    except Exception:  # any: it reads alone, and says what is wrong with it
        return None
    repeats, asked = Repetition.of(own), Repetition.of(cache)
    if asked is not None and repeats is not None and repeats.instructions is not None:
        asked.instruct(repeats.instructions)
    alike = repeats is None or str(cache.policy) == str(own.policy)
    return cache if alike and can_share(reader.model, cache, tokens) else None
