"""Say a prompt or one turn after another to a model, and put the answers into a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from kvtool.calls.listener import Listener
from kvtool.calls.request import Request, note_text, spell_budget
from kvtool.calls.settings import GenerationSettings, PromptSettings
from kvtool.errors import UsageError
from kvtool.models.chat import template_of
from kvtool.models.load import Loaded
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from kvtool.cache.cache import KVCache
    from kvtool.cache.report import CacheReport
    from kvtool.documents.generation import (
        CompileSection,
        GenerationDocument,
        GenerationTiming,
        PlanSection,
        TurnSection,
    )
    from kvtool.documents.turns import Turns, UserTurn
    from kvtool.generation import Compressed, Conversation, Generation


def document_of(
    request: Request, loaded: Loaded, result: Generation, plan: PlanSection | None = None
) -> GenerationDocument:
    """Put an answer into a document.

    Args:
        plan: what was taken from one.
    """
    from kvtool.documents.generation import CacheSection, Fidelity, GenerationDocument

    return GenerationDocument(
        model=loaded.name,
        policy=str(request.policy),
        budget=spell_budget(request.budget),
        prompt_tokens=result.prompt_tokens,
        new_tokens=result.new_tokens,
        text=result.text[0],
        token_ids=result.token_ids[0],
        cache=CacheSection.of(result.report),
        plan=plan,
        timing=_timing([result]),
        fidelity=None if result.fidelity is None else Fidelity.of(result.fidelity),
        compiled=_compiled([result]),
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
    from kvtool.documents.generation import CacheSection, Fidelity, GenerationDocument
    from kvtool.generation.fidelity import join_fidelities

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
        cache=CacheSection.of(held),
        plan=plan,
        timing=_timing(answers, sum(each.prefill_s for each in read)),
        fidelity=None if fidelity is None else Fidelity.of(fidelity),
        compiled=_compiled(answers),
        turns=[_turn(*pair) for pair in turns],
    )


def _compiled(answers: Sequence[Generation]) -> CompileSection | None:
    from kvtool.documents.generation import CompileSection
    from kvtool.generation.compiled import CompileReport

    reports = [answer.compiled for answer in answers if answer.compiled is not None]
    return CompileSection(**asdict(CompileReport.join(reports))) if reports else None


def _turn(turn: UserTurn, answer: Generation) -> TurnSection:
    from kvtool.documents.generation import CacheSection, Fidelity, TurnSection

    return TurnSection(
        user=turn.text,
        prompt_tokens=answer.prompt_tokens,
        new_tokens=answer.new_tokens,
        text=answer.text[0],
        token_ids=answer.token_ids[0],
        cache=CacheSection.of(answer.report),
        timing=_timing([answer]),
        fidelity=None if answer.fidelity is None else Fidelity.of(answer.fidelity),
    )


def _timing(answers: Sequence[Generation], before: float = 0.0) -> GenerationTiming:
    from kvtool.documents.generation import GenerationTiming

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
    from kvtool.generation import Conversation

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


def read_said(settings: GenerationSettings, given: str | Turns) -> Turns:
    """Return the turns that are given or that `--turns` names, fit for the other settings."""
    from kvtool.documents.turns import read_turns

    turns = read_turns(given) if isinstance(given, str) else given
    if turns.system is not None and settings.system is not None:
        raise UsageError("--system and --turns both give a system message; keep one")
    if turns.system is not None and (settings.cache is not None or settings.template == "off"):
        why = "--cache holds a text" if settings.cache is not None else "--chat-template is off"
        raise UsageError(f"--turns gives a system message, and {why}")
    before = (settings.cache, settings.prompt, settings.prompt_file)
    if not turns.turns[0].text and all(each is None for each in before):
        raise UsageError("--turns begins with an answer, and there is no prompt that it answers")
    return turns


def spell_turn(turn: UserTurn) -> Any:
    """Write a turn in a dry run."""
    return turn.text if turn.answer is None else {"user": turn.text, "assistant": turn.answer}


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
    from kvtool.generation import Conversation

    system = turns.system or settings.system
    talk = Conversation(loaded.model, loaded.tokenizer, cache, settings.template, system)
    if talk.in_template:
        _note_template(watcher)
        talk.foresee(turns.turns, request.prompt)
    _expect(talk, turns, request.prompt, settings.new_tokens)
    read = [] if request.prompt is None else [talk.read(request.prompt)]
    answers, noted = [], False
    for i, turn in enumerate(turns.turns):
        watcher.note(f"turn {i + 1}: {_shorten(turn.text or turn.answer or '')}")
        tokens, config = talk.turn_ids(turn).shape[1], loaded.model.config
        noted = noted or note_text(cache, config, tokens, settings.new_tokens, watcher)
        if turn.answer is not None:
            read.append(talk.hear(turn))
            continue
        answer = talk.say(turn, **settings.drawing(i), **listener.hears())
        answers.append((turn, answer))
        listener.on_answer(answer.text[0])
        if listener.has_enough:
            break
    held = cache.report(of_all_processes=True)
    generated = max(answers[-1][1].new_tokens - 1, 0) if answers and turn.answer is None else 0
    tokens = held.tokens_seen - generated
    planned = request.plan_in_use(loaded, tokens, settings.new_tokens, watcher)
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
