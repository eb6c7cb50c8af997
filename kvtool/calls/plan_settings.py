"""The settings of a plan: its target, the lengths that it is for, and facts about the model."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvtool.calls.base_settings import ModelSettings
from kvtool.documents.files import expand
from kvtool.documents.settings import Dtype, Flag
from kvtool.errors import UsageError
from kvtool.policies.allocate.table import ALLOCATORS
from kvtool.policies.grammar import parse_policy
from kvtool.sizes import Budget, parse_count, parse_memory

if TYPE_CHECKING:
    from kvtool.documents.profile import ProfileDocument
    from kvtool.policies.policy import Policy
else:
    ProfileDocument = Policy = Any


@dataclass(frozen=True, kw_only=True)
class PlanSettings(ModelSettings):
    """A plan as it is asked for.

    Attributes:
        config: the configuration of the model, where the caller has it.
    """

    profile: Annotated[
        str | ProfileDocument | None,
        Flag(
            metavar="[PROFILE|-]",
            help="What `kvtool profile` measured; - reads stdin.",
            python=None,
        ),
    ] = None
    budget: Annotated[
        str | None,
        Flag("--budget -b", metavar="TOKENS", help="Mean tokens per layer and KV head."),
    ] = None
    ratio: Annotated[
        str | None, Flag("--ratio", metavar="R", help="Share of the prompt (20%, 0.2).")
    ] = None
    bytes: Annotated[
        str | None,
        Flag(
            "--bytes",
            metavar="SIZE",
            help="Memory held in all layers and rows, the policy's own numbers included (64MiB).",
        ),
    ] = None
    memory: Annotated[
        str | None,
        Flag(
            "--memory",
            metavar="SIZE",
            help="Memory of a device, this one or another (24GiB): plan for what the weights, and "
            "reading the prompt, leave of it.",
        ),
    ] = None
    dtype: Annotated[
        Dtype | None,
        Flag(
            "--dtype",
            help="Of keys and values.  [default: the checkpoint's own; without --model what the "
            "bundled one runs in here]",
        ),
    ] = None  # type: ignore[assignment]
    context: Annotated[
        str | int | None,
        Flag(
            "--context",
            metavar="N",
            help="Tokens of the longest prompt and answer.  [default: the profile's, else what "
            "the model was trained for]",
        ),
    ] = None
    max_new_tokens: Annotated[
        str | int | None,
        Flag("--max-new-tokens -n", metavar="N", help="Generated tokens of these.  [default: 0]"),
    ] = None
    batch: Annotated[int, Flag("--batch", min=1, metavar="N", help="Rows that run together.")] = 1
    policy: Annotated[
        str | Policy | None,
        Flag("--policy -p", metavar="POLICY", help="What will run; see `kvtool policies`."),
    ] = None
    allocator: Annotated[
        str | None,
        Flag(
            "--allocator",
            metavar="NAME",
            help=f"{', '.join(ALLOCATORS)}; over KV heads: optimal(heads=true).  "
            "[default: optimal with a profile of answer_loss, d2o with another, else uniform]",
        ),
    ] = None
    curves: Annotated[
        str | None,
        Flag(
            "--curves",
            metavar="FILE.json",
            help="Split by published budget curves: a share of the prompt per layer, by ratio.",
        ),
    ] = None
    min_tokens: Annotated[
        str | int | None,
        Flag("--min-tokens", metavar="N", help="Least tokens of a layer.  [default: 8]"),
    ] = None
    recommend: Annotated[
        Any,
        Flag(
            "--recommend",
            typed=str | None,
            metavar="RESULTS",
            help="Plan the best variant of a run that fits --bytes: its folder or results.json.",
        ),
    ] = None
    plot: Annotated[
        str | None,
        Flag("--plot", metavar="FILE", help="Draw the plan (.png, .svg, .pdf).", python=None),
    ] = None
    config: Any = None

    @property
    def plot_path(self) -> Path | None:
        """The picture to draw."""
        return None if self.plot is None else expand(self.plot)

    @property
    def device_memory(self) -> int | None:
        """Bytes of the device to plan for."""
        return None if self.memory is None else parse_memory(self.memory)

    @property
    def target(self) -> Budget | None:
        """The one target that is given; None: what the memory leaves.

        A policy that keeps everything has the whole prompt without a target.

        Raises:
            UsageError: none or several.
        """
        policy = None if self.policy is None else parse_policy(self.policy)
        given = (self.budget, self.ratio, self.bytes)
        if self.memory is not None and given == (None, None, None):
            return None
        if policy is None or policy.takes_budget:
            return read_target(self.budget, self.ratio, self.bytes)
        return Budget(ratio=Fraction(1)) if self.bytes is None else read_target(bytes=self.bytes)


_SPLITS = ("budget", "ratio", "allocator", "min_tokens")
_KINDS = {"--ratio": ("a share of the prompt", "20%"), "--bytes": ("a number of bytes", "64MiB")}


def read_target(
    budget: str | None = None, ratio: str | None = None, bytes: str | None = None
) -> Budget:
    """Return the one target that is given.

    Args:
        budget: mean tokens per layer and KV head.
        ratio: a share of the prompt.
        bytes: memory.
    """
    targets = {"--budget": budget, "--ratio": ratio, "--bytes": bytes}
    given = {flag: text for flag, text in targets.items() if text is not None}
    if not given:
        raise UsageError("no target", hint="-b 512, --ratio 20% or --bytes 64MiB")
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other; keep one")
    ((flag, text),) = given.items()
    if flag == "--ratio" and text.strip() == "1":
        return Budget(ratio=Fraction(1))
    if flag == "--bytes" and text.strip().isdecimal():
        return Budget.parse(f"{text.strip()}B")
    target = Budget.parse(text)
    what, example = _KINDS.get(flag, ("", ""))
    if what and getattr(target, flag.removeprefix("--")) is None:
        raise UsageError(f"{flag} must be {what}, got `{text}`", hint=f"{flag} {example}")
    return target


def policy_to_plan(settings: PlanSettings) -> Policy | None:
    """Return the policy to plan for.

    Raises:
        UsageError: it keeps everything, and the settings say how to split a budget.
    """
    if settings.policy is None:
        return None
    policy = parse_policy(settings.policy)
    splits = [f"--{name.replace('_', '-')}" for name in _SPLITS if getattr(settings, name)]
    if splits and not policy.takes_budget:
        raise UsageError(
            f"policy `{policy}` keeps everything, so {splits[0]} has nothing to plan",
            hint="leave it out; --bytes SIZE asks whether it fits",
        )
    return policy


def positive(text: str | int, flag: str) -> int:
    """Read a number of tokens, 1 or more."""
    count = parse_count(text)
    if count < 1:
        raise UsageError(f"{flag} must be 1 or more, got {text}")
    return count
