"""Answer requests that come in while others run: one thread reads prompts and draws tokens.

A long prompt is read in pieces, and the others take a step after each.

Requests whose caches can be joined share a batch (`kvtool.cache.whole.batching`), the others take
a step each in turn. Between two steps one prompt is read, so that a long queue does not hold up
answers.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvtool.cache.whole.batching import take_entry, why_apart
from kvtool.cache.whole.cache import KVCache
from kvtool.cache.whole.report import CacheReport
from kvtool.errors import KvtoolError, UsageError
from kvtool.generation.continuation import feed_prompt
from kvtool.generation.conversation import Asked, Conversation
from kvtool.generation.graphs import StaticDecoding
from kvtool.generation.model_settings import end_tokens
from kvtool.generation.serving import STEPS, Batch, Drawing, Room, Running, Waiting, begin, bytes_of
from kvtool.model_shape import layer_shapes

_END = object()
_LAST_STEP = 10.0  # seconds that the last step may take; a long prompt is left behind


@dataclass(frozen=True)
class Opened:
    """What a request begins with, once it is its turn.

    Attributes:
        cache: empty, or holding the text before.
        asked: what is fed to it.
        talk: the conversation that the answer belongs to; None: it belongs to none.
        held: whether the text before comes from a request before this one.
    """

    cache: KVCache
    asked: Asked
    talk: Conversation | None = None
    held: bool = False


@dataclass(frozen=True)
class Answer:
    """An answer, and what the cache holds at its end.

    Attributes:
        ended: whether a token or a text has ended it, and not its length.
        fed: tokens that were read for it.
        held: as for `Opened`.
    """

    token_ids: list[int]
    ended: bool
    report: CacheReport
    fed: int
    held: bool


@dataclass(eq=False)
class Job:
    """A request on its way.

    Attributes:
        group: requests with the same one, which have the same policy and budget, share a batch.
        open: makes or finds the cache; called in the thread that answers.
        sequence_bytes: of the cache that it takes at most.
        on_token: called with each token as it is drawn.
        on_end: called once, with the answer or with what went wrong.
        keep_as: returns by what the conversation is found again, of its answer; None: it is not
            held.
    """

    group: Hashable
    open: Callable[[], Opened]
    max_new_tokens: int
    sequence_bytes: int
    drawing: Drawing
    on_token: Callable[[int], None]
    on_end: Callable[[Answer | Exception], None]
    keep_as: Callable[[Answer], Hashable] | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    opened: Opened | None = None

    def report_to(
        self, on_token: Callable[[int], None], on_end: Callable[[Answer | Exception], None]
    ) -> None:
        """Say who hears of its tokens and of its end."""
        self.on_token, self.on_end = on_token, on_end

    def begin(self, opened: Opened) -> None:
        """Note that it is in flight."""
        self.opened = opened

    def cancel(self) -> None:
        """Let it go before its next token; `on_end` is not called any more."""
        self.cancelled.set()


class Held:
    """Conversations between two requests, the least recently used first."""

    def __init__(self) -> None:
        self._talks: OrderedDict[Hashable, tuple[Conversation, int]] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._talks)

    def add(self, key: Hashable, talk: Conversation) -> None:
        """Hold a conversation, in place of another one with the same key."""
        self.take(key)
        report = talk.cache.report()
        size = report.allocated_bytes + report.state_bytes
        self._talks[key] = talk, size
        self.nbytes += size

    def take(self, key: Hashable) -> Conversation | None:
        """Return a conversation, which is not held any more; None: there is none."""
        talk, size = self._talks.pop(key, (None, 0))
        self.nbytes -= size
        return talk

    def shrink(self, most: int) -> None:
        """Forget the least recently used until the others take at most `most` bytes."""
        while self._talks and self.nbytes > most:
            self.take(next(iter(self._talks)))


class LiveAnswers:
    """A thread that answers requests, as many at a time as a memory holds.

    Attributes:
        held: the conversations that later requests go on with; of the thread.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        memory: int | None = None,
        most_sequences: int | None = None,
        piece: int | None = None,
        graphs: bool = True,
    ) -> None:
        """Start the thread.

        Args:
            memory: bytes of all caches, of requests in flight and of held ones; None: no bound.
            most_sequences: requests in flight; None: no bound.
            piece: tokens of a prompt that are read between two steps, where the policy and the
                memory allow it: until its end all layers hold it whole. None: all.
            graphs: whether steps are recorded and replayed as CUDA graphs, where that can be done.
        """
        self.model, self.tokenizer, self.memory = model, tokenizer, memory
        self._piece, self._graphs = piece, graphs
        self._reading: tuple[Job, Generator[None, None, None]] | None = None
        self.held = Held()
        self._room = Room(memory, most_sequences)
        self._coming: deque[Job] = deque()
        self._batches: list[_Live] = []
        self._change, self._stopping = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="kvtool-answers", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Line up a request.

        Raises:
            UsageError: it alone is larger than the memory.
            KvtoolError: the server ends.
        """
        self._room.check(job.sequence_bytes, "the request", UsageError)
        with self._change:
            if self._stopping:
                raise KvtoolError("the server is ending")
            self._coming.append(job)
            self._change.notify()

    @property
    def waiting(self) -> int:
        """How many requests wait for their turn."""
        return len(self._coming)

    @property
    def running(self) -> int:
        """How many requests are in flight, with the one whose prompt is being read."""
        return sum(len(jobs) for jobs in self._in_flight())

    def _in_flight(self) -> list[list[Job]]:
        """Return the requests of each batch; one that is being read is a batch of its own."""
        reading = self._reading
        batches = [live.jobs for live in list(self._batches)]
        return batches if reading is None else [*batches, [reading[0]]]

    def end(self, why: Exception) -> int:
        """End the thread after its step and all requests with a reason; return their number."""
        with self._change:
            told = [*self._coming, *(job for jobs in self._in_flight() for job in jobs)]
            self._stopping = True
            self._change.notify()
        for job in told:
            if not job.cancelled.is_set():
                job.cancel()
                job.on_end(why)
        return len(told)

    def stop(self) -> None:
        """End the thread after its step; requests that are not answered are dropped."""
        with self._change:
            self._stopping = True
            self._change.notify()
        self._thread.join(_LAST_STEP)

    @torch.no_grad()
    def _run(self) -> None:
        while True:
            with self._change:
                while not (self._stopping or self._coming or self._in_flight()):
                    self._change.wait()
                if self._stopping:
                    return
            self._drop_cancelled()
            if self._reading is None and (job := self._next()) is not None:
                self._reading = job, self._read(job)
            if self._reading is not None and not self._guard([self._reading[0]], self._read_on):
                self._reading = None
            for live in list(self._batches):
                if not self._guard(live.jobs, live.step) or not live.jobs:
                    self._batches.remove(live)
            if self.memory is not None and len(self.held):
                self.held.shrink(self.memory - bytes_of(self._sizes()))

    def _guard(self, jobs: list[Job], work: Callable[[], Any]) -> bool:
        """Do some work for requests, which all end with what goes wrong in it."""
        try:
            work()
        except Exception as error:
            for job in jobs:
                if not job.cancelled.is_set():
                    job.on_end(error)
            return False
        return True

    def _drop_cancelled(self) -> None:
        with self._change:
            self._coming = deque(job for job in self._coming if not job.cancelled.is_set())
        if self._reading is not None and self._reading[0].cancelled.is_set():
            self._reading = None
        for live in list(self._batches):
            if not self._guard(live.jobs, live.drop_cancelled) or not live.jobs:
                self._batches.remove(live)

    def _next(self) -> Job | None:
        """Take the first request of the queue if it fits, and free the memory that it needs."""
        with self._change:
            if not self._coming:
                return None
            job = self._coming[0]
            count, sizes = self.running + 1, self._sizes(job)
            if not self._room.takes(count, sizes):
                for live in self._batches:
                    live.batch.tighten()
                sizes = self._sizes(job)
            if not self._room.takes(count, sizes):
                return None
            if self.memory is not None:
                self.held.shrink(self.memory - bytes_of(sizes))
            return self._coming.popleft()

    def _sizes(self, job: Job | None = None) -> list[list[int]]:
        """Return the bytes of each place of each batch, and of a request in the batch it joins.

        Without a request, that is the one whose prompt is being read.
        """
        job = job or (self._reading and self._reading[0])
        sizes = [[*live.batch.sizes] for live in self._batches]
        if job is not None:
            groups = [live.group for live in self._batches]
            if job.group in groups:
                sizes[groups.index(job.group)].append(job.sequence_bytes)
            else:
                sizes.append([job.sequence_bytes])
        return sizes

    def _free(self, batch: Batch) -> int | None:
        """Return the bytes that a batch may take beside the others."""
        if self.memory is None:
            return None
        there = [live.batch.sizes for live in self._batches if live.batch is not batch]
        reading = 0 if self._reading is None else self._reading[0].sequence_bytes
        return self.memory - bytes_of(there) - reading

    def _read(self, job: Job) -> Generator[None, None, None]:
        """Read a request's prompt, with a pause after each piece, and let it join the others."""
        opened = job.open()
        job.begin(opened)
        ids, new = opened.asked.ids, job.max_new_tokens
        piece = self._piece if self._takes_whole(opened) else None
        given = (self.model, opened.cache, ids, None, new, self.tokenizer, piece)
        known, logits, _ = yield from feed_prompt(*given)
        self._admit(job, opened, known, logits)

    def _read_on(self) -> None:
        """Read a piece of the prompt that is being read."""
        if self._reading is not None and next(self._reading[1], _END) is _END:
            self._reading = None

    def _takes_whole(self, opened: Opened) -> bool:
        """Whether all layers may hold a prompt to its end; a codec rounds what pieces attend to."""
        cache = opened.cache
        if cache.policy.codec is not None or cache.block is not None:
            return False
        if self.memory is None:
            return True
        token = sum(layer.bytes for layer in layer_shapes(self.model.config) if layer is not None)
        tokens = max(cache.tokens_seen()) + opened.asked.ids.shape[1]
        return token * tokens + bytes_of(self._sizes()) <= self.memory

    def _admit(self, job: Job, opened: Opened, ids: torch.Tensor, logits: torch.Tensor) -> None:
        prompt = Waiting(0, ids, job.max_new_tokens, job.sequence_bytes)
        running = begin(self.model, self.tokenizer, prompt, job.drawing)
        cache = opened.cache
        if why_apart(cache.policy, recurrent=cache.recurrent) is None:
            for live in self._batches:
                if live.group == job.group:
                    live.join(job, running, opened.cache, logits)
                    return
        steps = StaticDecoding(self.model, STEPS, graphs=self._graphs)
        batch = Batch(self.model, opened.cache, logits, [running], steps, self._free)
        self._batches.append(_Live(self.model, self.held, job.group, [job], batch))


@dataclass(eq=False)
class _Live:
    """Requests over one cache, in the order of its entries.

    Attributes:
        joined: whether there have been several at a time.
    """

    model: PreTrainedModel
    held: Held
    group: Hashable
    jobs: list[Job]
    batch: Batch
    joined: bool = False

    def join(self, job: Job, running: Running, cache: KVCache, logits: torch.Tensor) -> None:
        self.joined = True
        if not self.batch.put(running, cache, logits):
            self.batch.add([running], [cache], [logits])
        self.jobs.append(job)

    def drop_cancelled(self) -> None:
        going = [i for i, job in enumerate(self.jobs) if not job.cancelled.is_set()]
        if len(going) < len(self.jobs):
            self.jobs = [self.jobs[i] for i in going]
            if going:
                self.batch.keep(going)

    def step(self) -> None:
        """Draw a token for each request, and end those that it ends."""
        ended = self.batch.step()
        for job, running in zip(self.jobs, self.batch.sequences, strict=True):
            job.on_token(running.new[-1])
        for entry, ends in enumerate(ended):
            if ends and not self.jobs[entry].cancelled.is_set():
                self._end(entry)
        going = [i for i, ends in enumerate(ended) if not ends]
        self.jobs = [self.jobs[i] for i in going]
        if going:
            self.batch.go_on(going)

    def _end(self, entry: int) -> None:
        """Hand over an answer, and hold its conversation."""
        job, running = self.jobs[entry], self.batch.sequences[entry]
        opened = job.opened
        assert opened is not None, "which was admitted"
        cache = self.batch.cache
        cache = take_entry(cache, self.batch.places[entry]) if self.joined else cache
        new = running.new
        cache.remember(running.known)
        answer = Answer(
            new,
            len(new) < job.max_new_tokens or new[-1] in end_tokens(self.model),
            cache.report(),
            opened.asked.ids.shape[1],
            opened.held,
        )
        if opened.talk is not None:
            opened.talk.move_to(cache)
            opened.talk.take(opened.asked, len(new))
            key = None if job.keep_as is None else job.keep_as(answer)
            if key is not None:
                self.held.add(key, opened.talk)
        job.on_end(answer)
