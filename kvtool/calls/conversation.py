"""Say a prompt or one turn after another to a model, and put the answers into a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from kvtool.cache.whole.cache import KVCache
from kvtool.cache.whole.report import CacheReport
from kvtool.calls.request import Request, encode, note_text, spell_budget
from kvtool.calls.settings import GenerationSettings, PromptSettings
from kvtool.documents.generation import (
    CacheSection,
    CompileSection,
    CompressionDocument,
    CompressionTiming,
    Fidelity,
    GenerationDocument,
    GenerationTiming,
    PlanSection,
    TurnSection,
)
from kvtool.documents.messages import Turns, UserTurn
from kvtool.generation import Compressed, Conversation, Generation, generate
from kvtool.generation.compiled import CompileReport
from kvtool.generation.fidelity import join_fidelities
from kvtool.generation.reading import reading
from kvtool.models.chat import template_of
from kvtool.models.load import Loaded
from kvtool.planning.bytes import Text
from kvtool.planning.plan_in_use import beyond_plan, held_by_plan
from kvtool.planning.rocketkv_stages import planned_stages
from kvtool.policies.allocate.split import tokens_for_prompt
from kvtool.watcher import Listener, Watcher


def plan_in_use(
    request: Request, loaded: Loaded, tokens: int, new: int, watcher: Watcher
) -> PlanSection | None:
    """Return what is taken from the plan for a prompt; say where more is held than it says.

    Args:
        tokens: of the prompt.
        new: tokens that are generated at most.
    """
    plan, policy, text = request.plan, request.policy, Text(tokens, new)
    if plan is None or not policy.takes_budget:
        return None
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    held = held_by_plan(plan, policy, loaded.model.config, dtype, text)
    beyond = beyond_plan(plan, held, text)
    if beyond is not None:
        watcher.note(f"note: after this {beyond}")
    stages = planned_stages(plan, policy, tokens)
    return PlanSection.of(plan, tokens_for_prompt(plan, tokens), stages, held)


def document_of(
    request: Request, loaded: Loaded, result: Generation, plan: PlanSection | None = None
) -> GenerationDocument:
    """Put an answer into a document.

    Args:
        plan: what was taken from one.
    """
    return GenerationDocument(
        model=loaded.name,
        policy=str(request.policy),
        budget=spell_budget(request.budget),
        prompt_tokens=result.prompt_tokens,
        new_tokens=result.new_tokens,
        text=result.text[0],
        token_ids=result.token_ids[0],
        cache=CacheSection.taken_from(result.report),
        plan=plan,
        timing=_timing([result]),
        fidelity=None if result.fidelity is None else Fidelity.taken_from(result.fidelity),
        compiled=_compiled([result]),
    )


def document_of_prompt(
    request: Request,
    loaded: Loaded,
    cache: KVCache,
    result: Compressed,
    saved: Path | None,
    watcher: Watcher,
) -> CompressionDocument:
    """Put into a document what a prompt was compressed to; say what bytes came to."""
    held = CacheSection.taken_from(cache.report())
    planned = plan_in_use(request, loaded, result.prompt_tokens, 0, watcher)
    request.note_bytes(held, watcher)
    return CompressionDocument(
        model=loaded.name,
        policy=str(request.policy),
        budget=spell_budget(request.budget),
        prompt_tokens=result.prompt_tokens,
        saved=str(saved),
        cache=held,
        plan=planned,
        timing=CompressionTiming(prefill_s=result.prefill_s),
    )


def document_of_turns(
    request: Request,
    loaded: Loaded,
    turns: Sequence[tuple[UserTurn, Generation]],
    read: Sequence[Compressed],
    held: CacheReport,
    plan: PlanSection | None = None,
) -> GenerationDocument:
    """Put a conversation into a document.

    Args:
        turns: what was answered, and the answers.
        read: what was read beside them: the prompt, and turns whose answers were given.
        held: what the cache holds at the end.
        plan: what was taken from one for the last turn.
    """
    answers = [answer for _, answer in turns]
    fidelity = join_fidelities([(each.fidelity, each.new_tokens) for each in answers])
    return GenerationDocument(
        model=loaded.name,
        policy=str(request.policy),
        budget=spell_budget(request.budget),
        prompt_tokens=sum(answer.prompt_tokens for answer in answers)
        + sum(each.prompt_tokens for each in read),
        new_tokens=sum(each.new_tokens for each in answers),
        text="\n".join(each.text[0] for each in answers),
        token_ids=[token for each in answers for token in each.token_ids[0]],
        cache=CacheSection.taken_from(held),
        plan=plan,
        timing=_timing(answers, sum(each.prefill_s for each in read)),
        fidelity=None if fidelity is None else Fidelity.taken_from(fidelity),
        compiled=_compiled(answers),
        turns=[_turn(*pair) for pair in turns],
    )


def _compiled(answers: Sequence[Generation]) -> CompileSection | None:
    reports = [answer.compiled for answer in answers if answer.compiled is not None]
    return CompileSection(**asdict(CompileReport.join(reports))) if reports else None


def _turn(turn: UserTurn, answer: Generation) -> TurnSection:
    return TurnSection(
        user=turn.text,
        prompt_tokens=answer.prompt_tokens,
        new_tokens=answer.new_tokens,
        text=answer.text[0],
        token_ids=answer.token_ids[0],
        cache=CacheSection.taken_from(answer.report),
        timing=_timing([answer]),
        fidelity=None if answer.fidelity is None else Fidelity.taken_from(answer.fidelity),
    )


def _timing(answers: Sequence[Generation], before: float = 0.0) -> GenerationTiming:
    # the first new token of an answer comes from its prompt's own forward
    steps = sum(answer.new_tokens - 1 for answer in answers)
    decode_s = sum(answer.decode_s for answer in answers)
    return GenerationTiming(
        prefill_s=before + sum(answer.prefill_s for answer in answers),
        decode_s=decode_s,
        decode_tokens_per_s=steps / decode_s if steps > 0 and decode_s > 0 else None,
    )


_SHOWN = 80  # characters of a turn on stderr
_AROUND, _SAID_NOTHING = 8, "."  # tokens of a template between turns; a turn without a question


def begin(
    settings: PromptSettings,
    loaded: Loaded,
    cache: KVCache,
    system: str | None,
    watcher: Watcher,
) -> Conversation | None:
    """Return what puts the prompt into the chat template, None where it goes in unchanged.

    It does so without a template, with `--chat-template off`, and behind a cached text that went in
    unchanged itself.
    """
    template = template_of(loaded.tokenizer)
    wanted = settings.template
    if wanted == "auto" and template and cache.chat is None and cache.get_seq_length() > 0:
        if settings.prompt is not None or settings.prompt_file is not None:
            watcher.note(
                "chat template: none, as in the cached text (--chat-template on: a message)"
            )
        return None
    if system is None and (wanted == "off" or (wanted == "auto" and not template)):
        return None
    talk = Conversation(loaded.model, loaded.tokenizer, cache, wanted, system)
    _note_template(watcher)
    return talk


def _note_template(watcher: Watcher) -> None:
    watcher.note("chat template: the model's, around what the user says (--chat-template off)")


def answer(
    settings: GenerationSettings,
    request: Request,
    loaded: Loaded,
    cache: KVCache,
    watcher: Watcher,
    listener: Listener,
) -> GenerationDocument:
    """Answer one prompt, or go on from the cache without one."""
    talk = begin(settings, loaded, cache, settings.system, watcher)
    prompt_ids, tokens = None, 0
    if request.prompt is not None:
        if talk is None:
            first = cache.get_seq_length() == 0
            prompt_ids = encode(loaded, request.prompt, first=first, source=request.source)
        else:
            prompt_ids = talk.turn_ids(request.turn)
        tokens = prompt_ids.shape[1]
    if settings.cache is None:
        request.check_length(tokens, watcher)
    note_text(cache, loaded.model.config, tokens, settings.new_tokens, watcher)
    planned = plan_in_use(request, loaded, tokens, settings.new_tokens, watcher)
    drawing = settings.drawing() | listener.hears()
    with reading(loaded.model, tokens, watcher):
        if talk is None:
            result = generate(loaded.model, loaded.tokenizer, cache, prompt_ids, **drawing)
        elif request.prompt is None:
            result = talk.answer(**drawing)
        else:
            result = talk.say(request.turn, **drawing)
    listener.on_answer(result.text[0])
    return document_of(request, loaded, result, planned)


def converse(
    settings: GenerationSettings,
    request: Request,
    turns: Turns,
    loaded: Loaded,
    cache: KVCache,
    watcher: Watcher,
    listener: Listener,
) -> GenerationDocument:
    """Read the prompt, if there is one, and answer every turn; text is heard as it is said."""
    system = turns.system or settings.system
    talk = Conversation(loaded.model, loaded.tokenizer, cache, settings.template, system)
    if talk.in_template:
        _note_template(watcher)
        talk.foresee(turns.turns, request.prompt)
    _expect(talk, turns, request.prompt, settings.new_tokens)
    read, answers, noted = [], [], False
    if request.prompt is not None:
        with reading(loaded.model, talk.context_ids(request.prompt).shape[1], watcher):
            read.append(talk.read(request.prompt))
    for i, turn in enumerate(turns.turns):
        watcher.note(f"turn {i + 1}: {_shorten(turn.text or turn.answer or '')}")
        tokens, config = talk.turn_ids(turn).shape[1], loaded.model.config
        noted = noted or note_text(cache, config, tokens, settings.new_tokens, watcher)
        if turn.answer is not None:
            read.append(talk.hear(turn))
            continue
        with reading(loaded.model, tokens, watcher):
            answer = talk.say(turn, **settings.drawing(i), **listener.hears())
        answers.append((turn, answer))
        listener.on_answer(answer.text[0])
        if listener.has_enough:
            break
    held = cache.report(of_all_processes=True)
    generated = max(answers[-1][1].new_tokens - 1, 0) if answers and turn.answer is None else 0
    tokens = held.tokens_seen - generated
    planned = plan_in_use(request, loaded, tokens, settings.new_tokens, watcher)
    return document_of_turns(request, loaded, answers, read, held, planned)


def _expect(talk: Conversation, turns: Turns, prompt: str | None, new_tokens: int) -> None:
    """Say how long the whole conversation may get, for a RoPE that depends on the length."""
    cache = talk.cache
    if cache.link.rope is None or cache.get_seq_length() > 0:
        return
    length = 0 if prompt is None else talk.context_ids(prompt).shape[1] + _AROUND
    for turn in turns.turns:
        said = talk.turn_ids(turn if turn.text else replace(turn, text=_SAID_NOTHING))
        length += said.shape[1] + _AROUND + (new_tokens if turn.answer is None else 0)
    cache.expect_length(length)


def _shorten(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _SHOWN else f"{words[: _SHOWN - 3]}..."
