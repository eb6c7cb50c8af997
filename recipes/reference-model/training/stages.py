"""The curriculum: what the model sees, and the measured accuracy that ends each stage."""

from dataclasses import dataclass, field

from training.rows import Mixture
from training.tokenizer import MAX_TOKENS

_ALL = ("multikey", "words", "multiquery", "multivalue", "route", "variables")


@dataclass(frozen=True)
class Stage:
    """Rows of some lengths until the gate is passed.

    The gate: each task in `tasks` is answered in full at `gate_tokens` tokens for at least
    `accuracy` of the prompts. `patience` is the most tokens (millions) a stage may take; a
    stage that runs out of it goes on to the next, and the log says so. `batch` is tokens a step.
    """

    name: str
    lengths: tuple[int, ...]
    mixture: Mixture = field(default_factory=Mixture)
    tasks: tuple[str, ...] = _ALL
    gate_tokens: int = 256
    accuracy: float = 0.9
    patience: float = 20.0
    batch: int = 8192


LOOK_UP = Mixture(
    echo=0.5,
    needles=0.5,
    several_values=0.0,
    routes=0.1,
    variables=0.0,
    everything=0.0,
    frequent=0.0,
    shortest_code=1,
    longest_code=3,
    recap=0.7,
)
SHORT = Mixture(echo=0.02, several_values=0.25, variables=0.25, frequent=0.03, shortest_code=2)
FULL = Mixture(echo=0.01, several_values=0.35)


@dataclass(frozen=True)
class Curriculum:
    """The stages of a run, and what its rows are while the rates fall to zero.

    Attributes:
        positions: the most tokens that the model says it reads.
    """

    stages: tuple[Stage, ...]
    cool_down: Stage
    positions: int = MAX_TOKENS


RECALL = Curriculum(
    (
        Stage("look up", (64, 128), LOOK_UP, ("words", "route"), 128, 0.9),
        Stage("short", (128, 256), SHORT, _ALL, 256, 0.9, patience=8.0),
        Stage("middle", (256, 512), FULL, _ALL, 512, 0.95, patience=5.0),
        Stage("long", (256, 512, 1024), FULL, _ALL, 1024, 0.95, patience=4.0),
        Stage("longest", (256, 512, 1024, 2048), FULL, _ALL, 2048, 0.97, patience=3.5),
    ),
    Stage("cool down", (256, 512, 1024, 2048, 2048, 4096), FULL, _ALL, 2048),
)

_STEPS = Mixture(
    needles=0.0,
    several_values=0.0,
    routes=0.0,
    variables=0.0,
    everything=0.0,
    frequent=0.0,
    trace=1.0,
)
_ASKED = ("trace",)
TRACE = Curriculum(
    (
        Stage("steps", (96, 128), _STEPS, _ASKED, 128, 0.9, batch=4096),
        Stage("more steps", (128, 192, 320), _STEPS, _ASKED, 320, 0.9, batch=4096),
        Stage("most steps", (192, 320, 576), _STEPS, _ASKED, 576, 0.9, batch=4608),
    ),
    Stage("cool down", (128, 320, 576), _STEPS, _ASKED, 576, batch=4608),
    positions=1024,
)

_HARD = Mixture(
    echo=0.01,
    needles=0.12,
    several_values=0.5,
    routes=0.05,
    variables=0.07,
    everything=0.05,
    frequent=0.2,
)
_HARD_TASKS = (*_ALL, "frequent")
GROWN = Curriculum(
    (
        Stage("short", (128, 256, 256), _HARD, _HARD_TASKS, 256, 0.95, patience=12.0),
        Stage("middle", (256, 512), _HARD, _HARD_TASKS, 512, 0.95, patience=8.0),
        Stage("long", (256, 512, 1024), _HARD, _HARD_TASKS, 1024, 0.95, patience=6.0),
    ),
    Stage("cool down", (256, 512, 1024, 2048, 2048, 4096), _HARD, _HARD_TASKS, 1024),
)

CURRICULA = {"recall": RECALL, "trace": TRACE, "grown": GROWN}
