"""A model under one variant: what tasks measure with, and what it cost them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from kvtool.cache.entry.build import build_cache, make_cache
from kvtool.cache.hooks.rope import length_rope
from kvtool.cache.whole.cache import KVCache
from kvtool.documents.settings import Protocol
from kvtool.errors import KvtoolError
from kvtool.evaluation.bench.meter import Meter, Peak, watched_devices
from kvtool.evaluation.bench.prompts import text_before
from kvtool.evaluation.bench.shared import SharedPrompts
from kvtool.generation import Generation, compress, generate, token_logprobs
from kvtool.generation.repeating import begin_prompt
from kvtool.model_shape import trained_length
from kvtool.models.chat import Piece, piece_ids
from kvtool.planning.variants import Variant
from kvtool.policies.draws import drawn_for
from kvtool.sizes import DEFAULT_BLOCK, parse_prefill

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvtool.models.load import Loaded

_Value = TypeVar("_Value")
_WARM_UP, _WARM_UP_DECODED = 256, 4  # tokens


class Bench:
    """A model under one variant.

    Attributes:
        model, tokenizer: as loaded, the model with kvtool's attention.
        variant: the policy, its budget and how prompts are read.
        protocol: how prompts are put.
        shared: what is known about the running sample, such as the full cache's answer, and the
            variant's own (`decoded`) where it was decoded with others.
        draws: what identifies the running sample, for policies that draw; None: they draw as the
            policy says.
        prompts: those that variants read together; None: each reads its own.
        meter: what the running sample has cost so far.
    """

    def __init__(
        self,
        loaded: Loaded,
        variant: Variant,
        protocol: Protocol,
        shared: dict[str, Any] | None = None,
        prompts: SharedPrompts | None = None,
    ) -> None:
        self.model: PreTrainedModel = loaded.model
        self.tokenizer: PreTrainedTokenizerBase = loaded.tokenizer
        self.variant, self.protocol = variant, protocol
        self.shared: dict[str, Any] = {} if shared is None else shared
        self.prompts = prompts
        self.draws: str | None = None
        self._warm: tuple[Any, ...] | None = None
        self._contexts: dict[tuple[int, tuple[int, ...]], tuple[KVCache, Tensor]] = {}
        self.restart_meter()

    def draw_for(self, text: str | None) -> None:
        """Let policies that draw do so for one text from now on; None: as the policy says."""
        self.draws = text

    def restart_meter(self, meter: Meter | None = None) -> None:
        """Forget what has been counted so far, or take what another meter has counted."""
        self.meter = meter or Meter(Peak(watched_devices(self.model)))

    def forget_contexts(self) -> None:
        """Free the caches of contexts that further texts may have gone on from."""
        self._contexts.clear()

    def warm_up(self) -> None:
        """Run a short prompt before the first sample, which does not pay for first times then.

        What goes wrong is left to the samples: a ratio of so few tokens may be too small.
        """
        if self._warm is not None:
            return
        self._warm = ()
        longest = (trained_length(self.model.config) or 2 * _WARM_UP) - _WARM_UP_DECODED
        with contextlib.suppress(Exception):
            ids = torch.ones(1, min(_WARM_UP, longest), dtype=torch.long, device=self.model.device)
            cache = self.new_cache()
            compress(self.model, cache, ids, tokenizer=self.tokenizer)
            self.decode(cache, max_new_tokens=_WARM_UP_DECODED)

    def warm_up_for(self, size: tuple[Any, ...], run: Callable[[], object]) -> None:
        """Run something once, uncounted, unless what ran before was of this size already."""
        if self._warm != size:
            run()
            self._warm = size
            self.restart_meter()

    def once(self, name: str, make: Callable[[], _Value]) -> _Value:
        """Return what another variant has made for this sample already, or make it.

        It comes first in a sample and is counted for no variant, whichever happens to make it.
        """
        if name not in self.shared:
            self.shared[name] = make()
        self.restart_meter()
        return self.shared[name]

    def new_cache(self) -> KVCache:
        """Return an empty cache of this variant."""
        variant = self.variant
        budget = variant.budget if variant.plan is None else None
        policy = variant.policy
        if self.draws is not None:
            policy = drawn_for(policy, self.draws)
        return make_cache(self.model, policy, budget, prefill=variant.prefill, plan=variant.plan)

    def full_cache(self) -> KVCache:
        """Return an empty cache that keeps everything."""
        return build_cache(self.model, "full")

    def encode(self, text: str, *, special: bool) -> Tensor:
        """Return (1, n) token ids on the model's device."""
        ids = self.tokenizer(text, add_special_tokens=special, return_tensors="pt")["input_ids"]
        return ids.long().to(self.model.device)

    def encode_on(self, piece: Piece) -> Tensor:
        """Return (1, n) token ids of a text that goes on from what a cache holds."""
        ids = piece_ids(self.tokenizer, piece)
        return torch.tensor([ids], dtype=torch.long, device=self.model.device)

    def feed(self, cache: KVCache, ids: Tensor, new_tokens: int = 0) -> Tensor:
        """Feed a prompt, or a further turn; (batch, n) ids.

        Args:
            new_tokens: how many will be generated after it, as far as is known.

        Returns:
            (batch, vocab) float32 logits of the next token, on the CPU.
        """
        done = compress(self.model, cache, ids, new_tokens=new_tokens, tokenizer=self.tokenizer)
        self.meter.count_prefill(cache, tokens=ids.numel(), seconds=done.prefill_s)
        return done.next_logits

    def feed_first(self, cache: KVCache, ids: Tensor, new_tokens: int = 0) -> Tensor:
        """Feed the first prompt of a sample, in one run for all that can share it; see `feed`."""
        found, length = None, cache.rope.expected
        if self.prompts is not None:
            begin_prompt(cache, self.tokenizer)
            found = self.prompts.take(self, cache, ids, new_tokens, length)
        if found is None:
            return self.feed(cache, ids, new_tokens=new_tokens)
        cache.become(found.cache)
        self.meter.count_prefill(cache, tokens=ids.numel(), seconds=found.seconds, shared=True)
        return found.logits

    def decode(
        self,
        cache: KVCache,
        *,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        min_new_tokens: int = 0,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> Generation:
        """Generate after what a cache has been fed.

        Args:
            temperature, seed: None: the run's.
        """
        result = generate(
            self.model,
            self.tokenizer,
            cache,
            None,
            max_new_tokens=max_new_tokens,
            temperature=self.protocol.temperature if temperature is None else temperature,
            seed=self.protocol.seed if seed is None else seed,
            stop=stop,
            min_new_tokens=min_new_tokens,
        )
        # the first new token comes from the prompt's own forward
        self.meter.count_decoding(
            cache, steps=result.new_tokens - 1, seconds=result.decode_s, tokens=result.new_tokens
        )
        return result

    # ---- plain text, as other harnesses ask for it

    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
    ) -> str:
        """Return the text after a prompt, without the stop text and what follows it.

        A prompt too long for the model loses its beginning.
        """
        ids = self.encode(prompt, special=True)
        limit = trained_length(self.model.config)
        if limit is not None:
            ids = ids[:, -max(limit - max_new_tokens, 1) :]
        cache = self.new_cache()
        cache.expect_length(ids.shape[1] + max_new_tokens)
        self.feed(cache, ids)
        result = self.decode(
            cache, max_new_tokens=max_new_tokens, stop=stop, temperature=temperature
        )
        return text_before(stop, result.text[0])

    def loglikelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        """Score a continuation, fed token by token to the cache that its context has filled.

        Returns:
            Its log-probability in nats, and whether every token was the most likely one.
        """
        moved = context[len(context.rstrip()) :]  # spaces belong to the word that follows
        context, continuation = context[: len(context) - len(moved)], moved + continuation
        whole = self.encode(context + continuation, special=True)
        length = self.encode(context, special=True).shape[1]
        if length == 0:
            whole = torch.cat([self._first_token(), whole], 1)
            length = 1
        limit = trained_length(self.model.config)
        new = whole.shape[1] - length
        if limit is not None and whole.shape[1] > limit:
            whole = whole[:, -limit:]
        given, wanted = whole[:, : whole.shape[1] - new], whole[:, whole.shape[1] - new :]
        cache, logits = self._read(given, whole.shape[1])
        with cache.rollback():
            logprobs, likeliest = self.follow(cache, wanted, chunk=1, first_logits=logits)
        return logprobs.sum().item(), bool(likeliest.all())

    def _read(self, ids: Tensor, length: int) -> tuple[KVCache, Tensor]:
        """Return a cache fed with a context, from which all continuations to `length` start."""
        rope = length_rope(self.model)
        factors = 0 if rope is None else rope.factors_for(length)
        context = factors, tuple(ids[0].tolist())
        if context not in self._contexts:
            cache = self.new_cache()
            cache.expect_length(length)
            self._contexts[context] = cache, self.feed(cache, ids)
        return self._contexts[context]

    def rolling(self, text: str) -> float:
        """Return the log-probability of a text in nats; past the trained length it begins anew."""
        ids = torch.cat([self._first_token(), self.encode(text, special=False)], 1)
        limit = trained_length(self.model.config) or ids.shape[1]
        total = 0.0
        for start in range(0, ids.shape[1] - 1, limit - 1):
            part = ids[:, start : start + limit]
            logprobs, _ = self.follow(self.new_cache(), part, chunk=self.chunk)
            total += logprobs.sum().item()
        return total

    @property
    def chunk(self) -> int:
        """Tokens fed at a time where a text is followed: one, if each step evicts or chooses."""
        block = parse_prefill(self.variant.prefill)
        if self.variant.policy.when == "prompt" and self.variant.policy.reader is None:
            return block or DEFAULT_BLOCK
        return 1

    def follow(
        self, cache: KVCache, ids: Tensor, *, chunk: int, first_logits: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Feed a known text through a cache; log-probabilities and whether each was the likeliest.

        See `kvtool.generation.token_logprobs`.
        """
        start = time.perf_counter()
        result = token_logprobs(self.model, cache, ids, chunk=chunk, first_logits=first_logits)
        seconds = time.perf_counter() - start
        tokens = ids.shape[1]
        if chunk == 1:  # the last token is not fed
            self.meter.count_decoding(cache, steps=tokens - 1, seconds=seconds, tokens=tokens)
        else:
            self.meter.count_prefill(cache, tokens=tokens, seconds=seconds)
        return result

    def _first_token(self) -> Tensor:
        """Return (1, 1) the token that begins a text."""
        tokenizer = self.tokenizer
        known = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        token = next((token for token in known if token is not None), None)
        if token is None:
            raise KvtoolError("the tokenizer has neither a first nor a last token to begin with")
        return torch.tensor([[token]], device=self.model.device)
