"""Draw one token after another; sampling and its settings are those of transformers.

What a token costs does not depend on how many came before. Ids go into a buffer that doubles where
it is full, and stop texts and streamed text look at the last tokens only. (Settings of transformers
that look at the whole text, such as a repetition penalty, do so.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from kvtool.cache.whole.cache import KVCache
from kvtool.generation.broken_numbers import broken_entries, explain, explaining
from kvtool.generation.graphs import StaticDecoding
from kvtool.generation.model_settings import Prepared, end_tokens

_FEWEST = 256  # tokens of a text's buffer
_BYTES = 4  # of a character at most, and a token has one or more
_MARGIN = 8  # tokens before a stop text, for tokenizers whose first token loses a space
_HELD, _CONTEXT = 64, 16  # tokens of streamed text that are decoded again, and that stay
_CLEANED = 32  # characters at the end of a text that the clean-up of spaces may still change
_BYTE = re.compile("<0x[0-9A-F]{2}>")
ENDS_BY_TOKENS = (EosTokenCriteria, MaxLengthCriteria)
"""What ends a text without a look at what it says."""


class Drawing:
    """Draws a token for each sequence, and says which sequences go on.

    What is drawn lies at fixed addresses. So where nothing looks at the text, drawing can be
    recorded as a part of the step that comes before it.

    Attributes:
        token: (rows,) int64, the last ones drawn.
        generators: that they are drawn by.
        fixed: whether all of it depends on the logits alone.
    """

    def __init__(
        self, input_ids: Tensor, made: Prepared, generator: torch.Generator | None = None
    ) -> None:
        """Begin behind (rows, n) the text so far."""
        rows, device = len(input_ids), input_ids.device
        self._processors, self._samples = made.processors, bool(made.settings.do_sample)
        self._padding, self.most = made.settings._pad_token_tensor, made.settings.max_length
        ends = [each for each in made.criteria if isinstance(each, EosTokenCriteria)]
        self._ends = [each.eos_token_id.to(device) for each in ends]
        self._asks = [each for each in made.criteria if not isinstance(each, ENDS_BY_TOKENS)]
        self.fixed = all(type(each).__name__ in _OF_LOGITS for each in made.processors)
        self.generators = [] if generator is None or not self._samples else [generator]
        self.token = input_ids.new_zeros(rows)
        self._told = input_ids.new_zeros(3, rows)
        self._running = torch.ones(rows, dtype=torch.bool, device=device)
        self._here = longer(input_ids.cpu(), self.most)
        self._there = None if self.fixed else longer(input_ids, self.most)
        self.written = self.read = input_ids.shape[1]

    @property
    def text(self) -> Tensor:
        """The text as far as the host has read it, (rows, n) on the CPU."""
        return self._here[:, : self.read]

    @property
    def can_wait(self) -> bool:
        """Whether the host may read a token after the next one has been drawn.

        It may not where it ends one of several sequences, whose padding is fed from then on.
        """
        return not self._asks or len(self.token) == 1

    def __call__(self, logits: Tensor) -> None:
        """Draw from (rows, vocab) logits; the host does not wait."""
        broken = broken_entries(logits)
        text = self.token[:, None] if self._there is None else self._there[:, : self.written]
        scores = self._processors(text, logits.masked_fill(broken[:, None], 0.0))
        token = sample(scores, self.generators[0]) if self._samples else scores.argmax(-1)
        if self._padding is not None:
            token = torch.where(self._running, token, self._padding)
        broken &= self._running
        for ends in self._ends:
            self._running &= (token[:, None] != ends).all(1)
        self.token.copy_(token)
        torch.stack([token, broken.to(token.dtype), self._running.to(token.dtype)], out=self._told)

    def tell(self) -> Told:
        """Send what has been drawn to the host."""
        if self._there is not None:
            if self.written == self._there.shape[1]:
                self._there = longer(self._there, self.most)
            self._there[:, self.written] = self.token
        self.written += 1
        return Told(self._told)

    def take(self, told: Tensor) -> bool:
        """Add (3, rows) of what has arrived to the text; whether any sequence goes on."""
        if self.read == self._here.shape[1]:
            self._here = longer(self._here, self.most)
        self._here[:, self.read] = told[0]
        self.read += 1
        running = told[2].bool()
        for ask in self._asks:
            done = ask(self.text, None).cpu()
            if bool((running & done).any()):
                running &= ~done
                self._running &= ~done.to(self._running.device)
        return bool(running.any()) and self.read < self.most


def sample(scores: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a token for each of (rows, vocab) scores, as torch.multinomial does: (rows,) int64.

    That one has the host look at the scores first.
    """
    shares = scores.softmax(-1)
    return (shares / torch.empty_like(shares).exponential_(1, generator=generator)).argmax(-1)


class Told:
    """Numbers on their way to the host, which may go on before it needs them."""

    def __init__(self, numbers: Tensor) -> None:
        self._arrived = None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(numbers.device))
        else:
            self._numbers = numbers.cpu().clone()

    def read(self) -> Tensor:
        """Wait for them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._numbers


_OF_LOGITS = frozenset(
    {
        *("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper"),
        *("TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper"),
    }
)
"""What transformers makes of settings that neither looks at the text nor asks the host."""


@torch.no_grad()
def decode_loop(
    model: PreTrainedModel,
    cache: KVCache,
    drawing: Drawing,
    next_logits: Tensor,
    steps: StaticDecoding,
    *,
    streamer: Callback | None = None,
    kept_logits: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Draw from the logits that a prompt has left, and go on.

    The host waits for a token once: it reads the tokens, whether any logits were broken and whether
    any sequence goes on. Where steps are replayed, it reads them while the next step runs; a text
    that has ended by then has its last token fed as well.

    Returns:
        (rows, more) the text and what follows it, on the CPU, and the logits behind it, (rows,
        vocab), where its last token has been fed.

    Raises:
        BrokenNumbers: the logits of a sequence that still runs are not finite.
    """
    draw = drawing if drawing.fixed and steps.replays else None  # by the recording, too

    def feed() -> Tensor:
        with explaining(model, drawing.text):
            logits = steps.feed(cache, drawing.token, draw)
            if draw is None:
                drawing(logits)
        return logits

    logits = next_logits
    drawing(logits)
    while True:
        if kept_logits is not None:
            kept_logits.append(logits.to("cpu", copy=True))
        told = drawing.tell()
        ahead = steps.replays and drawing.can_wait and drawing.written < drawing.most
        if ahead:
            logits = feed()
        read = told.read()
        if read[1].any():
            row = int(read[1].nonzero()[0])
            raise explain(model, drawing.text[row : row + 1])
        goes_on = drawing.take(read)
        if streamer is not None:
            streamer.put(read[0])
        if not goes_on:
            if streamer is not None:
                streamer.end()
            return drawing.text, logits.clone() if ahead else None
        if not ahead:
            logits = feed()


def longer(text: Tensor, most: int) -> Tensor:
    """Return a text in a buffer of twice its length, and no more than it can come to."""
    rows, tokens = text.shape
    buffer = text.new_zeros(rows, min(most, max(2 * tokens, _FEWEST)))
    buffer[:, :tokens] = text
    return buffer


class StopsAt(StoppingCriteria):
    """Ends a sequence when its text from token `start` on holds one of the given texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], start: int) -> None:
        self._tokenizer, self._stop, self._start = tokenizer, stop, start
        self._tokens = _BYTES * max(len(text) for text in stop) + _MARGIN

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs) -> Tensor:
        start = max(self._start, input_ids.shape[1] - self._tokens)
        texts = self._tokenizer.batch_decode(input_ids[:, start:], skip_special_tokens=True)
        done = [any(text in row for text in self._stop) for row in texts]
        return torch.tensor(done, device=input_ids.device)


class StopText:
    """Cuts an answer where the first of its stop texts begins."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts, self._waiting, self.found = tuple(texts), "", False

    def cut(self, text: str) -> str:
        """Return a whole text up to the first stop text."""
        places = [place for place in (text.find(stop) for stop in self._texts) if place >= 0]
        return text[: min(places)] if places else text

    def feed(self, text: str, write: Callable[[str], None]) -> None:
        """Write what cannot be the beginning of a stop text."""
        if self.found:
            return
        known = self._waiting + text
        cut = self.cut(known)
        self.found = cut != known
        keep = 0 if self.found else self._open(cut)
        self._waiting = cut[len(cut) - keep :]
        if len(cut) > keep:
            write(cut[: len(cut) - keep])

    def end(self, write: Callable[[str], None]) -> None:
        """Write what has waited."""
        if self._waiting:
            write(self._waiting)
        self._waiting = ""

    def _open(self, text: str) -> int:
        """Count the characters at the end that a stop text may begin with."""
        longest = max(map(len, self._texts), default=1) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((n for n in sizes if any(s.startswith(text[-n:]) for s in self._texts)), 0)


class StopsWhen(StoppingCriteria):
    """Ends all sequences once a function says so."""

    def __init__(self, stop_when: Callable[[], bool]) -> None:
        self._stop_when = stop_when

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs) -> Tensor:
        return torch.full((input_ids.shape[0],), self._stop_when(), device=input_ids.device)


class Callback:
    """Hands text to a function as soon as no later token can change it.

    The pieces add up to the text of all tokens at once. So a piece waits for what completes its
    last character, and bytes of a byte fallback for the end of their run, which reads as one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        on_text: Callable[[str], None],
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer, self._on_text, self._skip = tokenizer, on_text, skip_special_tokens
        self._tokens: list[int] = []  # that are decoded again, the last of which are new
        self._told = 0  # characters of their text that have been handed on
        self._run = 0  # tokens at their end that are bytes
        self._open = _CLEANED if tokenizer.clean_up_tokenization_spaces else 0
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._left_out = special.union(tokenizer.all_special_ids) if skip_special_tokens else set()

    def put(self, tokens: Tensor) -> None:
        """Take (n,) new tokens."""
        for token in tokens.tolist():
            name = str(self._tokenizer.convert_ids_to_tokens(token))
            goes_on = _BYTE.fullmatch(name) or (self._run and token in self._left_out)
            self._run = self._run + 1 if goes_on else 0
            self._tokens.append(token)
        certain = self._decode(self._tokens[: len(self._tokens) - self._run])
        self._tell(certain, len(certain.removesuffix("\ufffd")) - self._open)
        if len(self._tokens) - self._run > _HELD:
            self._forget()

    def end(self) -> None:
        """Hand on all that is left."""
        text = self._decode(self._tokens)
        self._tell(text, len(text))
        self._tokens, self._told, self._run = [], 0, 0

    def _tell(self, text: str, end: int) -> None:
        if end > self._told:
            self._on_text(text[self._told : end])
            self._told = end

    def _forget(self) -> None:
        """Drop all tokens but the last ones, which decide how the next ones read."""
        last = self._tokens[-_CONTEXT - self._run :]
        text, rest = self._decode(self._tokens), self._decode(last)
        before = len(text) - len(rest)
        if rest and text.endswith(rest) and before <= self._told:
            self._tokens, self._told = last, self._told - before

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip)


def until_end(row: list[int], model: PreTrainedModel) -> list[int]:
    """Return the tokens up to the end-of-text token, which stays, without the padding behind it."""
    ends = end_tokens(model)
    for i, token in enumerate(row):
        if token in ends:
            return row[: i + 1]
    return row
