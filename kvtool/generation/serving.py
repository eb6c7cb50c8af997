"""Answer many prompts over one cache: an answer that ends frees its place for the next prompt.

Every prompt is read alone, and its entry joins those that run (`kvtool.cache.whole.batching`). So
an answer is the one that the prompt gets alone, and short answers do not wait for long ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvtool.cache.whole.batching import append_entries, keep_entries
from kvtool.cache.whole.cache import KVCache
from kvtool.errors import KvtoolError
from kvtool.generation.broken_numbers import broken_entries, explain
from kvtool.generation.decoding import StopsAt, longer, sample
from kvtool.generation.feeding import decode_step, prefill, wait
from kvtool.generation.model_settings import Prepared, check_drawing, drawing_settings, prepare


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
        seconds: from the first prompt to the last token.
        reading_seconds: of these, those in which prompts were read and no answer was written.
    """

    most_sequences: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    reading_seconds: float = 0.0

    def read(self, seconds: float) -> None:
        """Count the reading of prompts."""
        self.reading_seconds += seconds

    def count(self, sequences: int, seconds: float) -> None:
        """Count a token of each sequence, at a number of seconds after the beginning."""
        self.most_sequences = max(self.most_sequences, sequences)
        self.new_tokens, self.seconds = self.new_tokens + sequences, seconds

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
    waiting, batch = deque(prompts), None
    start = time.perf_counter()
    while waiting or batch is not None:
        sizes: list[int] = (
            [] if batch is None else [each.prompt.sequence_bytes for each in batch.sequences]
        )
        coming, begun = [], time.perf_counter()
        while waiting and room.takes([[*sizes, waiting[0].sequence_bytes]]):
            prompt, cache = waiting.popleft(), new_cache()
            sizes.append(prompt.sequence_bytes)
            new = prompt.max_new_tokens
            logits = prefill(model, cache, prompt.ids, new_tokens=new, tokenizer=tokenizer)
            coming.append((begin(model, tokenizer, prompt, drawing), cache, logits))
        if coming:
            served.read(time.perf_counter() - begun)
            if batch is None:
                sequence, cache, logits = coming.pop(0)
                batch = Batch(cache, logits, [sequence])
            if coming:
                batch.add(*map(list, zip(*coming, strict=True)))
        assert batch is not None, "there is room for a prompt where none runs"
        if stop_when is not None and stop_when():
            return
        ended = step_all(model, batch.sequences, batch.logits)
        served.count(len(ended), time.perf_counter() - start)
        yield from (
            sequence.answer() for sequence, ends in zip(batch.sequences, ended, strict=True) if ends
        )
        going = [place for place, ends in enumerate(ended) if not ends]
        if going:
            batch.go_on(model, going)
        else:
            batch = None
    wait(model)


@dataclass
class Batch:
    """The sequences in flight, over one cache.

    Attributes:
        logits: (rows, vocab) of the token behind the last of each.
    """

    cache: KVCache
    logits: Tensor
    sequences: list[Running]

    def add(
        self, sequences: Sequence[Running], caches: Sequence[KVCache], logits: Sequence[Tensor]
    ) -> None:
        """Let sequences join, each with its cache and its (1, vocab) logits."""
        self.sequences += sequences
        append_entries(self.cache, caches, self._coming())
        self.logits = torch.cat([self.logits, *logits])

    def keep(self, going: Sequence[int]) -> None:
        """Drop all sequences but these."""
        if len(going) < len(self.sequences):
            self.sequences = [self.sequences[place] for place in going]
            self.logits = self.logits[torch.tensor(going, device=self.logits.device)]
            keep_entries(self.cache, torch.tensor(going), self._coming())

    def go_on(self, model: PreTrainedModel, going: Sequence[int]) -> None:
        """Drop all sequences but these, and read the newest token of each."""
        self.keep(going)
        tokens = torch.tensor(
            [sequence.new[-1] for sequence in self.sequences], device=model.device
        )
        self.logits = decode_step(model, self.cache, tokens)

    def _coming(self) -> int:
        """Count the tokens that come before one of the sequences has to end."""
        return min(
            sequence.prompt.max_new_tokens - len(sequence.new) for sequence in self.sequences
        )


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

    def takes(self, batches: Sequence[Sequence[int]]) -> bool:
        """Return whether batches of sequences of these sizes fit; one alone always does."""
        count = sum(map(len, batches))
        few = self.sequences is None or count <= self.sequences
        fit = self.memory is None or bytes_of(batches) <= self.memory
        return count == 1 or (few and fit)


def bytes_of(batches: Sequence[Sequence[int]]) -> int:
    """Return the bytes of batches, each of which is as wide as its largest sequence."""
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


def step_all(model: PreTrainedModel, sequences: Sequence[Running], logits: Tensor) -> list[bool]:
    """Draw a token for each sequence; which sequences it ends. The host waits for a step once."""
    broken = broken_entries(logits)
    if any(sequence.made.processors or sequence.made.settings.do_sample for sequence in sequences):
        whole = logits.masked_fill(broken[:, None], 0.0)
        drawn = torch.cat(
            [sequence.draw(own) for sequence, own in zip(sequences, whole.split(1), strict=True)]
        )
    else:
        drawn = logits.argmax(-1)
    tokens, bad = torch.stack([drawn, broken.to(drawn.dtype)]).tolist()
    if any(bad):
        raise explain(model, sequences[bad.index(1)].known.to(model.device))
    return [sequence.take(token) for sequence, token in zip(sequences, tokens, strict=True)]
