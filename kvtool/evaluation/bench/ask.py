"""Ask the questions of a sample: feed its parts in order, and find where an answer ends.

Right answers can be scored in place of answers decoded. A greedy answer begins with the right one
exactly if each of its tokens is the likeliest after those before it. So the right answer is fed,
and one run of the model takes the place of one for each token. That run evicts nothing, where
decoding evicts a token in each step; a policy that holds its budget all the time is read in one run
only if this concerns few of the tokens that it keeps. What reads or corrects anew in every
step gets the answer token by token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from kvtool.documents.messages import Message
from kvtool.evaluation.bench.prompts import Prompt, first_prompt, spoken, text_before
from kvtool.evaluation.samples.sample import Json, Sample, Turn
from kvtool.generation import token_scores
from kvtool.generation.repeating import instruct_chat
from kvtool.model_shape import trained_length
from kvtool.models.chat import Answer, Frame, Piece, make_frame, read_answer, rest_behind

if TYPE_CHECKING:
    from torch import Tensor

    from kvtool.cache.whole.cache import KVCache
    from kvtool.evaluation.bench.bench import Bench

_SHARE = 16  # an answer in one run may be this part of the kept tokens


def ask(
    bench: Bench,
    sample: Sample,
    task: Any,
    *,
    temperature: float | None = None,
    seed: int | None = None,
) -> list[Json]:
    """Ask every turn of a sample.

    Where the query is not known beforehand, the context is compressed first and the question comes
    as a further turn, compressed with what is left, or kept whole. An answer that was decoded with
    others is taken as it is.

    Args:
        task: an `Asking`, which says how its questions are asked.
        temperature, seed: of the answers, in place of the run's.

    Returns:
        Per turn its `prediction`, `references` and `new_tokens`; see `score_answer`.
    """
    if (decoded := bench.shared.pop("decoded", None)) is not None:
        token_ids, meter = decoded
        bench.restart_meter(meter)
        return [_record(bench, sample.turns[0], task, token_ids)]
    protocol = bench.protocol
    aware, same, golden = task.knows_query(protocol), task.same_context, task.after_references
    frame, prompt = _put(bench, sample, task)
    cache, read_so_far = bench.new_cache(), False
    if cache.link.rope is not None and not (aware and len(sample.turns) == 1):
        cache.expect_length(_whole_length(bench, sample, frame, prompt, task))
    if not aware:
        ids = bench.encode(prompt.context, special=prompt.special)
        instruct_chat(cache, bench.tokenizer, frame, ids, "")
        bench.feed_first(cache, ids)
        read_so_far = True
    answers: list[Json] = []
    talk = _Talk(frame, prompt)
    for i, turn in enumerate(sample.turns):
        piece = talk.ask(turn, alone=same)
        goes_on = i + 1 < len(sample.turns) and not same
        with cache.rollback() if same else nullcontext():
            if read_so_far:
                ids, text = bench.encode_on(piece), piece.before + piece.text
            else:
                text = prompt.context + prompt.question
                ids = bench.encode(text, special=prompt.special)
                ending = frame.closing + turn.answer_prefix
                instruct_chat(cache, bench.tokenizer, frame, ids, ending)
            with cache.budgets.raising() if task.keeps_question(protocol) else nullcontext():
                feed = bench.feed if read_so_far else bench.feed_first
                logits = feed(cache, ids, new_tokens=_answer_tokens(bench, turn))
            with cache.rollback() if goes_on and golden else nullcontext():
                if task.one_answer and protocol.answers == "scored":
                    answers.append(score_answer(bench, cache, turn, text, logits))
                else:
                    answers.append(_answer(bench, cache, turn, task, temperature, seed))
        read_so_far = True
        if goes_on and golden:
            space = " " if turn.answer_prefix else ""
            talk.give_reference(space + ", ".join(turn.references))
        elif goes_on and cache.input_ids is not None:
            said = cache.input_ids[0, -answers[-1]["new_tokens"] :].tolist()
            ends = bench.model.generation_config.eos_token_id
            talk.hear(read_answer(bench.tokenizer, said, ends))
    return answers


def ids_of_first(bench: Bench, sample: Sample, task: Any) -> tuple[Tensor, int]:
    """Return the ids of a prompt with its question, and how many tokens its answer has at most."""
    prompt = _put(bench, sample, task)[1]
    ids = bench.encode(prompt.context + prompt.question, special=prompt.special)
    return ids, _answer_tokens(bench, sample.turns[0])


def _put(bench: Bench, sample: Sample, task: Any) -> tuple[Frame, Prompt]:
    protocol, talks = bench.protocol, task.conversation
    frame = make_frame(bench.tokenizer, protocol.template, task.chat, thinking=task.enable_thinking)
    frame = spoken(frame) if talks else frame
    prompt = first_prompt(
        bench.tokenizer,
        frame,
        sample,
        max_length=_max_length(bench, sample),
        truncate=protocol.truncate,
        conversation=talks,
    )
    return frame, prompt


class _Talk:
    """What has been said in the turns of a sample, and what each further one feeds."""

    def __init__(self, frame: Frame, prompt: Prompt) -> None:
        self._frame, self._prompt = frame, prompt
        self._messages: list[Message] = []
        self._prefix = ""
        self._reference, self._heard = "", Answer("")

    def ask(self, turn: Turn, *, alone: bool) -> Piece:
        """Return what a turn feeds, up to where its answer begins.

        Args:
            alone: whether it is asked of the context, not after the turn before it.
        """
        begins = alone or not self._messages
        before, prefix = self._messages, self._prefix
        self._prefix = turn.answer_prefix
        if begins:
            self._messages = self._prompt.messages(turn.question)
            whole = self._frame.prompt(self._messages)
            rest = rest_behind(whole, self._prompt.context)
            return Piece(self._prompt.context, rest + turn.answer_prefix)
        said = Answer(prefix + self._reference + self._heard.text, self._heard.end)
        self._messages = [*before, Message("assistant", said.text), Message("user", turn.question)]
        piece = self._frame.follow(self._messages, said)
        if self._reference and piece.before:  # the cache has not read the answer yet
            piece = Piece(self._frame.prompt(before) + prefix, piece.text)
        return Piece(piece.before, self._reference + piece.text + turn.answer_prefix)

    def give_reference(self, answer: str) -> None:
        """Let the reference answer be fed with the next turn."""
        self._reference, self._heard = answer, Answer("")

    def hear(self, answer: Answer) -> None:
        """Note what the model has said, which the cache holds."""
        self._reference, self._heard = "", answer


def _whole_length(bench: Bench, sample: Sample, frame: Frame, prompt: Prompt, task: Any) -> int:
    """Return how many tokens a sample has at most, with its questions and answers."""
    turns = []
    for turn in sample.turns:
        text = frame.next + turn.question + frame.closing + turn.answer_prefix
        answer = _answer_tokens(bench, turn)
        if task.after_references:
            reference = " " + ", ".join(turn.references)
            answer = max(answer, bench.encode(reference, special=False).shape[1])
        turns.append(bench.encode(text, special=False).shape[1] + answer)
    context = bench.encode(prompt.context, special=prompt.special).shape[1]
    return context + (max(turns) if task.same_context else sum(turns))


def _max_length(bench: Bench, sample: Sample) -> int | None:
    """Return the tokens of the longest first prompt after which all else still fits."""
    if bench.protocol.max_length is not None:
        return bench.protocol.max_length
    limit = trained_length(bench.model.config)
    if limit is None:
        return None
    later = sum(
        bench.encode(turn.question + turn.answer_prefix, special=False).shape[1]
        for turn in sample.turns[1:]
    )
    answers = [_answer_tokens(bench, turn) for turn in sample.turns]
    return limit - later - sum(answers)


def _answer(
    bench: Bench, cache: KVCache, turn: Turn, task: Any, temperature: float | None, seed: int | None
) -> Json:
    result = bench.decode(
        cache,
        max_new_tokens=_answer_tokens(bench, turn),
        stop=(*task.stop, *bench.protocol.stop),
        min_new_tokens=task.min_new_tokens,
        temperature=temperature,
        seed=seed,
    )
    return _record(bench, turn, task, result.token_ids[0])


def _record(bench: Bench, turn: Turn, task: Any, token_ids: list[int]) -> Json:
    begun, text = (
        bench.tokenizer.decode(ids, skip_special_tokens=True)
        for ids in (token_ids[: task.min_new_tokens], token_ids)
    )
    stop = (*task.stop, *bench.protocol.stop)
    return {
        "prediction": text_before(stop, text, start=len(begun)),
        "references": list(turn.references),
        "new_tokens": len(token_ids),
    }


def _answer_tokens(bench: Bench, turn: Turn) -> int:
    return bench.protocol.max_new_tokens or turn.max_new_tokens


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
    with _whole(cache) if together else nullcontext():
        chunk = max(count, 2) if together else 1
        logprobs, likeliest = token_scores(
            bench.model, cache, ids, chunk=chunk, first_logits=logits
        )
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


@contextmanager
def _whole(cache: KVCache) -> Iterator[None]:
    """Let an answer stay whole, whose tokens see each other as they are stored."""
    with cache.budgets.raising(), cache.running.rounding():
        yield


def _in_one_run(bench: Bench, tokens: int) -> bool:
    """Return whether an answer is read in one run, under the variant of a bench."""
    policy = bench.variant.policy
    if not policy.plain_steps:
        return False
    kept = min((kept for kept in bench.meter.kept_per_layer if kept), default=0)
    return policy.when != "always" or (tokens - 1) * _SHARE <= kept
