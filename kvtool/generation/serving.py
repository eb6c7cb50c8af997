"""Answer many prompts over one cache: a row that ends makes room for the next prompt.

Every prompt is read alone, and its rows join those that run (`kvtool.cache.rows`): so an answer is
the one that the prompt gets alone, and short answers do not wait for long ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvtool.cache.cache import KVCache
from kvtool.cache.rows import append_rows, keep_rows
from kvtool.errors import KvtoolError
from kvtool.generation.decoding import StopsAt, longer
from kvtool.generation.feeding import decode_step, prefill, wait
from kvtool.generation.finite import broken_rows, explain
from kvtool.generation.model_settings import Prepared, check_drawing, drawing_settings, prepare


@dataclass(frozen=True)
class Waiting:
    """A prompt that waits for its row.

    Attributes:
        index: by which its answer is known; added to the seed of its draws.
        ids: (1, n) int64.
        row_bytes: of the cache that its row takes at most.
    """

    index: int
    ids: Tensor
    max_new_tokens: int
    row_bytes: int = 0


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
        most_rows: in flight at a time.
        new_tokens: of all answers, those that run included.
        seconds: from the first prompt to the last token.
        reading_seconds: of these, those in which prompts were read and nobody wrote.
    """

    most_rows: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    reading_seconds: float = 0.0

    def read(self, seconds: float) -> None:
        """Count the reading of prompts."""
        self.reading_seconds += seconds

    def count(self, rows: int, seconds: float) -> None:
        """Count a token of each row, so many seconds after the beginning."""
        self.most_rows = max(self.most_rows, rows)
        self.new_tokens, self.seconds = self.new_tokens + rows, seconds

    def in_words(self, answers: int) -> str:
        """Say what so many answers have taken."""
        if self.seconds <= 0:
            return "nothing was left to answer"
        speed = self.new_tokens / self.seconds
        return (
            f"{answers} prompts answered: {self.new_tokens} tokens at {speed:.1f} tokens/s, "
            f"{self.reading_seconds:.1f} of {self.seconds:.1f} s for the reading of prompts; up to "
            f"{self.most_rows} at a time"
        )


@dataclass(frozen=True)
class Drawing:
    """How tokens are drawn, and what ends an answer beside its length and the end of the text."""

    temperature: float = 0.0
    seed: int = 0
    stop: Sequence[str] = ()


@dataclass
class _Row:
    """A prompt in flight.

    Attributes:
        text: (1, tokens and room for more) int64 on the CPU.
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
            return torch.multinomial(scores.softmax(-1), 1, generator=self.generator)[:, 0]
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
    most_rows: int | None = None,
    drawing: Drawing | None = None,
    served: Served | None = None,
    stop_when: Callable[[], bool] | None = None,
) -> Iterator[Answered]:
    """Answer prompts in turn, as many at a time as a memory holds.

    Slots of a batch are as many as its largest row takes, so that a memory holds as many rows as
    go into it if all were as large.

    Args:
        new_cache: makes an empty cache, the same for every prompt.
        memory: bytes of the rows in flight; None: no bound.
        most_rows: rows in flight; None: no bound.
        served: is kept up to date.
        stop_when: asked before every token whether to end there.

    Yields:
        Answers as they end.

    Raises:
        KvtoolError: a row that alone is larger than the memory, before anything is read.
        BrokenNumbers: logits are not finite.
    """
    drawing, served = drawing or Drawing(), served or Served()
    room = _Room(memory, most_rows)
    for prompt in prompts:
        room.check(prompt)
    settings = drawing_settings(model, 1, drawing.temperature, 0)
    check_drawing(model, tokenizer, settings)
    waiting, batch = deque(prompts), None
    start = time.perf_counter()
    while waiting or batch is not None:
        coming = room.admit([] if batch is None else batch.prompts, waiting)
        if coming:
            begun = time.perf_counter()
            caches, firsts = _read(model, tokenizer, new_cache, coming)
            served.read(time.perf_counter() - begun)
            rows = [_begin(model, tokenizer, prompt, drawing) for prompt in coming]
            batch = _join(batch, rows, caches, firsts)
        if batch is None:
            raise RuntimeError("there is room for a prompt where none runs")
        if stop_when is not None and stop_when():
            return
        ended = _step(model, batch.rows, batch.logits)
        served.count(len(ended), time.perf_counter() - start)
        yield from (row.answer() for row, ends in zip(batch.rows, ended, strict=True) if ends)
        going = [place for place, ends in enumerate(ended) if not ends]
        if going:
            batch.go_on(model, going)
        else:
            batch = None
    wait(model)


@dataclass
class _Batch:
    """The rows in flight, over one cache.

    Attributes:
        logits: (rows, vocab) of the token behind the last of each.
    """

    cache: KVCache
    logits: Tensor
    rows: list[_Row]

    @property
    def prompts(self) -> list[Waiting]:
        """The prompts of the rows."""
        return [row.prompt for row in self.rows]

    def add(
        self, rows: Sequence[_Row], caches: Sequence[KVCache], logits: Sequence[Tensor]
    ) -> None:
        """Let rows join, each with its cache and its (1, vocab) logits."""
        self.rows += rows
        if caches:
            append_rows(self.cache, caches, self._coming())
        self.logits = torch.cat([self.logits, *logits])

    def go_on(self, model: PreTrainedModel, going: Sequence[int]) -> None:
        """Drop all rows but these, and read the newest token of each."""
        if len(going) < len(self.rows):
            self.rows = [self.rows[place] for place in going]
            keep_rows(self.cache, torch.tensor(going), self._coming())
        tokens = torch.tensor([row.new[-1] for row in self.rows], device=model.device)
        self.logits = decode_step(model, self.cache, tokens)

    def _coming(self) -> int:
        """Count the tokens that come before one of the rows has to end."""
        return min(row.prompt.max_new_tokens - len(row.new) for row in self.rows)


def _join(
    batch: _Batch | None, rows: list[_Row], caches: list[KVCache], logits: list[Tensor]
) -> _Batch:
    """Let rows join a batch; the first of them begins it where there is none."""
    if batch is None:
        batch = _Batch(caches.pop(0), logits.pop(0), [rows.pop(0)])
    batch.add(rows, caches, logits)
    return batch


@dataclass(frozen=True)
class _Room:
    """How many rows may be in flight."""

    memory: int | None
    rows: int | None

    def check(self, prompt: Waiting) -> None:
        if self.memory is not None and prompt.row_bytes > self.memory:
            raise KvtoolError(
                f"prompt {prompt.index} takes {prompt.row_bytes} bytes of cache, and the memory is "
                f"{self.memory}",
                hint="give more --memory, or a smaller --budget",
            )

    def admit(self, running: Sequence[Waiting], waiting: deque[Waiting]) -> list[Waiting]:
        """Take from the queue the prompts that may join those that run."""
        coming: list[Waiting] = []
        while waiting and self.takes([*running, *coming], waiting[0]):
            coming.append(waiting.popleft())
        return coming

    def takes(self, running: Sequence[Waiting], prompt: Waiting) -> bool:
        """Tell whether one more prompt may join those that run."""
        count = len(running) + 1
        if not running:
            return True
        if self.rows is not None and count > self.rows:
            return False
        largest = max(each.row_bytes for each in (*running, prompt))
        return self.memory is None or largest * count <= self.memory


def _read(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    new_cache: Callable[[], KVCache],
    prompts: Sequence[Waiting],
) -> tuple[list[KVCache], list[Tensor]]:
    """Read each prompt alone: their caches, and the (1, vocab) logits after each."""
    caches, logits = [], []
    for prompt in prompts:
        cache = new_cache()
        new = prompt.max_new_tokens
        logits.append(prefill(model, cache, prompt.ids, new_tokens=new, tokenizer=tokenizer))
        caches.append(cache)
    return caches, logits


def _begin(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: Waiting, drawing: Drawing
) -> _Row:
    """Take a row's settings from transformers' own generate, which runs nothing here."""
    ids = prompt.ids.to(model.device)
    stops = [StopsAt(tokenizer, drawing.stop, ids.shape[1])] if drawing.stop else []
    settings = drawing_settings(model, prompt.max_new_tokens, drawing.temperature, 0)
    made = prepare(model, tokenizer, ids, settings, stops)
    text = longer(prompt.ids.cpu(), ids.shape[1] + prompt.max_new_tokens)
    generator = torch.Generator(model.device).manual_seed(drawing.seed + prompt.index)
    return _Row(prompt, made, generator, text)


def _step(model: PreTrainedModel, rows: Sequence[_Row], logits: Tensor) -> list[bool]:
    """Draw a token for each row; which rows it ends. The host waits for a step once."""
    broken = broken_rows(logits)
    if any(row.made.processors or row.made.settings.do_sample for row in rows):
        whole = logits.masked_fill(broken[:, None], 0.0)
        drawn = torch.cat([row.draw(own) for row, own in zip(rows, whole.split(1), strict=True)])
    else:
        drawn = logits.argmax(-1)
    tokens, bad = torch.stack([drawn, broken.to(drawn.dtype)]).tolist()
    if any(bad):
        raise explain(model, rows[bad.index(1)].known.to(model.device))
    return [row.take(token) for row, token in zip(rows, tokens, strict=True)]
