"""A listener hears an answer while it is generated, and may end it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Listener:
    """What is called while answers are generated.

    Attributes:
        on_text: takes pieces of text as they come; None: no caller does.
        on_answer: takes every answer when it is whole.
        stop_when: asked after every token whether to end there; None: never.
    """

    on_text: Callable[[str], object] | None = None
    on_answer: Callable[[str], object] = lambda text: None
    stop_when: Callable[[], bool] | None = None

    def hears(self) -> dict[str, Any]:
        """Return the listener as arguments of `kvtool.generation.generate`."""
        return {"on_text": self.on_text, "stop_when": self.stop_when}

    @property
    def has_enough(self) -> bool:
        """Whether nothing more is to be generated."""
        return self.stop_when is not None and self.stop_when()
