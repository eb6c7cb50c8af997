"""Recommend the best measured variant that fits into a given memory, as a plan.

A budget that was measured on prompts of one length is taken as a share of the prompt. What it holds
at the length to plan for is estimated, as for every plan. Of the variants that fit the best one is
chosen (of equals, that of the smallest share), and the plan gives it all of the memory: no less
than the share that was measured. The full cache is chosen where it fits, unless a variant is better
than it on every task beyond the noise. Where keys have biases, keys in 4 bits come behind equals,
and behind all others if another model was measured. With a guarantee only variants that have it
count, and the plan is for the measured share: nothing is guaranteed of a larger one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from kvtool.documents.memory import ModelShape
from kvtool.documents.plan import Target
from kvtool.documents.profile import ProfileDocument
from kvtool.documents.results import ResultsDocument, TaskResult, VariantEntry
from kvtool.errors import UsageError
from kvtool.model_shape import LayerShape
from kvtool.planning.lost_answers import Loss, Losses, of_points
from kvtool.planning.make_plan import Planned, make_plan
from kvtool.policies.allocate.table import ALLOCATORS
from kvtool.policies.allocate.uniform import Uniform
from kvtool.policies.grammar import parse_policy
from kvtool.policies.policy import Policy
from kvtool.policies.scores.full import Full
from kvtool.sizes import DEFAULT_TOKENS, Budget, bytes_in_words, bytes_to_type

_FULL = "full"
_FINEST = 10**6  # of a measured share, in parts of the prompt


@dataclass(frozen=True)
class Evidence:
    """What a run says of one variant.

    Attributes:
        share: its budget as a share of the prompts; 1 where it keeps everything.
        prompt: tokens of the prompts, in the mean.
        tasks: its results, each paired with the full cache's; empty for the full cache.
    """

    variant: VariantEntry
    policy: Policy
    share: Fraction
    prompt: float
    tasks: list[TaskResult]

    @property
    def gain(self) -> float:
        """Return the mean over tasks of the difference to the full cache, in percent."""
        gains = [against_full(each)[0] for each in self.tasks]
        return sum(gains) / len(gains) if gains else 0.0

    @property
    def beats_full(self) -> bool:
        """Whether the score is above the full cache's on every task beyond the noise."""
        return all((against_full(each)[1] or 0) > 0 for each in self.tasks)


def against_full(result: TaskResult) -> tuple[float, float | None, float | None]:
    """Return the difference to the full cache in percent, above 0 is better, and its interval."""
    assert result.paired is not None, "evidence has such results alone"
    return result.paired.percent(lower_is_better=result.lower_is_better)


@dataclass(frozen=True)
class Recommendation:
    """The variant to run, and its plan.

    Attributes:
        evidence: of what was measured.
        planned: the plan for all of the memory.
        left_out: variants that cannot be planned, and why.
        too_large: variants that do not fit.
    """

    evidence: Evidence
    planned: Planned
    left_out: list[str]
    too_large: list[str]


@dataclass(frozen=True)
class Place:
    """Where a variant is to run.

    Attributes:
        target: bytes and lengths.
        profile: of the model, which some allocators need.
        layers: what each layer of the model stores.
        key_biases: whether its keys have biases.
    """

    model: ModelShape
    target: Target
    profile: ProfileDocument | None
    layers: Sequence[LayerShape | None]
    key_biases: bool = False

    def plan(self, evidence: Evidence, *, share: bool) -> Planned:
        """Plan for a variant: its measured share of the prompt, or all of the memory.

        One that keeps everything has the whole prompt in all of the memory.

        Raises:
            UsageError: no plan can say how the variant splits its budget; too small a budget.
        """
        target, policy = self.target, evidence.policy
        if share or not policy.takes_budget:
            tokens = max(1, int(evidence.share * target.prompt_tokens))
            target = target.model_copy(update={"bytes": None, "tokens": tokens})
        allocator = policy.allocator or Uniform()
        if allocator.name not in ALLOCATORS:
            raise UsageError("it splits its budget by a schedule of its own, which no plan has")
        planned = make_plan(
            self.model, allocator, target, profile=self.profile, policy=policy, layers=self.layers
        )
        if policy.takes_budget:
            return planned
        return Planned(planned.document.model_copy(update={"target": self.target}), [])


def recommend(
    results: ResultsDocument, place: Place, guarantee: float | None = None
) -> Recommendation:
    """Choose the variant with the best score that can be had in the memory, of those guaranteed.

    Raises:
        UsageError: results without a verdict, a measured policy or that guarantee; nothing fits.
    """
    measured, left_out = _measured(results)
    if guarantee is not None:
        passed = _guaranteed(results, guarantee)
        names = [each.variant.name for each in measured]
        left_out += [f"{name}: not guaranteed" for name in names if name not in passed]
        measured = [each for each in measured if each.variant.name in passed]
    fitting, too_large = [], {}
    for evidence in measured:
        try:
            needed = place.plan(evidence, share=True).held
        except UsageError as error:
            left_out.append(f"{evidence.variant.name}: {error}")
            continue
        if needed > (place.target.bytes or 0):
            too_large[evidence.variant.name] = needed
        else:
            fitting.append(evidence)
    variant = next(variant for variant in results.variants if variant.policy == _FULL)
    whole = Fraction(1), place.target.prompt_tokens
    full = Evidence(variant, Policy(Full()), *whole, [])
    planned = place.plan(full, share=True)
    here = results.model.config_hash == place.model.config_hash

    def rank(evidence: Evidence) -> tuple[bool, float, bool, Fraction]:
        codec = evidence.policy.codec
        fine = codec is None or codec.key_bits >= 8 or not place.key_biases
        return fine or here, evidence.gain, fine, -evidence.share

    best = max(fitting, key=rank, default=None)
    needed = planned.held
    if needed <= (place.target.bytes or 0) and not (best and best.beats_full):
        return Recommendation(full, planned, left_out, list(too_large))
    if best is None:
        raise _nothing_fits(place.target, too_large | {_FULL: needed}, left_out)
    planned = place.plan(best, share=best.policy.stores_all or guarantee is not None)
    return Recommendation(best, planned, left_out, list(too_large))


def measured_losses(results: ResultsDocument) -> Losses:
    """Return what results say that policies lose, in the mean over tasks.

    Raises:
        UsageError: results without a verdict or a measured policy.
    """
    points = []
    for evidence in _measured(results)[0]:
        gains: dict[bool, list[float]] = {True: [], False: []}
        for each in evidence.tasks:
            gains[each.query_aware].append(against_full(each)[0])
        known, later = (_lost(gains[aware]) for aware in (True, False))
        points.append((str(evidence.policy), float(evidence.share), Loss(known, later)))
    source = f"measured in the results given, with `{results.model.id}`"
    return replace(of_points(source, points), model=results.model.config_hash)


def _guaranteed(results: ResultsDocument, loss: float) -> set[str]:
    """Return the variants of the guarantee that a run was made with, or refuse another."""
    found = None if results.verdict is None else results.verdict.guarantee
    if found is None or found.loss != loss:
        has = "no guarantee" if found is None else f"a guarantee of {found.loss:g} %"
        raise UsageError(
            f"--guarantee {loss:g}: the run was made with {has}; chosen afterwards: no guarantee",
            hint=f"kvtool eval --guarantee {loss:g}, with another --seed and --output",
        )
    return {each.variant for each in found.chain if each.passed}


def _lost(gains: Sequence[float]) -> float | None:
    """Return the loss, as a share, of gains in percent; None of none."""
    return max(0.0, -sum(gains) / len(gains) / 100) if gains else None


def _measured(results: ResultsDocument) -> tuple[list[Evidence], list[str]]:
    """Return what is known of each variant but the full cache, and which ones are left out."""
    verdict = results.verdict
    if verdict is None:
        raise UsageError(
            "the results hold no verdict, which a recommendation rests on",
            hint="kvtool eval --rescore DIR adds it; nothing is measured again",
        )
    if all(variant.policy == _FULL for variant in results.variants):
        raise UsageError("the results hold no measured policy beside the full cache")
    if verdict.why is not None:
        raise UsageError(f"the results do not tell policies apart: {verdict.why}")
    found, left_out = [], []
    for variant in results.variants:
        if variant.policy == _FULL:
            continue
        try:
            found.append(_evidence(variant, results, verdict.tasks))
        except UsageError as error:
            left_out.append(f"{variant.name}: {error}")
    return found, left_out


def _evidence(variant: VariantEntry, results: ResultsDocument, tasks: Sequence[str]) -> Evidence:
    """Put together what is known of a variant, or refuse one that cannot be compared or run."""
    policy = parse_policy(variant.policy, imports=False)
    if variant.budget is None and policy.takes_budget:
        raise UsageError("it has no budget")
    if variant.planned:
        raise UsageError("it was measured by a plan, which results do not hold")
    found: list[TaskResult] = []
    standing = None if results.verdict is None else results.verdict.of(variant.name)
    for task in tasks:
        result = results.of(variant.name, task)
        if result is None or result.paired is None or not result.paired.full or result.failed:
            why = None if standing is None else standing.why
            raise UsageError(why or f"{task}: it cannot be held against the full cache")
        found.append(result)
    prompt = _mean(found, "prompt_tokens")
    if prompt is None or prompt < 1:
        raise UsageError("its prompts were not counted")
    share = Fraction(1)  # of a cache that is quantised only
    if variant.budget is not None and policy.takes_budget:
        kept = _mean(found, "kept_tokens")
        share = min(share, _share(Budget.parse(variant.budget), policy, prompt, kept))
    return Evidence(variant, policy, share, prompt, found)


def _mean(results: Sequence[TaskResult], name: str) -> float | None:
    """Return the mean of a cost over all samples; None where it was not measured."""
    costs = [(result.n, result.cost) for result in results if result.cost is not None and result.n]
    count = sum(n for n, _ in costs)
    return sum(n * getattr(cost, name) for n, cost in costs) / count if count else None


def _share(budget: Budget, policy: Policy, prompt: float, kept: float | None) -> Fraction:
    """Return a budget as a share of the prompts that it was measured on."""
    if budget.ratio is not None:
        return budget.ratio
    tokens: float | None = budget.tokens
    if tokens is None:  # bytes: of what is read they say nothing, where everything is stored
        tokens = DEFAULT_TOKENS if policy.stores_all else kept
        if not tokens:
            raise UsageError("the tokens that its bytes kept were not counted")
    return Fraction(tokens / prompt).limit_denominator(_FINEST)


def _nothing_fits(target: Target, needed: dict[str, int], left_out: list[str]) -> UsageError:
    """Say which variant comes closest."""
    name = min(needed, key=needed.__getitem__)
    more = f"; left out: {'; '.join(left_out)}" if left_out else ""
    return UsageError(
        f"nothing that was measured fits into {bytes_in_words(target.bytes or 0)} at a context of "
        f"{target.context}: `{name}` holds {bytes_in_words(needed[name])} there{more}",
        hint=f"--bytes {bytes_to_type(needed[name])}",
    )
