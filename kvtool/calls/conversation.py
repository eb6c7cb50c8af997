"""What is said to a model: one prompt in its chat template, or one turn after another."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvtool.calls.answers import document_of_turns
from kvtool.calls.listener import Listener
from kvtool.calls.prompt import note_text
from kvtool.calls.request import Request
from kvtool.calls.settings import GenerationSettings, PromptSettings
from kvtool.errors import UsageError
from kvtool.models.chat import template_of
from kvtool.models.load import Loaded
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from kvtool.cache.cache import KVCache
    from kvtool.documents.generation import GenerationDocument
    from kvtool.documents.turns import Turns, UserTurn
    from kvtool.generation import Conversation

_SHOWN = 80  # characters of a turn on stderr
_AROUND, _SAID_NOTHING = 8, "."  # tokens of a template between turns; a turn without a question


def begin(
    settings: PromptSettings,
    loaded: Loaded,
    cache: KVCache,
    system: str | None,
    watcher: Watcher,
) -> Conversation | None:
    """Return what puts the prompt into the chat template, None where it goes in as it stands.

    It does so without a template, with `--chat-template off`, and behind a cached text that went in
    as it stands itself.
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
    answers, told = [], False
    for i, turn in enumerate(turns.turns):
        watcher.note(f"turn {i + 1}: {_shorten(turn.text or turn.answer or '')}")
        tokens, config = talk.turn_ids(turn).shape[1], loaded.model.config
        told = told or note_text(cache, config, tokens, settings.new_tokens, watcher)
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
