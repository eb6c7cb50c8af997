"""A model under one arm: what tasks measure with, and what it cost them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from kvtool import generation
from kvtool.cache.build import build_cache
from kvtool.cache.cache import KVCache
from kvtool.errors import KvtoolError
from kvtool.evaluation.bench.arms import Arm, plan_of
from kvtool.evaluation.bench.memory import Peak, watched_devices
from kvtool.evaluation.bench.prompts import first_prompt
from kvtool.evaluation.tasks.task import Asking, Json, Sample, Task, TokenCounter, Turn
from kvtool.models.chat import Frame, continued_ids, make_frame
from kvtool.sizes import DEFAULT_BLOCK, parse_prefill

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvtool.models.load import Loaded

_Value = TypeVar("_Value")
_WARM_UP, _WARM_UP_DECODED = 256, 4  # tokens


@dataclass(frozen=True)
class Protocol:
    """How prompts are put and answers are drawn; None leaves it to the task.

    Attributes:
        query_aware: whether the question is in the prompt that is compressed.
        max_length: tokens of a prompt, above which it is cut; None: what the model was trained for.
        temperature: 0 takes the most likely token.
        stop: texts that end an answer, on top of the task's own.
    """

    query_aware: bool | None = None
    chat_template: Literal["auto", "on", "off"] = "auto"
    max_length: int | None = None
    truncate: Literal["middle", "left", "error"] = "middle"
    max_new_tokens: int | None = None
    temperature: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int = 0


@dataclass
class Meter:
    """What one sample cost: seconds and tokens add up, bytes are those of its largest cache."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decoded: int = 0
    bytes: dict[str, float] = field(default_factory=dict)

    def read(self, cache: KVCache) -> None:
        """Take the bytes of a cache as it stands now, from its tensors."""
        report = cache.report(of_all_processes=True)
        attended = [kept for kept in report.kept_per_layer if kept] or [0]
        now = {
            "kept_tokens": sum(attended) / len(attended),
            "kv_bytes": report.kv_bytes,
            "state_bytes": report.state_bytes,
            "full_bytes": report.full_bytes,
            "peak_kv_bytes": report.peak_bytes,
            "traffic_pairs": report.traffic_pairs,
            "traffic_bytes": report.traffic_bytes,
        }
        self.bytes = {name: max(value, self.bytes.get(name, 0)) for name, value in now.items()}

    def record(self, peak: Peak) -> Json:
        """Return everything as JSON values."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "decoded_tokens": self.decoded,
            "prefill_s": round(self.prefill_s, 6),
            "decode_s": round(self.decode_s, 6),
            **self.bytes,
            "peak_memory_bytes": peak.growth(),
        }


class Bench:
    """A model under one arm.

    Attributes:
        model, tokenizer: as loaded, the model with kvtool's attention.
        arm: the policy, its budget and how prompts are read.
        protocol: how prompts are put.
        shared: what the arms share about the running sample, such as the full cache's answer.
        meter: what the running sample has cost so far.
        plan: brings the budget, if there is one.
        warm: what a task has run once to warm up, None before.
    """

    def __init__(
        self, loaded: Loaded, arm: Arm, protocol: Protocol, shared: dict[str, Any] | None = None
    ) -> None:
        self.model: PreTrainedModel = loaded.model
        self.tokenizer: PreTrainedTokenizerBase = loaded.tokenizer
        self.arm, self.protocol = arm, protocol
        self.plan = plan_of(arm)
        self.shared: dict[str, Any] = {} if shared is None else shared
        self.warm: tuple | None = None
        self._contexts: dict[tuple[int, ...], tuple[KVCache, Tensor]] = {}
        self.restart_meter()

    def restart_meter(self) -> None:
        """Forget what has been counted so far."""
        self.meter = Meter()
        self._peak = Peak(watched_devices(self.model))

    def warm_up(self) -> None:
        """Run a short prompt once, so that the first sample does not pay for first times.

        What goes wrong is left to the samples: a share of so few tokens may be too small.
        """
        room = (trained_length(self.model.config) or 2 * _WARM_UP) - _WARM_UP_DECODED
        with contextlib.suppress(Exception):
            ids = torch.ones(1, min(_WARM_UP, room), dtype=torch.long, device=self.model.device)
            cache = self.new_cache()
            generation.compress(self.model, cache, ids)
            self.decode(cache, max_new_tokens=_WARM_UP_DECODED)

    def measure(self, task: Task, sample: Sample) -> Json:
        """Run a sample of a task.

        Returns:
            What the task recorded, with the sample's `cost`.
        """
        self.restart_meter()
        try:
            record = task.run(self, sample)
            return {**record, "cost": self.meter.record(self._peak)}
        finally:
            self._contexts.clear()

    def count_decoding(self, cache: KVCache, *, steps: int, seconds: float) -> None:
        """Count forwards of single tokens that a task has run by itself."""
        self.meter.decode_s += seconds
        self.meter.new_tokens += steps
        self.meter.decoded += steps
        self.meter.read(cache)

    def once(self, name: str, make: Callable[[], _Value]) -> _Value:
        """Return what another arm has made for this sample already, or make it.

        It comes first in a sample and is counted for no arm, whichever happens to make it.
        """
        if name not in self.shared:
            self.shared[name] = make()
        self.restart_meter()
        return self.shared[name]

    def new_cache(self) -> KVCache:
        """Return an empty cache of this arm."""
        arm = self.arm
        budget = arm.budget if self.plan is None else None
        return build_cache(self.model, arm.policy, budget, prefill=arm.prefill, plan=self.plan)

    def full_cache(self) -> KVCache:
        """Return an empty cache that keeps everything."""
        return build_cache(self.model, "full")

    def encode(self, text: str, *, special: bool) -> Tensor:
        """Return (1, n) token ids on the model's device."""
        ids = self.tokenizer(text, add_special_tokens=special, return_tensors="pt")["input_ids"]
        return ids.long().to(self.model.device)

    def encode_on(self, text: str) -> Tensor:
        """Return (1, n) token ids of a text that goes on from what a cache holds."""
        ids = continued_ids(self.tokenizer, text)
        return torch.tensor([ids], dtype=torch.long, device=self.model.device)

    # ---- questions

    def ask(self, sample: Sample, task: Asking) -> list[Json]:
        """Ask every turn of a sample.

        Where the query is not known beforehand, the context is compressed first and the question
        comes as a further turn, compressed with what is left. `task.mode` `scdq` asks every
        question of the same compressed context; else a turn follows the one before it, after the
        reference answer (`task.golden`) or the model's own.

        Returns:
            Per turn its `prediction`, `references` and `new_tokens`.
        """
        frame = self._frame(task)
        prompt = first_prompt(
            self.tokenizer,
            frame,
            sample,
            max_length=self._max_length(sample),
            truncate=self.protocol.truncate,
        )
        same_context = getattr(task, "mode", None) == "scdq"
        golden = getattr(task, "golden", False)
        cache, read_so_far = self.new_cache(), False
        if not self.knows_query(task):
            self.feed(cache, self.encode(prompt.context, special=prompt.special))
            read_so_far = True
        answers: list[Json] = []
        lead = ""
        for i, turn in enumerate(sample.turns):
            text = lead + turn.question + frame.closing + turn.answer_prefix
            goes_on = i + 1 < len(sample.turns) and not same_context
            with cache.rollback() if same_context else contextlib.nullcontext():
                if read_so_far:
                    self.feed(cache, self.encode_on(text), new_tokens=self._answer_tokens(turn))
                else:
                    ids = self.encode(prompt.context + text, special=prompt.special)
                    self.feed(cache, ids, new_tokens=self._answer_tokens(turn))
                with cache.rollback() if goes_on and golden else contextlib.nullcontext():
                    answers.append(self._answer(cache, turn, task))
            read_so_far = True
            if goes_on and golden:
                space = " " if turn.answer_prefix else ""
                lead = space + ", ".join(turn.references) + frame.next
            elif goes_on:  # an answer that ended itself has its end-of-turn token already
                lead = frame.next.removeprefix(self.tokenizer.decode(cache.input_ids[0, -1:]))
        return answers

    def knows_query(self, task: Task) -> bool:
        """Whether the question is in the prompt that is compressed."""
        return knows_query(task, self.protocol)

    def feed(self, cache: KVCache, ids: Tensor, new_tokens: int = 0) -> Tensor:
        """Feed a prompt, or a further turn; (batch, n) ids.

        Args:
            new_tokens: how many will be generated after it, as far as is known.

        Returns:
            (batch, vocab) float32 logits of the next token, on the CPU.
        """
        done = generation.compress(self.model, cache, ids, new_tokens=new_tokens)
        self.meter.prefill_s += done.prefill_s
        self.meter.prompt_tokens += ids.numel()
        self.meter.read(cache)
        return done.next_logits

    def _answer(self, cache: KVCache, turn: Turn, task: Asking) -> Json:
        stop, least = (*task.stop, *self.protocol.stop), task.min_new_tokens
        result = self.decode(
            cache,
            max_new_tokens=self._answer_tokens(turn),
            stop=stop,
            min_new_tokens=least,
        )
        begun = self.tokenizer.decode(result.token_ids[0][:least], skip_special_tokens=True)
        return {
            "prediction": _before(stop, result.text[0], start=len(begun)),
            "references": list(turn.references),
            "new_tokens": result.new_tokens,
        }

    def _answer_tokens(self, turn: Turn) -> int:
        return self.protocol.max_new_tokens or turn.max_new_tokens

    def decode(
        self,
        cache: KVCache,
        *,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        min_new_tokens: int = 0,
        temperature: float | None = None,
    ) -> generation.Generation:
        """Generate after what a cache has been fed."""
        result = generation.generate(
            self.model,
            self.tokenizer,
            cache,
            None,
            max_new_tokens=max_new_tokens,
            temperature=self.protocol.temperature if temperature is None else temperature,
            seed=self.protocol.seed,
            stop=stop,
            min_new_tokens=min_new_tokens,
        )
        # the first new token comes from the prompt's own forward
        self.count_decoding(cache, steps=result.new_tokens - 1, seconds=result.decode_s)
        self.meter.new_tokens += 1
        return result

    def _frame(self, task: Task) -> Frame:
        return make_frame(self.tokenizer, self.protocol.chat_template, task.chat)

    def _max_length(self, sample: Sample) -> int | None:
        if self.protocol.max_length is not None:
            return self.protocol.max_length
        limit = trained_length(self.model.config)
        if limit is None:
            return None
        later = sum(
            self.encode(turn.question + turn.answer_prefix, special=False).shape[1]
            for turn in sample.turns[1:]
        )
        answers = [self._answer_tokens(turn) for turn in sample.turns]
        return limit - later - sum(answers)

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
        self.feed(cache, ids)
        result = self.decode(
            cache, max_new_tokens=max_new_tokens, stop=stop, temperature=temperature
        )
        return _before(stop, result.text[0])

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
        cache, logits = self._read(given)
        with cache.rollback():
            logprobs, likeliest = self.follow(cache, wanted, chunk=1, first_logits=logits)
        return logprobs.sum().item(), bool(likeliest.all())

    def _read(self, ids: Tensor) -> tuple[KVCache, Tensor]:
        """Return a cache fed with a context, which all its continuations start from."""
        context = tuple(ids[0].tolist())
        if context not in self._contexts:
            cache = self.new_cache()
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
        block = parse_prefill(self.arm.prefill)
        if self.arm.policy.score.when == "prompt" and self.arm.policy.reader is None:
            return block or DEFAULT_BLOCK
        return 1

    def follow(
        self, cache: KVCache, ids: Tensor, *, chunk: int, first_logits: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Feed a known text through a cache; log-probabilities and whether each was the likeliest.

        See `kvtool.generation.token_logprobs`.
        """
        start = time.perf_counter()
        result = generation.token_logprobs(
            self.model, cache, ids, chunk=chunk, first_logits=first_logits
        )
        seconds = time.perf_counter() - start
        if chunk == 1:  # the last token is not fed
            self.count_decoding(cache, steps=ids.shape[1] - 1, seconds=seconds)
            self.meter.new_tokens += 1
        else:
            self.meter.prefill_s += seconds
            self.meter.prompt_tokens += ids.shape[1]
            self.meter.read(cache)
        return result

    def _first_token(self) -> Tensor:
        """(1, 1) the token that begins a text."""
        tokenizer = self.tokenizer
        known = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        token = next((token for token in known if token is not None), None)
        if token is None:
            raise KvtoolError("the tokenizer has neither a first nor a last token to begin with")
        return torch.tensor([[token]], device=self.model.device)


def _before(stop: Sequence[str], text: str, *, start: int = 0) -> str:
    """Return a text up to the first of some texts in it, from character `start` on."""
    found = [text.find(mark, start) for mark in stop if mark]
    return text[: min((at for at in found if at >= 0), default=len(text))]


def knows_query(task: Task, protocol: Protocol) -> bool:
    """Whether the question of a task is in the prompt that is compressed."""
    if getattr(task, "mode", None) == "scdq":
        return False
    return task.query_aware if protocol.query_aware is None else protocol.query_aware


def token_counter(tokenizer: PreTrainedTokenizerBase, limit: int | None) -> TokenCounter:
    """Return how a tokenizer measures text, for tasks that write their samples."""
    return TokenCounter(
        encode=lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        limit=limit,
        special=len(tokenizer("", add_special_tokens=True)["input_ids"]),
    )
