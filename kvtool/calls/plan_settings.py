"""What a plan is asked for: its target, the lengths it is for, and what is known of the model."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from kvtool.errors import UsageError
from kvtool.sizes import Budget, parse_count

if TYPE_CHECKING:
    from kvtool.documents.profile import ProfileDocument
    from kvtool.policies.policy import Policy


@dataclass(frozen=True, kw_only=True)
class PlanModel:
    """The model that is planned for, of which weights are never loaded.

    Attributes:
        name: a folder or a hub ID; None is that of the profile, else the bundled reference model.
        dtype: of keys and values; None is the checkpoint's own.
        config: the configuration, where the caller has it.
    """

    name: str | None = None
    revision: str | None = None
    dtype: str | None = None
    device: str | None = None
    device_map: str | None = None
    trust_remote_code: bool = False
    config: Any = None


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """A plan as it is asked for.

    Attributes:
        budget: the target.
        profile: that was measured, as a document or by its file (`-` is stdin).
        batch: rows that run together.
        min_tokens: least tokens of a layer.
        recommend: a run whose best variant that fits is planned: its folder, file or results.
    """

    budget: Budget
    model: PlanModel
    profile: str | ProfileDocument | None = None
    context: str | int | None = None
    max_new_tokens: str | int | None = None
    batch: int = 1
    policy: str | Policy | None = None
    allocator: str | None = None
    min_tokens: str | int | None = None
    recommend: Any = None


def read_target(budget: str | None, ratio: str | None, size: str | None) -> Budget:
    """Return the one target that is given.

    Args:
        budget: mean tokens per layer and KV head.
        ratio: a share of the prompt.
        size: memory in bytes.
    """
    targets = {"--budget": budget, "--ratio": ratio, "--bytes": size}
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
    if flag == "--ratio" and target.ratio is None:
        raise UsageError(f"--ratio must be a share of the prompt, got `{text}`", hint="--ratio 20%")
    if flag == "--bytes" and target.bytes is None:
        raise UsageError(f"--bytes must be a number of bytes, got `{text}`", hint="--bytes 64MiB")
    return target


def policy_to_plan(policy: str | Policy | None) -> Policy | None:
    """Return the policy to plan for."""
    if policy is None:
        return None
    from kvtool.policies.grammar import parse_policy

    policy = parse_policy(policy)
    if not policy.takes_budget:
        raise UsageError(f"policy `{policy}` keeps everything, so there is no budget to plan")
    return policy


def positive(text: str | int, flag: str) -> int:
    """Read a number of tokens, 1 or more."""
    count = parse_count(text)
    if count < 1:
        raise UsageError(f"{flag} must be 1 or more, got {text}")
    return count
