"""Answer many prompts over one cache: an answer that ends frees its place for the next prompt.

Every prompt is read alone, and its entry joins those that run (`kvtool.cache.whole.batching`). So
an answer is the one that the prompt gets alone, and short answers do not wait for long ones.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvtool.cache.whole.batching import append_entries, keep_entries, put_entry
from kvtool.cache.whole.cache import KVCache
from kvtool.errors import KvtoolError
from kvtool.generation.broken_numbers import broken_entries, explain
from kvtool.generation.decoding import ENDS_BY_TOKENS, StopsAt, Told, longer, sample
from kvtool.generation.feeding import learned_positions, prefill, wait
from kvtool.generation.graphs import StaticDecoding
from kvtool.generation.model_settings import Prepared, check_drawing, drawing_settings, prepare

_BUCKETS = (1, 2, 4, 8, 16, 32)
"""Places of a batch whose steps are recorded; above, multiples of the last."""
_SPARED = 8  # of more places that a memory holds, one is left for the prompt that is read next
STEPS = 2048
"""Steps that a batch may run, as far as is known when it begins."""


@dataclass(frozen=True)
class Waiting:
    """A prompt that waits for its place in the batch.

    Attributes:
        index: by which its answer is known; added to the seed of its draws.
        ids: (1, n) int64.
        sequence_bytes: of the cache that its sequence takes at most.
    """

    index: int
    ids: Tensor
    max_new_tokens: int
    sequence_bytes: int = 0


@dataclass(frozen=True)
class Answered:
    """The answer to a prompt; `token_ids` holds new tokens only, an end-of-text token included."""

    index: int
    token_ids: list[int]
    prompt_tokens: int


@dataclass
class Served:
    """What answering has taken so far.

    Attributes:
        most_sequences: in flight at a time.
        new_tokens: of all answers, those that run included.
        seconds: from the first prompt to the last token, without those of the caller.
        reading_seconds: of these, those in which prompts were read and no answer was written.
    """

    most_sequences: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    reading_seconds: float = 0.0

    def read(self, seconds: float, prompt: Waiting, cache: KVCache) -> None:
        """Count the reading of a prompt by its cache."""
        self.reading_seconds += seconds
        self.seconds += seconds

    def count(self, sequences: Sequence[Running], seconds: float) -> None:
        """Count a token of each sequence, at a number of such seconds."""
        self.most_sequences = max(self.most_sequences, len(sequences))
        self.new_tokens, self.seconds = self.new_tokens + len(sequences), seconds

    def end(self, sequence: Running, cache: KVCache, place: int) -> None:
        """Take note of an answer that has ended, in its place of the batch."""

    def in_words(self, answers: int) -> str:
        """Say what a number of answers has taken."""
        if self.seconds <= 0:
            return "nothing was left to answer"
        speed = self.new_tokens / self.seconds
        return (
            f"{answers} prompts answered: {self.new_tokens} tokens at {speed:.1f} tokens/s, "
            f"{self.reading_seconds:.1f} of {self.seconds:.1f} s for the reading of prompts; up to "
            f"{self.most_sequences} at a time"
        )


@dataclass(frozen=True)
class Drawing:
    """How tokens are drawn, and what ends an answer beside its length and the end of the text.

    Attributes:
        top_p: where tokens are drawn at random, from the likeliest of this share; None: the model's
            own.
    """

    temperature: float = 0.0
    seed: int = 0
    stop: Sequence[str] = ()
    top_p: float | None = None


@dataclass
class Running:
    """A prompt in flight.

    Attributes:
        text: (1, tokens and empty places for more) int64 on the CPU.
    """

    prompt: Waiting
    made: Prepared
    generator: torch.Generator
    text: Tensor
    new: list[int] = field(default_factory=list)

    @property
    def known(self) -> Tensor:
        """The prompt and the answer so far: (1, tokens) int64 on the CPU."""
        return self.text[:, : self.prompt.ids.shape[1] + len(self.new)]

    @property
    def greedy(self) -> bool:
        """Whether the likeliest tokens are drawn."""
        return not (self.made.processors or self.made.settings.do_sample)

    @property
    def can_wait(self) -> bool:
        """Whether the text decides neither what is drawn nor where it ends."""
        return self.greedy and all(isinstance(each, ENDS_BY_TOKENS) for each in self.made.criteria)

    def draw(self, logits: Tensor) -> Tensor:
        """Draw the next token from (1, vocab) logits: (1,) int64."""
        scores = self.made.processors(self.known.to(logits.device), logits)
        if self.made.settings.do_sample:
            return sample(scores, self.generator)
        return scores.argmax(-1)

    def take(self, token: int) -> bool:
        """Add a token, and say whether it ends the answer."""
        place = self.known.shape[1]
        if place == self.text.shape[1]:
            self.text = longer(self.text, self.prompt.ids.shape[1] + self.prompt.max_new_tokens)
        self.text[0, place] = token
        self.new.append(token)
        return bool(self.made.criteria(self.known, None).all())

    def answer(self) -> Answered:
        """Return what has been written."""
        return Answered(self.prompt.index, self.new, self.prompt.ids.shape[1])


def serve(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    new_cache: Callable[[], KVCache],
    prompts: Sequence[Waiting],
    *,
    memory: int | None = None,
    most_sequences: int | None = None,
    drawing: Drawing | None = None,
    served: Served | None = None,
    stop_when: Callable[[], bool] | None = None,
    graphs: bool = True,
) -> Iterator[Answered]:
    """Answer prompts in turn, as many at a time as a memory holds.

    Slots of a batch are as many as its largest sequence takes, so that a memory holds as many
    sequences as go into it if all were as large.

    Args:
        new_cache: makes an empty cache, the same for every prompt.
        memory: bytes of the sequences in flight; None: no bound.
        most_sequences: sequences in flight; None: no bound.
        served: is kept up to date.
        stop_when: asked before every token whether to end there.
        graphs: whether steps are recorded and replayed as CUDA graphs, where that can be done.

    Yields:
        Answers as they end.

    Raises:
        KvtoolError: a sequence that alone is larger than the memory, before anything is read.
        BrokenNumbers: logits are not finite.
    """
    drawing, served = drawing or Drawing(), served or Served()
    room = Room(memory, most_sequences)
    for prompt in prompts:
        room.check(prompt.sequence_bytes, f"prompt {prompt.index}")
    settings = drawing_settings(model, 1, drawing.temperature, 0)
    check_drawing(model, tokenizer, settings)
    largest = max((prompt.sequence_bytes for prompt in prompts), default=0)
    steps = StaticDecoding(model, STEPS, graphs=graphs)
    if steps.replays and memory is not None and memory > _SPARED * largest:
        room = Room(memory - largest, most_sequences)
    waiting, batch = deque(prompts), None
    start = time.perf_counter()
    while waiting or batch is not None:
        sizes: list[int] = [] if batch is None else batch.sizes_alone
        coming: list[tuple[Running, KVCache, Tensor]] = []
        begun = time.perf_counter()
        while waiting and room.takes(len(sizes) + 1, [[*sizes, waiting[0].sequence_bytes]]):
            prompt, cache = waiting.popleft(), new_cache()
            sizes.append(prompt.sequence_bytes)
            if batch is not None and memory is not None:
                beside = [each.prompt.sequence_bytes for each, *_ in coming]
                if bytes_of([[*batch.sizes, *beside, sizes[-1]]]) > memory:
                    batch.tighten()
            new = prompt.max_new_tokens
            logits = prefill(model, cache, prompt.ids, new_tokens=new, tokenizer=tokenizer)
            served.read(time.perf_counter() - begun, prompt, cache)
            begun = time.perf_counter()
            read = begin(model, tokenizer, prompt, drawing), cache, logits
            if batch is None or not batch.put(*read):
                coming.append(read)
        if coming and batch is None:
            sequence, cache, logits = coming.pop(0)
            batch = Batch(model, cache, logits, [sequence], steps, lambda _: room.memory)
        if coming and batch is not None:
            batch.add(*map(list, zip(*coming, strict=True)))
        assert batch is not None, "there is room for a prompt where none runs"
        if stop_when is not None and stop_when():
            return
        ended = batch.step()
        served.count(batch.sequences, time.perf_counter() - start)
        for sequence, place, ends in zip(batch.sequences, batch.places, ended, strict=True):
            if ends:
                left = time.perf_counter()
                served.end(sequence, batch.cache, place)
                yield sequence.answer()
                start += time.perf_counter() - left
        going = [i for i, ends in enumerate(ended) if not ends]
        if going:
            batch.go_on(going, len(waiting))
        else:
            batch = None
    wait(model)


@dataclass
class Batch:
    """The sequences in flight, over one cache.

    Where steps are recorded, a batch has as many places as one of `_BUCKETS`, as far as the memory
    allows. A sequence that has ended stays in its place, fed padding that no answer depends on. So
    the recording holds until a smaller bucket serves, or one comes that does not fit in there.

    Attributes:
        logits: (places, vocab) behind the last token in each place.
        memory: returns the bytes that a batch may take; None: no bound.
        places: those of the sequences.
    """

    model: PreTrainedModel
    cache: KVCache
    logits: Tensor
    sequences: list[Running]
    steps: StaticDecoding
    memory: Callable[[Batch], int | None] = lambda batch: None

    def __post_init__(self) -> None:
        self.places = list(range(len(self.sequences)))
        replays = self.steps.replays  # padding would run over the positions that are learned
        self._stays = replays and learned_positions(self.model) is None
        self._fed, self._widest = False, max(self.sizes_alone)
        self._left = self._remaining(max) if self._appends else sys.maxsize

    @property
    def fixed(self) -> bool:
        """Whether sequences that have ended stay in their places."""
        return self._stays and self.steps.replays

    @property
    def sizes(self) -> list[int]:
        """The bytes of each place."""
        return [self._widest] * len(self.logits) if self.fixed else self.sizes_alone

    @property
    def sizes_alone(self) -> list[int]:
        """The bytes of the sequences, as they would be without others."""
        return [sequence.prompt.sequence_bytes for sequence in self.sequences]

    def put(self, sequence: Running, cache: KVCache, logits: Tensor) -> bool:
        """Let a sequence take the place of one that has ended; whether it fits there."""
        free = [row for row in range(len(self.logits)) if row not in self.places]
        if not (self.fixed and free and put_entry(self.cache, free[0], cache)):
            return False
        self.logits[free[0]] = logits[0]
        self.sequences, self.places = [*self.sequences, sequence], [*self.places, free[0]]
        return True

    def add(
        self, sequences: Sequence[Running], caches: Sequence[KVCache], logits: Sequence[Tensor]
    ) -> None:
        """Let sequences join, each with its cache and its (1, vocab) logits."""
        self.tighten()
        self.sequences = [*self.sequences, *sequences]
        append_entries(self.cache, caches, self._remaining(min))
        self.logits = torch.cat([self.logits, *logits])
        self.places = list(range(len(self.sequences)))
        if self.fixed:
            self._make(self._rows(len(self.places)))

    def keep(self, going: Sequence[int], coming: int = 0) -> None:
        """Drop all sequences but these; `coming` may take their places at once."""
        self.sequences = [self.sequences[i] for i in going]
        self.places = [self.places[i] for i in going]
        if not self.fixed:
            self.tighten()
        elif self.places and self._rows(len(going) + coming) < len(self.logits):
            self._make(self._rows(len(going)))

    def tighten(self) -> None:
        """Take no more memory than the sequences need until one of them has to end."""
        wide = self.fixed and self._widest > max(self.sizes_alone)
        if wide or len(self.places) < len(self.logits):
            self._make(len(self.places), tight=True)

    def step(self) -> list[bool]:
        """Draw a token for each sequence; which sequences it ends.

        Where the likeliest tokens are drawn whatever the text is, the host reads them while they
        are fed: a sequence that ends has its last token fed as well.
        """
        sequences, places, logits = self.sequences, self.places, self.logits
        ahead = self.steps.replays and self._remaining(max) > 1
        ahead = ahead and all(sequence.can_wait for sequence in sequences)
        if not ahead and places != list(range(len(logits))):
            logits = logits[torch.tensor(places, device=logits.device)]
        broken = broken_entries(logits)
        if all(sequence.greedy for sequence in sequences):
            drawn = logits.argmax(-1)
        else:
            rows = logits.masked_fill(broken[:, None], 0.0).split(1)
            drawn = torch.cat([each.draw(row) for each, row in zip(sequences, rows, strict=True)])
        numbers = torch.stack([drawn, broken.to(drawn.dtype)])
        if ahead:
            told = Told(numbers)
            self._feed(drawn)
            self._fed = True
            numbers = told.read()[:, places]
        tokens, bad = numbers.tolist()
        if any(bad):
            raise explain(self.model, sequences[bad.index(1)].known.to(self.model.device))
        return [each.take(token) for each, token in zip(sequences, tokens, strict=True)]

    def go_on(self, going: Sequence[int], coming: int = 0) -> None:
        """Drop all sequences but these as `keep` does, and read the newest token of each."""
        self.keep(going, coming)
        if not self._fed and going:
            tokens = torch.zeros(len(self.logits), dtype=torch.int64)
            tokens[self.places] = torch.tensor([each.new[-1] for each in self.sequences])
            self._feed(tokens.to(self.model.device))
        self._fed = False

    def _feed(self, tokens: Tensor) -> None:
        if self.fixed and self._left < 1:
            tokens = tokens[self._make(self._rows(len(self.places)))]
        self.logits = self.steps.feed(self.cache, tokens)
        self._left -= 1

    def _rows(self, sequences: int) -> int:
        """Count the places of a batch of some sequences."""
        rows = next((size for size in _BUCKETS if size >= sequences), -(-sequences // 32) * 32)
        room, widest = self.memory(self), max(self.sizes_alone, default=0)
        return rows if room is None else max(sequences, min(rows, room // max(widest, 1)))

    def _make(self, rows: int, *, tight: bool = False) -> Tensor:
        """Have the places of the sequences alone, and copies of the last one up to a number.

        Returns:
            (places,) int64, which these were before.
        """
        entries = torch.tensor([*self.places, *self.places[-1:] * (rows - len(self.places))])
        before = entries.to(self.logits.device)
        if rows != len(self.logits) or self._left < 1 or tight:
            self.logits = self.logits[before]
            keep_entries(self.cache, entries, self._remaining(min))
            self.places = list(range(len(self.places)))
        if self.fixed:
            self._expect(0 if tight else self.memory(self))
        return before

    def _expect(self, room: int | None) -> None:
        """Take slots for as many tokens as are to come, and as the memory allows."""
        self._widest, self._left = max(self.sizes_alone), sys.maxsize
        if not self._appends:
            return
        self._left = self._remaining(max)
        if room is not None:
            rows, held, slot = len(self.logits), 0.0, 0.0
            for store in (store for each in self.cache.slot_layers for store in each.stores):
                slots = store.slots
                size = (slots.kv_bytes + slots.state_bytes) / max(slots.capacity, 1)
                held, slot = held + size * slots.used, slot + size * store.appends
            least = self._remaining(min)
            self._left = max(least, min(self._left, int((room - held) // max(slot, 1))))
            if self._left > least:
                self._widest = max(self._widest, int((held + slot * self._left) // rows) + 1)
        for layer in self.cache.slot_layers:
            layer.expect(self._left)

    @property
    def _appends(self) -> bool:
        return self.cache.policy.when != "always"

    def _remaining(self, most_or_least: Callable[[Iterable[int]], int]) -> int:
        """Count the tokens that come before one of the sequences, or all, have to end."""
        left = (each.prompt.max_new_tokens - len(each.new) for each in self.sequences)
        return most_or_least(left)


@dataclass(frozen=True)
class Room:
    """How many sequences may be in flight, and the bytes that their caches may take."""

    memory: int | None
    sequences: int | None

    def check(self, size: int, what: str, kind: type[KvtoolError] = KvtoolError) -> None:
        """Refuse a sequence that alone is larger than the memory."""
        if self.memory is not None and size > self.memory:
            raise kind(
                f"{what} takes {size} bytes of cache, and the memory is {self.memory}",
                hint="more memory, a smaller budget, a shorter text or fewer tokens",
            )

    def takes(self, sequences: int, batches: Sequence[Sequence[int]]) -> bool:
        """Return whether sequences in places of these sizes fit; one alone always does."""
        few = self.sequences is None or sequences <= self.sequences
        fit = self.memory is None or bytes_of(batches) <= self.memory
        return sequences == 1 or (few and fit)


def bytes_of(batches: Sequence[Sequence[int]]) -> int:
    """Return the bytes of batches, each of whose places is as wide as its widest."""
    return sum(max(sizes) * len(sizes) for sizes in batches if sizes)


def begin(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: Waiting, drawing: Drawing
) -> Running:
    """Take a sequence's settings from transformers' own generate, which runs nothing here."""
    ids = prompt.ids.to(model.device)
    stops = [StopsAt(tokenizer, drawing.stop, ids.shape[1])] if drawing.stop else []
    settings = drawing_settings(model, prompt.max_new_tokens, drawing.temperature, 0)
    if drawing.top_p is not None and settings.do_sample:
        settings.top_p = drawing.top_p
    made = prepare(model, tokenizer, ids, settings, stops)
    text = longer(prompt.ids.cpu(), ids.shape[1] + prompt.max_new_tokens)
    generator = torch.Generator(model.device).manual_seed(drawing.seed + prompt.index)
    return Running(prompt, made, generator, text)
