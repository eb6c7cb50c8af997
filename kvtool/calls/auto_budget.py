"""Turn a budget of `auto` into bytes, before the weights load."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvtool.calls.memory import memory_of, plan_run
from kvtool.calls.request import Request
from kvtool.calls.settings import PromptSettings
from kvtool.errors import UsageError
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from kvtool.documents.messages import Turns


def with_budget(
    settings: PromptSettings,
    request: Request,
    watcher: Watcher,
    new: int,
    turns: Turns | None = None,
) -> Request:
    """Return a request whose budget is in bytes where it was `auto`, and say what was chosen.

    Args:
        new: tokens that are generated at most, in each turn.

    Raises:
        UsageError: nothing is left of the memory, or what is there is not known.
        KvtoolError: a model that cannot be read.
    """
    if request.budget is None or request.budget.share is None:
        return request
    from kvtool.planning.auto import choose_bytes, chosen_note

    run = plan_run(settings, request, new, turns)
    if run is None:
        settings.source().tokenizer()  # says why the model cannot be read
        raise UsageError("-b auto needs the model's configuration and tokenizer")
    memory = memory_of(settings, run)
    budget = choose_bytes([run], request.budget, memory)
    watcher.note(chosen_note(budget, request.budget, memory, [run]))
    return replace(request, budget=budget)
