"""What is said to a model: one prompt in its chat template, or one turn after another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtool.cli.generated import choose_stream, document_of_turns, text_on_stdout
from kvtool.cli.interruption import Interruption
from kvtool.cli.prompt import note_text
from kvtool.cli.prompt_options import PromptOptions
from kvtool.cli.request import Request
from kvtool.cli.terminal import Terminal
from kvtool.errors import UsageError
from kvtool.models.load import Loaded

if TYPE_CHECKING:
    from kvtool.cache.cache import KVCache
    from kvtool.cli.generate_options import GenerateOptions
    from kvtool.documents.generation import GenerationDocument
    from kvtool.documents.turns import Turns, UserTurn
    from kvtool.generation import Conversation

_SHOWN = 80  # characters of a turn on stderr


def begin(
    options: PromptOptions,
    loaded: Loaded,
    cache: KVCache,
    system: str | None,
    terminal: Terminal,
) -> Conversation | None:
    """Return what puts the prompt into the chat template, None where it goes in as it stands.

    It does so without a template, with `--chat-template off`, and behind a cached text that went in
    as it stands itself.
    """
    from kvtool.generation import Conversation

    template = getattr(loaded.tokenizer, "chat_template", None)
    wanted = options.chat_template
    if wanted == "auto" and template and cache.chat is None and cache.get_seq_length() > 0:
        if options.prompt is not None or options.prompt_file is not None:
            terminal.note(
                "chat template: none, as in the cached text (--chat-template on: a message)"
            )
        return None
    if system is None and (wanted == "off" or (wanted == "auto" and not template)):
        return None
    talk = Conversation(loaded.model, loaded.tokenizer, cache, wanted, system)
    _note_template(terminal)
    return talk


def _note_template(terminal: Terminal) -> None:
    terminal.note("chat template: the model's, around what the user says (--chat-template off)")


def read_said(options: GenerateOptions, path: str) -> Turns:
    """Read the turns that `--turns` names, and check them with the other options."""
    from kvtool.documents.turns import read_turns

    turns = read_turns(path)
    if turns.system is not None and options.system is not None:
        raise UsageError("--system and --turns both give a system message; keep one")
    if turns.system is not None and (options.cache is not None or options.chat_template == "off"):
        why = "--cache holds a text" if options.cache is not None else "--chat-template is off"
        raise UsageError(f"--turns gives a system message, and {why}")
    begun = options.cache or options.prompt or options.prompt_file
    if not turns.turns[0].text and begun is None:
        raise UsageError("--turns begins with an answer, and there is no prompt that it answers")
    return turns


def spell_turn(turn: UserTurn) -> Any:
    """Write a turn in a dry run."""
    return turn.text if turn.answer is None else {"user": turn.text, "assistant": turn.answer}


def converse(
    options: GenerateOptions,
    request: Request,
    turns: Turns,
    loaded: Loaded,
    cache: KVCache,
    terminal: Terminal,
    interrupted: Interruption,
) -> GenerationDocument:
    """Read the prompt, if there is one, and answer every turn; text is printed as it is said."""
    from kvtool.generation import Conversation

    system = turns.system or options.system
    talk = Conversation(loaded.model, loaded.tokenizer, cache, options.chat_template, system)
    if talk.in_template:
        _note_template(terminal)
    read = [] if request.prompt is None else [talk.read(request.prompt)]
    stream = choose_stream(options, options.stream, terminal)
    answers, told = [], False
    for i, turn in enumerate(turns.turns):
        terminal.note(f"turn {i + 1}: {_shorten(turn.text or turn.answer or '')}")
        tokens, config = talk.turn_ids(turn).shape[1], loaded.model.config
        told = told or note_text(cache, config, tokens, options.new_tokens, terminal)
        if turn.answer is not None:
            read.append(talk.hear(turn))
            continue
        answer = talk.say(turn, **options.drawing(i), on_text=stream, stop_when=interrupted)
        answers.append((turn, answer))
        if stream is not None:
            stream("\n")
        elif text_on_stdout(options):
            terminal.write(f"{answer.text[0]}\n")
        if interrupted.pressed:
            break
    held = cache.report(of_all_processes=True)
    generated = max(answers[-1][1].new_tokens - 1, 0) if answers and turn.answer is None else 0
    planned = request.plan_in_use(
        loaded, held.tokens_seen - generated, options.new_tokens, terminal
    )
    return document_of_turns(request, loaded, answers, read, held, planned)


def _shorten(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _SHOWN else f"{words[: _SHOWN - 3]}..."
