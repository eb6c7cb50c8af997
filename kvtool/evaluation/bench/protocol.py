"""How prompts are put and answers drawn, the same in all of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Protocol:
    """How prompts are put and answers are drawn; None leaves it to the task.

    Attributes:
        query_aware: whether the question is in the prompt that is compressed.
        keep_question: whether a question that comes after the context has been compressed is kept
            whole, beside the budget; else it is compressed with what is left.
        max_length: tokens of a prompt, above which it is cut; None: what the model was trained for.
        temperature: 0 takes the most likely token.
        stop: texts that end an answer, on top of the task's own.
        shared_prefill: whether a sample's prompt is read once for all variants that can share it.
    """

    query_aware: bool | None = None
    chat_template: Literal["auto", "on", "off"] = "auto"
    max_length: int | None = None
    truncate: Literal["middle", "left", "error"] = "middle"
    max_new_tokens: int | None = None
    temperature: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    keep_question: bool = False
    shared_prefill: bool = False

    def identity(self) -> dict[str, Any]:
        """Return what of it tells measurements apart; what earlier versions lack only if set."""
        later = ("keep_question", "shared_prefill")
        return {name: each for name, each in asdict(self).items() if each or name not in later}
