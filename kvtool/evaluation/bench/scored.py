"""Right answers scored in place of answers decoded: how likely each of their tokens is.

A greedy answer begins with the right one exactly if each of its tokens is the likeliest after those
before it. So the right answer is fed, and one run of the model takes the place of one for each
token. That run evicts nothing, where decoding evicts a token in each step; a policy that holds its
budget all the time is read in one run only if this concerns few of the tokens that it keeps. What
reads, corrects or rounds anew in every step gets the answer token by token.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvtool.evaluation.samples.sample import Json, Turn
from kvtool.generation import token_scores
from kvtool.models.chat import Piece

if TYPE_CHECKING:
    from torch import Tensor

    from kvtool.cache.whole.cache import KVCache
    from kvtool.evaluation.bench.bench import Bench

_SHARE = 16  # an answer in one run may be this part of the kept tokens


def score_answer(bench: Bench, cache: KVCache, turn: Turn, before: str, logits: Tensor) -> Json:
    """Score the right answer to a question that a cache has been fed.

    Args:
        before: the text up to where the answer begins.
        logits: (1, vocab) of the next token.

    Returns:
        The record of a turn: as `prediction` the right tokens up to the first that is not the
        likeliest, and then what is; `nll`, mean over the answer's tokens in nats; `right_tokens`.
    """
    space = " " if turn.answer_prefix else ""
    ids = bench.encode_on(Piece(before, space + turn.references[0]))
    count = ids.shape[1]
    together = _in_one_run(bench, count)
    start = time.perf_counter()
    if together:
        with cache.budgets.raising():
            logprobs, likeliest = token_scores(
                bench.model, cache, ids, chunk=max(count, 2), first_logits=logits
            )
    else:
        logprobs, likeliest = token_scores(bench.model, cache, ids, chunk=1, first_logits=logits)
    bench.meter.count_answer(cache, count, time.perf_counter() - start, grown=together)
    right = int((likeliest == ids.cpu()).long().cumprod(1).sum())
    said = [*ids[0, :right].tolist(), *likeliest[0, right : right + 1].tolist()]
    return {
        "prediction": bench.tokenizer.decode(said, skip_special_tokens=True),
        "references": list(turn.references),
        "new_tokens": count,
        "nll": -logprobs.mean().item(),
        "right_tokens": right,
    }


def _in_one_run(bench: Bench, tokens: int) -> bool:
    """Return whether an answer is read in one run, under the variant of a bench."""
    policy = bench.variant.policy
    if not policy.plain_steps:
        return False
    kept = min((kept for kept in bench.meter.kept_per_layer if kept), default=0)
    return policy.when != "always" or (tokens - 1) * _SHARE <= kept
