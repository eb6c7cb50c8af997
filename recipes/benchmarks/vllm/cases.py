"""The cases that are measured with the real engine; imported in both environments."""

from __future__ import annotations

from dataclasses import dataclass

NEW_TOKENS = 16
QUESTIONS = {
    "reference": tuple(
        f" The secret code for {name}:" for name in ("falcon", "tiger", "magnet", "ladder")
    ),
    "smollm2": (
        "Who is the main character? Answer in one sentence.",
        "Where does the family live?",
        "Summarize the text.",
        "Which people are named?",
    ),
}


@dataclass(frozen=True)
class Case:
    """How an engine is started, and what is tried with it.

    Attributes:
        model: the bundled `reference`, or `smollm2`.
        block: tokens of a block.
        blocks: of the cache; None: as many as fit.
        ranks: processes of tensor parallelism.
        tried: functions of `measure.py`, by name.
    """

    model: str
    tried: tuple[str, ...]
    block: int = 32
    blocks: int | None = None
    ranks: int = 1


CASES = {
    "blocks-of-32": Case("reference", ("mixed", "vanish", "refused")),
    "blocks-of-96-preempted": Case("reference", ("mixed", "preempted"), block=96, blocks=24),
    "tensor-parallel-2": Case("reference", ("mixed", "vanish"), ranks=2),
    "smollm2": Case("smollm2", ("mixed",)),
    "cost": Case("smollm2", ("cost",)),
    "http": Case("smollm2", ("http",)),
}
