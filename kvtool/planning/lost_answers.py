"""Losses of answers by each way to make a cache smaller: measured points, interpolated.

The table of the package is derived from `recipes/real-model/results`: SmolLM2-135M-Instruct looks
for a code of four digits in 100 texts of 1001 tokens by Jane Austen. A test derives it anew. A loss
is the share of codes that the full cache finds and the policy does not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

NOISE = 0.05
"""The largest standard error of a share of 100 answers: losses that are closer count as equal."""

PROMPT = 1001
"""Tokens of the prompts, in the mean."""

_SOURCE = (
    "measured with a model of 135 million parameters (codes that SmolLM2 finds in 100 texts of "
    "1000 tokens, recipes/real-model); measure yours: kvtool eval, then --recommend RESULTS"
)

_OF_BIASES = (
    "; keys in 4 bits come last: keys of this model have biases, and of such models only "
    "Qwen2.5-Coder-0.5B was measured, which found all of 40 codes in 4 bits"
)

MEASURED: dict[str, dict[int, tuple[float, float]]] = {
    "kvzip": {128: (0.01, 0.02), 256: (0.02, 0.01), 512: (0.00, 0.00)},
    "expected": {128: (0.87, 0.82), 256: (0.20, 0.31), 512: (0.02, 0.01)},
    "rkv": {128: (0.12, 0.83), 256: (0.07, 0.52), 512: (0.01, 0.07)},
    "keydiff": {128: (0.54, 0.61), 256: (0.18, 0.25), 512: (0.10, 0.15)},
    "snapkv": {128: (0.21, 0.87), 256: (0.04, 0.80), 512: (0.00, 0.58)},
    "tova": {128: (0.33, 0.86), 256: (0.16, 0.80), 512: (0.04, 0.38)},
    "streaming": {128: (0.79, 0.79), 256: (0.66, 0.66), 512: (0.47, 0.47)},
    "h2o": {128: (0.86, 0.86), 256: (0.78, 0.78), 512: (0.65, 0.66)},
    "roco": {128: (0.95, 0.95), 256: (0.89, 0.90), 512: (0.74, 0.74)},
    "quest": {128: (0.49, 0.48), 256: (-0.01, -0.01), 512: (0.00, 0.00)},
    "rocketkv": {128: (0.05, 0.68), 256: (0.00, 0.46), 512: (0.00, 0.20)},
}
"""Losses by budget in tokens: the question known while the prompt is cut, and asked later."""

CODECS: dict[str, tuple[float, float]] = {"int8": (0.00, 0.01), "int4": (0.02, 0.02)}
"""Losses of all tokens in fewer bits."""

LIKE = {"fp8": "int8", "k8v4": "int4"}
"""Codecs that were not measured there, and one that loses as much or more.

`fp8` and `int8` gave the same answers on the bundled model; `k8v4` has the values of `int4` and the
keys of `int8`.
"""


_LOST_MOST = ("h2o", "roco")


@dataclass(frozen=True)
class Loss:
    """A loss for each time at which the question comes; None where it was not measured."""

    known: float | None
    later: float | None

    @property
    def worse(self) -> float:
        """The larger of the two."""
        return max(each for each in (self.known, self.later) if each is not None)

    def plus(self, other: Loss) -> Loss:
        """Add the loss of something that is done besides."""
        return Loss(_sum(self.known, other.known), _sum(self.later, other.later))


def _sum(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else min(1.0, first + second)


@dataclass(frozen=True)
class Losses:
    """Measured losses of policies by the share of the prompt that they keep or read.

    Attributes:
        source: where the numbers come from, as a sentence.
        points: of each policy, by share.
        codecs: of all tokens in fewer bits, by the codec's name.
        left_out: policies that no plan offers, since they lost most answers.
        model: the hash of its configuration; None: another one than any that is planned for.
    """

    source: str
    points: Mapping[str, Mapping[float, Loss]]
    codecs: Mapping[str, Loss] = field(default_factory=dict)
    left_out: Collection[str] = ()
    model: str | None = None

    @property
    def offered(self) -> list[str]:
        """The policies that a plan offers."""
        return [name for name in self.points if name not in self.left_out]

    def of_codec(self, codec: str | None) -> Loss | None:
        """Return the loss of a codec, None where none like it was measured."""
        if codec is None:
            return Loss(0.0, 0.0)
        return self.codecs.get(codec) or self.codecs.get(LIKE.get(codec, ""))

    def at(self, policy: str, share: float) -> Loss | None:
        """Return the loss of a policy at a share of the prompt, None where it was not measured.

        Between two points it is on the line through them; nothing kept loses all, and everything
        kept nothing. A gain counts as no loss.
        """
        points = self.points.get(policy)
        if points is None:
            return None
        return Loss(
            *(
                _between({at: getattr(loss, when) for at, loss in points.items()}, share)
                for when in ("known", "later")
            )
        )

    def least_share(self, policy: str) -> float | None:
        """Return the smallest measured share whose loss is within the noise, None without one."""
        points = self.points.get(policy, {})
        return min((share for share, loss in points.items() if loss.worse < NOISE), default=None)


def _between(points: Mapping[float, float | None], share: float) -> float | None:
    if any(loss is None for loss in points.values()):
        return None
    line = sorted({0.0: 1.0, 1.0: 0.0, **points}.items())
    place = bisect_left(line, (share,))
    if place == 0 or place == len(line) or line[place][0] == share:
        return max(0.0, line[min(place, len(line) - 1)][1] or 0.0)
    (left, low), (right, high) = line[place - 1], line[place]
    low, high = low or 0.0, high or 0.0
    return max(0.0, low + (high - low) * (share - left) / (right - left))


def packaged(*, key_biases: bool = False) -> Losses:
    """Return the losses of a small real model.

    Args:
        key_biases: whether keys of the model in question have biases, which the source names.
    """
    points = {
        policy: {budget / PROMPT: Loss(*losses) for budget, losses in budgets.items()}
        for policy, budgets in MEASURED.items()
    }
    codecs = {codec: Loss(*losses) for codec, losses in CODECS.items()}
    return Losses(_SOURCE + _OF_BIASES * key_biases, points, codecs, _LOST_MOST)


def of_points(source: str, measured: Iterable[tuple[str, float, Loss]]) -> Losses:
    """Put measured points together: policy, share and loss of each.

    Args:
        source: where they come from, as a sentence.
    """
    points: dict[str, dict[float, Loss]] = {}
    codecs: dict[str, Loss] = {}
    for policy, share, loss in measured:
        base, _, codec = policy.partition("+")
        if base == "full":
            codecs[codec] = loss
        else:
            points.setdefault(policy, {})[share] = loss
    return Losses(source, points, codecs)
