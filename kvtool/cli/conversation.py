"""`kvtool generate --turns`: one turn after another, on one cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtool.cli.generated import choose_stream, document_of_turns, text_on_stdout
from kvtool.cli.prompt import note_text
from kvtool.cli.request import Request
from kvtool.cli.terminal import Terminal
from kvtool.models.load import Loaded

if TYPE_CHECKING:
    from kvtool.cache.cache import KVCache
    from kvtool.cli.generate import GenerateOptions
    from kvtool.documents.generation import GenerationDocument
    from kvtool.documents.turns import UserTurn

_SHOWN = 80  # characters of a turn on stderr


def converse(
    options: GenerateOptions,
    request: Request,
    turns: Sequence[UserTurn],
    loaded: Loaded,
    cache: KVCache,
    terminal: Terminal,
) -> GenerationDocument:
    """Read the prompt, if there is one, and answer every turn; text is printed as it is said."""
    from kvtool.generation import Conversation

    talk = Conversation(loaded.model, loaded.tokenizer, cache, options.chat_template)
    context = None if request.prompt is None else talk.read(request.prompt)
    stream = choose_stream(options, options.stream, terminal)
    answers, told = [], False
    for i, turn in enumerate(turns):
        terminal.note(f"turn {i + 1}: {_shorten(turn.text)}")
        tokens, config = talk.turn_ids(turn).shape[1], loaded.model.config
        told = told or note_text(cache, config, tokens, options.new_tokens, terminal)
        answer = talk.say(turn, **options.drawing(i), on_text=stream)
        answers.append(answer)
        if stream is not None:
            stream("\n")
        elif text_on_stdout(options):
            terminal.write(f"{answer.text[0]}\n")
    return document_of_turns(request, loaded, turns, answers, context)


def _shorten(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _SHOWN else f"{words[: _SHOWN - 3]}..."
