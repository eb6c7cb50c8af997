"""Check the settings of a profile without the model, and name its measurements."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtool.errors import UsageError, did_you_mean, quote
from kvtool.policies.allocate.fixed import OneHead, with_fixed_heads
from kvtool.policies.grammar import parse_policy
from kvtool.policies.spelling import read_settings, split_outside
from kvtool.sizes import Budget, parse_count

if TYPE_CHECKING:
    from kvtool.policies.policy import Policy

METRICS = (
    *("f_variance", "entropy", "query_cosine", "recompute_frequency", "topk_union", "jaccard"),
    *("robustness", "output_error", "answer_loss", "key_basis", "query_centres", "memory"),
)
DEFAULT = ("f_variance", "entropy", "query_cosine", "topk_union")
ON_PROMPTS = {"f_variance", "entropy", "key_basis", "query_centres"}
"""What reads prompts alone, without anything generated."""

OF_POLICY = ("output_error", "answer_loss")
"""What is measured of a policy, by budget."""

POLICY = "h2o"
"""Of which they are measured, unless another is named."""

SHARES = ("1/16", "1/8", "1/4", "1/2")
"""Its budgets, unless others are named."""


def parse_metrics(text: str | Sequence[str]) -> tuple[str, ...]:
    """Read names separated by commas, in the order of the table, each once.

    >>> parse_metrics("entropy,f_variance")
    ('f_variance', 'entropy')

    Raises:
        UsageError: no name, or one that does not exist.
    """
    names = [name for name, _ in _read_metrics(text)]
    if not names:
        raise UsageError("--metrics names nothing", hint=f"choose from: {', '.join(METRICS)}")
    return tuple(name for name in METRICS if name in names)


@dataclass(frozen=True)
class _LossSettings:
    """The settings of `answer_loss`.

    Args:
        heads: cut KV heads one by one, too.
    """

    heads: bool = False


def _read_metrics(text: str | Sequence[str]) -> list[tuple[str, bool]]:
    """Return each name, and whether it is asked of KV heads one by one."""
    found = []
    for part in split_outside(text, ",") if isinstance(text, str) else text:
        spelled, has_settings, inside = part.strip().partition("(")
        name = spelled.strip().lower().replace("-", "_")
        if not name:
            continue
        if name not in METRICS:
            raise UsageError(
                f"no metric `{name}`; choose from: {', '.join(METRICS)}",
                hint=did_you_mean(name, METRICS),
            )
        if has_settings and (name != "answer_loss" or not inside.endswith(")")):
            raise UsageError(
                f"cannot read {quote(part.strip())} in --metrics", hint="answer_loss(heads=true)"
            )
        found.append((name, read_settings(name, _LossSettings, inside[:-1]).get("heads", False)))
    return found


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        metrics: names, without `memory`.
        decode: tokens generated after each text, greedily, with the full cache.
        policy: that of `output_error` and `answer_loss`, None where neither is measured.
        budgets: its budgets, in tokens, ascending.
        memory: whether the table of memory is wanted, which reads no text.
        heads: whether `answer_loss` cuts KV heads one by one as well.
    """

    metrics: tuple[str, ...]
    decode: int
    policy: Policy | None = None
    budgets: tuple[int, ...] = ()
    memory: bool = False
    heads: bool = False

    @property
    def steps(self) -> int:
        """Tokens to generate: none where every metric reads prompts alone."""
        return 0 if set(self.metrics) <= ON_PROMPTS else self.decode


@dataclass(frozen=True)
class ProfileRequest:
    """What is measured, on which texts.

    Attributes:
        data: `builtin`, a file, a folder of text files, or the name of a dataset.
        samples: how many texts.
        tokens: of each.
        texts: in place of `data`.
    """

    plan: Plan
    data: str
    samples: int
    tokens: int
    seed: int
    texts: tuple[str, ...] | None = None

    @property
    def memory_alone(self) -> bool:
        """Whether the configuration is all that is looked at."""
        return not self.plan.metrics


def read_request(
    metrics: str | Sequence[str],
    *,
    data: str,
    samples: int,
    tokens: int | str,
    decode: int | str,
    policy: str | None,
    budgets: Sequence[str] | None,
    seed: int,
) -> ProfileRequest:
    """Check everything that can be checked without the model.

    Raises:
        UsageError: the first setting that is wrong.
    """
    names = parse_metrics(metrics)
    length = _count(tokens, "--tokens")
    steps = _count(decode, "--decode")
    chosen: Policy | None = None
    sizes: tuple[int, ...] = ()
    if "answer_loss" in names and samples < 2:
        raise UsageError(
            f"answer_loss needs 2 samples or more, to say how sure it is, got {samples}",
            hint="--samples 8",
        )
    asked = [name for name in OF_POLICY if name in names]
    if asked:
        chosen, sizes = _policy_settings(policy, budgets, length, asked)
    elif policy is not None or budgets is not None:
        flag = "--budgets" if policy is None else "--policy"
        raise UsageError(
            f"{flag} is that of {' and '.join(OF_POLICY)}, which are not measured",
            hint=f"--metrics {','.join(names)},output_error",
        )
    measured = tuple(name for name in names if name != "memory")
    heads = any(by_head for _, by_head in _read_metrics(metrics))
    if heads and chosen is not None:
        with_fixed_heads(chosen, OneHead(), hint="--metrics answer_loss measures layers alone")
    plan = Plan(measured, steps, chosen, sizes, memory="memory" in names, heads=heads)
    return ProfileRequest(plan, data, samples, length, seed)


def _count(text: int | str, flag: str) -> int:
    count = parse_count(text)
    if count < 1:
        raise UsageError(f"{flag} must be 1 or more, got {count}")
    return count


def _policy_settings(
    name: str | None, given: Sequence[str] | None, tokens: int, asked: Sequence[str]
) -> tuple[Policy, tuple[int, ...]]:
    """Return the policy of metrics that have one, and its budgets in tokens, ascending."""
    policy = parse_policy(name or POLICY)
    loss = "answer_loss" in asked
    reasons = {
        "keeps everything": not policy.takes_budget,
        "goes by the model's logits": policy.score.layer_tokens == "same",
        "cuts its layers together, to repeat a prompt": policy.repetition is not None,
        "splits a budget over the layers": policy.allocator is not None,
        "reads part of what it stores": loss and policy.reader is not None,
        "numbers tokens anew": loss and policy.score.positions == "cache",
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    if why is not None:
        instead = f"--policy {POLICY}, or kvtool eval -t output-error -p "
        raise UsageError(
            f"policy `{policy}` {why}; {' and '.join(asked)} is measured layer by layer, by budget",
            hint=instead + shlex.quote(str(policy)),
        )
    budgets = set()
    for size in map(Budget.parse, filter(None, map(str.strip, given or SHARES))):
        whole = size.bytes is not None or size.share is not None
        if whole or size.for_prompt(tokens) > tokens:
            raise UsageError(
                f"--budgets: {size} is not within the {tokens} tokens of a text",
                hint="use tokens or shares of a text",
            )
        policy.check_budget(size.for_prompt(tokens))
        budgets.add(size.for_prompt(tokens))
    return policy, tuple(sorted(budgets))
