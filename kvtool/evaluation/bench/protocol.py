"""How prompts are put and answers drawn, the same in all of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Protocol:
    """How prompts are put and answers are drawn; None leaves it to the task.

    Attributes:
        query_aware: whether the question is in the prompt that is compressed.
        max_length: tokens of a prompt, above which it is cut; None: what the model was trained for.
        temperature: 0 takes the most likely token.
        stop: texts that end an answer, on top of the task's own.
    """

    query_aware: bool | None = None
    chat_template: Literal["auto", "on", "off"] = "auto"
    max_length: int | None = None
    truncate: Literal["middle", "left", "error"] = "middle"
    max_new_tokens: int | None = None
    temperature: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int = 0
