"""Have a model repeat its prompt, chunk by chunk, over a cache that holds it; then cut it.

A prompt that is read in blocks is repeated and cut after each. The scores of what stays are not
computed again: each cut leaves what one cut by all scores would leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import compress, takewhile

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvtool.cache.features.repetition import Instructions, RepeatedWeights, Repetition
from kvtool.cache.whole.cache import KVCache, entry_budgets, storing_nothing
from kvtool.errors import UsageError
from kvtool.models.chat import Frame, continued_ids
from kvtool.policies.evidence import RepetitionAsked

Forward = Callable[[KVCache, Tensor, Tensor | None], object]
Span = tuple[int, int]


def plain_instructions(tokenizer: PreTrainedTokenizerBase, asked: RepetitionAsked) -> Instructions:
    """Return what goes around a prompt without a chat template."""
    first, later = (tuple(continued_ids(tokenizer, text)) for text in (asked.first, asked.later))
    return Instructions(first, later)


def chat_instructions(
    tokenizer: PreTrainedTokenizerBase,
    asked: RepetitionAsked,
    frame: Frame,
    ids: Sequence[int],
    ending: str,
) -> Instructions:
    """Return what goes around a prompt in a chat template.

    The instruction ends the user's message that is still open, or is the next one.
    """

    def instruction_ids(text: str) -> tuple[int, ...]:
        asks = frame.next + frame.message(text) if ending else text
        return tuple(continued_ids(tokenizer, asks + frame.closing))

    opening = tokenizer(frame.opening, add_special_tokens=frame.special)["input_ids"]
    behind = continued_ids(tokenizer, ending)[::-1]
    return Instructions(
        instruction_ids(asked.first),
        instruction_ids(asked.later),
        _shared(ids, opening),
        _shared(ids[::-1], behind),
    )


def _shared(ids: Sequence[int], others: Sequence[int]) -> int:
    """Count the tokens with which both begin."""
    equal = (a == b for a, b in zip(ids, others, strict=False))
    return sum(1 for _ in takewhile(bool, equal))


def instruct_chat(
    cache: KVCache, tokenizer: PreTrainedTokenizerBase, frame: Frame, ids: Tensor, ending: str
) -> None:
    """Give a cache the instructions by which one prompt in a chat template is repeated, if it is.

    Args:
        ids: (1, n) int64.
        ending: as for `chat_instructions`.
    """
    part = Repetition.of(cache)
    if part is not None and not part.ended and frame.closing:
        row = ids[0].tolist()
        part.instruct(chat_instructions(tokenizer, part.asked, frame, row, ending))


def begin_prompt(cache: KVCache, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Give a cache the instructions to repeat the next prompt, if its policy repeats prompts.

    Raises:
        UsageError: there are no instructions, and no tokenizer.
    """
    part = Repetition.of(cache)
    if part is None:
        return
    if part.instructions is None and tokenizer is not None:
        part.instruct(plain_instructions(tokenizer, part.asked))
    part.announce()


def repeat_prompt(
    caches: Sequence[KVCache],
    rows: Sequence[Sequence[int]],
    forward: Forward,
    read: Sequence[int] | None = None,
) -> None:
    """Repeat what caches have just read of a prompt, once for all, and cut each to its own budget.

    Where the prompt fits the budget, nothing is repeated or cut.

    Args:
        caches: of one policy, which hold it whole and repeat it in the same words.
        rows: token ids of each batch entry, of the prompt.
        read: tokens of each entry that were repeated with the blocks before; None: none were, and
            all of the prompt has been read.
        forward: runs the model over a cache and (batch, n) int64 tokens and bool, which of them are
            no padding; None: all.

    Raises:
        UsageError: what is not repeated fills the budget of an entry.
    """
    part = Repetition.of(caches[0])
    if part is None or part.ended or part.instructions is None:
        return
    asked, instructions = part.asked, part.instructions
    spans = [
        [
            _span(asked, instructions, len(row), budget)
            for row, budget in zip(rows, entry_budgets(cache), strict=True)
        ]
        for cache in caches
    ]
    are_cut = [any(start < end for start, end in own) for own in spans]
    cut = list(compress(caches, are_cut))
    of_any = [min(own) for own in zip(*spans, strict=True)]  # where all of it fits, it is empty
    lengths = [*map(len, rows)]
    ends = lengths if read is None else caches[0].tokens_seen()
    pairs = zip(of_any, read or [0] * len(rows), ends, strict=True)
    blocks = [_inside(span, *block) for span, *block in pairs]
    weights = RepeatedWeights(asked.sinks, blocks) if cut else None
    if weights is not None:
        for chunk, fed in _passes(asked, instructions, rows, of_any, blocks):
            weights.begin_chunk(chunk)
            with storing_nothing(cut[0], weights):
                forward(cut[0], *_padded(fed, cut[0].first_layer.slots.device))
        for other in cut[1:]:
            other.meter.run(cut[0].meter.peak - other.meter.held)
    for cache, own, is_cut in zip(caches, spans, are_cut, strict=True):
        part = Repetition.of(cache)  # anew: a rollback leaves a copy of the one before
        if part is not None:
            part.cut(weights if is_cut else None, own, last=ends == lengths)


def _span(asked: RepetitionAsked, around: Instructions, length: int, budget: int) -> Span:
    """Return the positions of a sequence that are repeated: none where all of it fits."""
    start, end = max(asked.sinks, around.before), length - around.behind
    if length <= budget or start >= end:
        return length, length
    outside = length - (end - start)
    if outside >= budget:
        raise UsageError(
            f"budget {budget} is not above the {outside} tokens around the text, which all stay"
        )
    return start, end


def _inside(span: Span, start: int, end: int) -> Span:
    """Return the positions of a span that a block has."""
    low, high = (min(max(place, span[0]), span[1]) for place in (start, end))
    return low, high


def _passes(
    asked: RepetitionAsked,
    instructions: Instructions,
    rows: Sequence[Sequence[int]],
    spans: Sequence[Span],
    blocks: Sequence[Span],
) -> Iterator[tuple[list[Span], list[list[int]]]]:
    """Yield the chunk of each sequence that is repeated at once, and what is fed for it.

    Args:
        spans: what of each sequence is repeated with all its blocks.
        blocks: what is repeated now.
    """
    longest = max(end - start for start, end in blocks)
    for done in range(0, longest, asked.chunk):
        chunks, fed = [], []
        for row, (begin, _), (low, end) in zip(rows, spans, blocks, strict=True):
            start = min(low + done, end)
            stop = min(start + asked.chunk, end)
            lead = row[max(begin, start - asked.lead) : start]
            begun = start > begin
            lead_in = [*instructions.later, *lead] if begun else [*instructions.first]
            chunks.append((start, stop))
            fed.append([*lead_in, *row[start:stop]] if start < stop else [])
        yield chunks, fed


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Pad sequences at their ends: (batch, n) ids, and which of them are tokens; None: all."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
    if all(len(row) == width for row in rows):
        return ids, None
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, torch.arange(width, device=device) < lengths[:, None]
