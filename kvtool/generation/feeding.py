"""Feed a model over a compressed cache: a prompt, whole or in blocks, and single tokens.

Tokens and positions that the model has no embeddings for are refused before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvtool.cache.features.repetition import Repetition
from kvtool.cache.whole.cache import KVCache
from kvtool.errors import KvtoolError, UsageError
from kvtool.generation.broken_numbers import check_logits, explaining
from kvtool.generation.repeating import begin_prompt, repeat_prompt
from kvtool.transformers_versions import cache_argument

Value = TypeVar("Value")


def prefill(
    model: PreTrainedModel,
    cache: KVCache,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    new_tokens: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Tensor:
    """Feed a prompt, or a further turn, whole or in the blocks that the cache was built for.

    In a padded batch blocks are counted from each sequence's own first token: the sequences'
    padding is moved behind their tokens.

    Args:
        input_ids: (batch, n) new tokens only.
        attention_mask: (batch, n), 0 = padding, on any side; None: no padding.
        new_tokens: how many will be generated after it, as far as is known.
        tokenizer: for a policy that asks the model to repeat its prompt (kvzip).

    Returns:
        (batch, vocab) float32 logits after the last token of each sequence.

    Raises:
        UsageError: no token in any sequence; no tokenizer where one is needed; tokens or positions
            that the model has no embeddings for.
        KvtoolError: padded texts in blocks on a model with recurrent layers.
        BrokenNumbers: the logits are not finite.
    """
    read = partial(prefill_by_piece, new_tokens=new_tokens, tokenizer=tokenizer)
    return run_to_end(read(model, cache, input_ids, attention_mask))


def run_to_end(steps: Generator[None, None, Value]) -> Value:
    """Run all steps of some work, and return what it comes to."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


@torch.no_grad()
def prefill_by_piece(
    model: PreTrainedModel,
    cache: KVCache,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    new_tokens: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    piece: int | None = None,
) -> Generator[None, None, Tensor]:
    """Do what `prefill` does, with a pause after each forward, in which other caches may be fed.

    Args:
        piece: tokens of a forward at most; the prompt is cut at its end as if it had come at once,
            and until then all layers hold it whole. None: as the cache was built.
    """
    input_ids = input_ids.to(model.device)
    batch, width = input_ids.shape
    seen = [0] * batch if cache.get_seq_length() == 0 else cache.tokens_seen()
    mask = None if attention_mask is None else attention_mask.to(model.device).bool()
    if mask is not None and bool(mask.all()):
        mask = None
    counts = [width] * batch if mask is None else mask.sum(1).tolist()
    lengths = [before + count for before, count in zip(seen, counts, strict=True)]
    check_tokens(model, input_ids)
    check_positions(model, lengths, new_tokens)
    sizes = cache.block_sizes(lengths)
    if mask is not None and sizes is not None and min(sizes) < width:
        if cache.recurrent:
            raise KvtoolError(
                "a padded batch cannot be fed in blocks to a model with recurrent layers",
                hint="use prefill full, or rows of equal length",
            )
        order = (~mask).long().argsort(dim=1, stable=True)
        input_ids, mask = input_ids.gather(1, order), mask.gather(1, order)
    logits: Tensor | None = None
    begin_prompt(cache, tokenizer)
    part = Repetition.of(cache)
    repeats, in_blocks = part is not None and not part.ended, cache.block is not None
    rows = _rows(input_ids, mask) if repeats else []
    with explaining(model, input_ids), cache.prompt(lengths, new_tokens):
        if piece is not None and width > piece and not (repeats and in_blocks):
            cache.running.read_in_pieces(-(-width // -(-width // piece)))
        for ids, valid in _blocks(cache, input_ids, mask, counts, lengths):
            last = _last_columns(valid, batch, ids.shape[1])
            out = forward(model, cache, ids, valid, last)
            if logits is None or valid is None:
                logits = out
            else:
                ends_here = valid.any(1)[:, None]
                logits = torch.where(ends_here, out, logits)
            if repeats and in_blocks:
                repeat_prompt([cache], rows, partial(feed, model), read=seen)
                seen = cache.tokens_seen()
            yield
        if logits is not None and repeats and not in_blocks:
            repeat_prompt([cache], rows, partial(feed, model))
    if logits is None:
        raise UsageError("the prompt is empty")
    check_logits(model, logits, input_ids)
    return logits


def _blocks(
    cache: KVCache, input_ids: Tensor, mask: Tensor | None, counts: list[int], lengths: list[int]
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Cut a prompt into blocks, whose sizes are asked for once the block before has run."""
    batch, width = input_ids.shape
    fed = [0] * batch
    while fed != counts:
        sizes = cache.block_sizes(lengths)
        if sizes is None or min(sizes) >= width:
            yield input_ids, mask
            return
        taken = [min(size, n - done) for size, n, done in zip(sizes, counts, fed, strict=True)]
        fed = [done + more for done, more in zip(fed, taken, strict=True)]
        cache.running.say_last(fed == counts)
        columns = torch.arange(max(taken), device=input_ids.device)
        if mask is None:
            yield input_ids[:, fed[0] - taken[0] + columns], None
        else:
            ends, sizes = torch.tensor([fed, taken], device=input_ids.device)[..., None]
            places = (ends - sizes + columns).clamp(max=width - 1)
            yield input_ids.gather(1, places), columns < sizes


def _rows(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Return the token ids of each sequence, without padding."""
    tokens = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask
    return [ids[own].tolist() for ids, own in zip(input_ids, tokens, strict=True)]


def feed(model: PreTrainedModel, cache: KVCache, input_ids: Tensor, valid: Tensor | None) -> None:
    """Run a forward whose logits are not used."""
    forward(model, cache, input_ids, valid, [input_ids.shape[1] - 1] * len(input_ids))


def _last_columns(valid: Tensor | None, batch: int, width: int) -> list[int]:
    if valid is None:
        return [width - 1] * batch
    columns = torch.arange(width, device=valid.device)
    return torch.where(valid, columns, -1).amax(1).clamp(min=0).tolist()


def forward(
    model: PreTrainedModel,
    cache: KVCache,
    input_ids: Tensor,
    valid: Tensor | None,
    last: list[int] | None,
) -> Tensor:
    """Run one forward of new tokens.

    Args:
        last: the column of each sequence whose logits are wanted; None: all columns.

    Returns:
        (batch, vocab) float32 logits at one column of each sequence, or (batch, columns, vocab) at
        all.
    """
    batch, width = input_ids.shape
    past, device = cache.get_seq_length(), model.device
    seen = [0] * batch if past == 0 else cache.tokens_seen()
    mask = None
    if valid is None and min(seen) == max(seen):  # numbers that are copied make the host wait
        positions = torch.arange(seen[0], seen[0] + width, device=device).repeat(batch, 1)
    else:
        starts = torch.tensor(seen, device=device)[:, None]
        if valid is None:
            positions = starts + torch.arange(width, device=device)
        else:
            positions = (starts + valid.long().cumsum(1) - 1).clamp(min=0)
            mask = torch.cat([valid.new_ones(batch, past), valid], 1).long()
    columns, options = last, {}
    if last and "logits_to_keep" in inspect.signature(model.forward).parameters:
        wanted = sorted(set(last))
        columns = [wanted.index(column) for column in last]
        # a row that transformers slices on a CPU is strided: bfloat16 takes 20 times as long
        sliced = wanted == [width - 1] and (width == 1 or device.type != "cpu")
        options["logits_to_keep"] = 1 if sliced else torch.tensor(wanted, device=device)
    out = model(
        input_ids=input_ids,
        attention_mask=mask,
        position_ids=positions,
        use_cache=True,
        **{cache_argument(): cache},
        **options,
    ).logits
    if columns is None:
        return out.float()
    if min(columns) == max(columns):
        return out[:, columns[0]].float()
    return out[torch.arange(batch, device=out.device), columns].float()


@torch.no_grad()
def decode_step(
    model: PreTrainedModel, cache: KVCache, token_ids: Tensor, forward: Callable | None = None
) -> Tensor:
    """Feed one token per sequence.

    Args:
        token_ids: (batch,) int64.
        forward: what runs in place of the model, such as its compiled forward.

    Returns:
        (batch, vocab) float32 logits.
    """
    start = cache.first_layer.next_positions()
    if isinstance(start, Tensor):
        start = start.to(token_ids.device)
    positions = torch.zeros_like(token_ids)[:, None] + start
    return (
        (forward or model)(
            input_ids=token_ids[:, None],
            position_ids=positions,
            use_cache=True,
            **{cache_argument(): cache},
        )
        .logits[:, -1]
        .float()
    )


def wait(model: PreTrainedModel) -> None:
    """Wait for what runs on the model's device, so that a clock read now is right."""
    here = torch.accelerator.current_accelerator()
    if here is not None and here.type == model.device.type:
        torch.accelerator.synchronize(model.device)


_LEARNED = (
    *("wpe", "embed_positions", "embed_position", "positions_embed"),
    *("position_embeddings", "position_embedding"),
)
"""Names that families give to embeddings of positions (GPT-2, OPT, GPT, BioGPT)."""


def check_tokens(model: PreTrainedModel, input_ids: Tensor) -> None:
    """Refuse ids beyond the model's embeddings, which fail inside of torch."""
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if rows is None or input_ids.is_meta or input_ids.numel() == 0:
        return
    wrong = (input_ids < 0) | (input_ids >= rows)
    if bool(wrong.any()):
        raise UsageError(
            f"the text has token {int(input_ids[wrong][0])}, and the model has embeddings for "
            f"{rows} tokens only: this tokenizer is not the model's",
            hint="use the tokenizer that came with the model, or resize_token_embeddings",
        )


def check_positions(model: PreTrainedModel, lengths: Sequence[int], new_tokens: int) -> None:
    """Refuse a text that goes beyond the positions that a model has learned.

    Args:
        lengths: tokens of each sequence, with those of earlier turns.
        new_tokens: that will be generated after them; the last one is not fed.
    """
    limit = learned_positions(model)
    tokens = max(lengths, default=0)
    if limit is None or tokens + max(new_tokens - 1, 0) <= limit:
        return
    more = f" and {new_tokens} new ones" if new_tokens else ""
    raise UsageError(
        f"{tokens} tokens{more} are more than the {limit} positions that this model has learned",
        hint=f"--max-new-tokens {limit - tokens + 1}" if tokens <= limit else "a shorter text",
    )


def learned_positions(model: PreTrainedModel) -> int | None:
    """Count the positions that a model has embeddings for; None: it needs none."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _LEARNED:
            return module.num_embeddings - int(getattr(module, "offset", 0))
    return None
