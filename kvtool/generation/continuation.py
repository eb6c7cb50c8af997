"""Read a prompt into a compressed cache, and generate what follows."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvtool.cache.whole.cache import KVCache
from kvtool.cache.whole.report import CacheReport
from kvtool.errors import UsageError
from kvtool.generation.broken_numbers import check_logits, explaining
from kvtool.generation.compiled import pays
from kvtool.generation.decoding import Callback, Drawing, StopsAt, StopsWhen, decode_loop, until_end
from kvtool.generation.feeding import (
    check_positions,
    decode_step,
    prefill_by_piece,
    run_to_end,
    wait,
)
from kvtool.generation.fidelity import Fidelity, compare_with_full
from kvtool.generation.graphs import StaticDecoding, StepsReport
from kvtool.generation.model_settings import check_drawing, drawing_settings, prepare


@dataclass(frozen=True)
class Generation:
    """What was generated. Rows of `token_ids` and `text` hold new tokens only.

    Attributes:
        input_ids: (batch, all tokens) int64 on the CPU; the last generated token has been fed to
            the cache only where steps were replayed and something else than their number ended it.
        prompt_tokens: new tokens of the prompt, of the longest sequence.
        new_tokens: generated tokens, of the longest sequence.
    """

    token_ids: list[list[int]]
    text: list[str]
    prompt_tokens: int
    new_tokens: int
    input_ids: Tensor
    report: CacheReport
    prefill_s: float
    decode_s: float
    fidelity: Fidelity | None = None
    steps: StepsReport | None = None


@dataclass(frozen=True)
class Compressed:
    """A prompt whose cache has been compressed.

    Attributes:
        prompt_tokens: new tokens of the prompt, of the longest sequence.
        input_ids: (batch, all tokens) int64 on the CPU, all of them fed.
        next_logits: (batch, vocab) float32.
    """

    prompt_tokens: int
    input_ids: Tensor
    next_logits: Tensor
    prefill_s: float


def compress(
    model: PreTrainedModel,
    cache: KVCache,
    prompt_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    new_tokens: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Compressed:
    """Feed a prompt and keep its compressed cache.

    Args:
        prompt_ids: (batch, n) int64.
        attention_mask: (batch, n), 0 = padding; None: no padding.
        new_tokens: how many will be generated from the cache, as far as is known.
        tokenizer: for a policy that asks the model to repeat its prompt (kvzip).

    Raises:
        UsageError: the prompt is empty; no tokenizer where one is needed.
        BrokenNumbers: the logits are not finite.
    """
    ids, logits, seconds = run_to_end(
        feed_prompt(model, cache, prompt_ids, attention_mask, new_tokens, tokenizer)
    )
    ids, logits = ids.cpu(), logits.cpu()
    cache.remember(ids, logits)
    return Compressed(prompt_ids.shape[1], ids, logits, seconds)


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: KVCache,
    prompt_ids: Tensor | None,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    attention_mask: Tensor | None = None,
    on_text: Callable[[str], None] | None = None,
    compare_full: bool = False,
    stop: Sequence[str] = (),
    min_new_tokens: int = 0,
    compiled: bool | None = False,
    graphs: bool = True,
    stop_when: Callable[[], bool] | None = None,
) -> Generation:
    """Generate after a prompt, after a loaded cache, or after both.

    Args:
        cache: empty, or loaded (then it knows its tokens in `input_ids`).
        prompt_ids: (batch, n) new tokens; None continues where a loaded cache ends.
        temperature: 0 takes the most likely token; above 0 samples, with the other settings of the
            model's own generation configuration.
        attention_mask: (batch, n), 0 = padding; None: no padding.
        on_text: called with pieces of text as they come; one sequence only.
        compare_full: also run the full cache over the same tokens and measure the difference.
        stop: texts that end a sequence where they come up; they stay in the text.
        min_new_tokens: before this number of tokens, neither the end-of-text token nor `stop` ends
            a sequence.
        compiled: run the steps through torch.compile once the cache's shapes no longer change; the
            first such steps take the seconds that compiling takes. None: where it pays, which is
            for many tokens on a CUDA device, and where it can be done.
        graphs: whether steps are recorded and replayed as CUDA graphs, on a CUDA device and where
            that can be done.
        stop_when: asked once the prompt has been read, and after every token whether to end there;
            then nothing is compared.

    Raises:
        UsageError: nothing to start from, a comparison of padded texts, or settings of the model
            that cannot be followed.
        KvtoolError: a policy or model that cannot be compiled.
        BrokenNumbers: logits are not finite.
    """
    if max_new_tokens < 1:
        raise UsageError(f"max-new-tokens must be 1 or more, got {max_new_tokens}")
    if compare_full and attention_mask is not None and not bool(attention_mask.bool().all()):
        raise UsageError("the comparison with the full cache needs rows of equal length")
    settings = drawing_settings(model, max_new_tokens, temperature, min_new_tokens)
    check_drawing(model, tokenizer, settings)
    ids, logits, prefill_s = run_to_end(
        feed_prompt(model, cache, prompt_ids, attention_mask, max_new_tokens, tokenizer)
    )
    kept: list[Tensor] | None = [] if compare_full else None
    compiling = compiled or (compiled is None and pays(model, max_new_tokens))
    required = compiled is not None
    steps = StaticDecoding(
        model, max_new_tokens, compiled=compiling, graphs=graphs, required=required
    )
    if stop_when is not None:
        stop_when()  # whoever watches for a reason to stop begins before the first token is shown
    start = time.perf_counter()
    stops = [
        *([StopsAt(tokenizer, stop, ids.shape[1] + min_new_tokens)] if stop else []),
        *([StopsWhen(stop_when)] if stop_when is not None else []),
    ]
    made = prepare(model, tokenizer, ids, settings, stops)
    drawing = Drawing(ids, made, torch.Generator(model.device).manual_seed(seed))
    streamer = None if on_text is None else Callback(tokenizer, on_text)
    with cache.running.generating():
        known, left = decode_loop(
            model, cache, drawing, logits, steps, streamer=streamer, kept_logits=kept
        )
    wait(model)
    decode_s = time.perf_counter() - start
    cache.remember(known, left)
    if stop_when is not None and stop_when():
        kept = None
    new = [until_end(row, model) for row in known[:, ids.shape[1] :].tolist()]
    return Generation(
        token_ids=new,
        text=tokenizer.batch_decode(new, skip_special_tokens=True),
        prompt_tokens=0 if prompt_ids is None else prompt_ids.shape[1],
        new_tokens=max(len(row) for row in new),
        input_ids=known,
        report=cache.report(of_all_processes=True),
        prefill_s=prefill_s,
        decode_s=decode_s,
        fidelity=None
        if kept is None
        else compare_with_full(
            model, known.to(model.device), torch.stack(kept, 1), cache.rope.chosen
        ),
        steps=steps.steps if compiling or steps.replays else None,
    )


def feed_prompt(
    model: PreTrainedModel,
    cache: KVCache,
    prompt_ids: Tensor | None,
    attention_mask: Tensor | None,
    new_tokens: int,
    tokenizer: PreTrainedTokenizerBase | None,
    piece: int | None = None,
) -> Generator[None, None, tuple[Tensor, Tensor, float]]:
    """Feed a prompt, and before it what the cache knows and has not been fed.

    Args:
        prompt_ids, attention_mask, new_tokens, tokenizer: as for `compress`; None for the prompt
            goes on where the cache ends.
        piece: as for `prefill_by_piece`, whose pauses are those of this one.

    Returns:
        All ids so far, the next logits and the seconds it took.

    Raises:
        UsageError: there is nothing to feed.
        BrokenNumbers: the logits are not finite.
    """
    known = cache.input_ids
    start = time.perf_counter()
    read = partial(prefill_by_piece, new_tokens=new_tokens, tokenizer=tokenizer, piece=piece)
    if known is None:
        if prompt_ids is None:
            raise UsageError("there is nothing to continue: no prompt, and the cache is empty")
        ids = prompt_ids.to(model.device)
        logits = yield from read(model, cache, ids, attention_mask)
    else:
        known = known.to(model.device)
        unfed = known[:, max(cache.tokens_seen()) :]
        if prompt_ids is not None:
            new = torch.cat([unfed, prompt_ids.to(model.device)], 1)
            ids = torch.cat([known, prompt_ids.to(model.device)], 1)
            logits = yield from read(model, cache, new)
        else:
            ids = known
            check_positions(model, [known.shape[1]], new_tokens)
            cache.choose_rope([seen + unfed.shape[1] + new_tokens for seen in cache.tokens_seen()])
            left = cache.next_logits
            with explaining(model, ids):
                for token in unfed.unbind(1):
                    left = decode_step(model, cache, token)
            if left is None:
                raise UsageError(
                    "the saved cache has no next token to continue from; give a prompt"
                )
            logits = left.to(model.device)
            check_logits(model, logits, ids)
    wait(model)
    return ids, logits, time.perf_counter() - start
