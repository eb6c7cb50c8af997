"""The settings of a plan: its target, the lengths that it is for, and facts about the model."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.calls.base_settings import ModelSettings
from kvtool.documents.files import expand
from kvtool.documents.settings import Dtype, flag
from kvtool.errors import UsageError
from kvtool.policies.allocate.table import ALLOCATORS
from kvtool.policies.grammar import parse_policy
from kvtool.sizes import Budget, parse_memory

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

    profile: str | ProfileDocument | None = flag(
        "[PROFILE|-]", "What `kvtool profile` measured; - reads stdin.", python=None
    )
    budget: str | None = flag("--budget -b=TOKENS", "Mean tokens per layer and KV head.")
    ratio: str | None = flag("--ratio=R", "Share of the prompt (20%, 0.2).")
    bytes: str | None = flag(
        "--bytes=SIZE",
        "Memory held in all layers and rows, the policy's own numbers included (64MiB).",
    )
    memory: str | None = flag(
        "--memory=SIZE",
        "Memory of a device, this one or another (24GiB): plan for what the weights, and "
        "reading the prompt, leave of it.",
    )
    dtype: Dtype | None = flag(
        "--dtype",
        "Of keys and values.  [default: the checkpoint's own; without --model what the "
        "bundled one runs in here]",
    )  # type: ignore[assignment]
    context: str | int | None = flag(
        "--context=N",
        "Tokens of the longest prompt and answer.  [default: the profile's, else what "
        "the model was trained for]",
    )
    max_new_tokens: str | int | None = flag(
        "--max-new-tokens -n=N", "Generated tokens of these.  [default: 0]"
    )
    batch: int = flag("--batch=N", "Rows that run together.", min=1, default=1)
    policy: str | Policy | None = flag(
        "--policy -p=POLICY", "What will run; see `kvtool policies`."
    )
    allocator: str | None = flag(
        "--allocator=NAME",
        f"{', '.join(ALLOCATORS)}; over KV heads: optimal(heads=true).  "
        "[default: optimal with a profile of answer_loss, d2o with another, else uniform]",
    )
    curves: str | None = flag(
        "--curves=FILE.json",
        "Split by published budget curves: a share of the prompt per layer, by ratio.",
    )
    min_tokens: str | int | None = flag("--min-tokens=N", "Least tokens of a layer.  [default: 8]")
    recommend: Any = flag(
        "--recommend=RESULTS",
        "Plan the best variant of a run that fits --bytes: its folder or results.json.",
        typed=str | None,
    )
    guarantee: float | None = flag(
        "--guarantee=PCT", "Recommend only what the run's guarantee holds for."
    )
    plot: str | None = flag("--plot=FILE", "Draw the plan (.png, .svg, .pdf).", python=None)
    config: Any = None

    @property
    def plot_path(self) -> Path | None:
        """The picture to draw."""
        return None if self.plot is None else expand(self.plot)

    def outputs(self) -> dict[str, Path | None]:
        return {**super().outputs(), "--plot": self.plot_path}

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
