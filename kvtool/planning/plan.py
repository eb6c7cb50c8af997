"""Make a plan: tokens of every layer, RocketKV's sizes and totals, for one target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from kvtool.documents.model_shape import DTYPE_BYTES, ModelShape
from kvtool.documents.plan import (
    Amount,
    Cost,
    LayerPlan,
    PlanDocument,
    RocketKVSection,
    Target,
    Totals,
)
from kvtool.documents.profile import ProfileDocument
from kvtool.errors import UsageError
from kvtool.maths.allocation import Allocation
from kvtool.model_shape import FREE, LayerShape
from kvtool.planning.evidence import evidence, length_scale
from kvtool.planning.forecast import Forecast, Text, kv_bytes, tokens_held
from kvtool.planning.held import forecast_plan, largest, least_allowed
from kvtool.planning.rocketkv import RocketKVPlan, nominal_storage, plan_rocketkv
from kvtool.policies.allocate.problem import AllocationProblem
from kvtool.policies.allocate.table import spell_allocator
from kvtool.policies.parts import Allocator
from kvtool.sizes import DEFAULT_TOKENS

if TYPE_CHECKING:
    from kvtool.policies.policy import Policy

LEAST = 8
"""Tokens of a layer that gets least, where nothing else is asked for: 4 sinks, 3 heavy, 1 recent
(D2O)."""


@dataclass(frozen=True)
class Planned:
    """A plan, and what its reader should be told, one line each."""

    document: PlanDocument
    notes: list[str]


def make_plan(
    model: ModelShape,
    allocator: Allocator,
    target: Target,
    *,
    profile: ProfileDocument | None = None,
    policy: Policy | None = None,
    min_tokens: int | None = None,
    layers: Sequence[LayerShape | None] | None = None,
) -> Planned:
    """Plan budgets for a model.

    Args:
        allocator: how the target is split over layers.
        profile: of the same model; only some allocators need one.
        policy: what will run; None for no policy in particular.
        min_tokens: least of every layer; None leaves it to the policy and `LEAST`.
        layers: what each layer stores; None shares `kv_bytes_per_token` out evenly.

    Raises:
        UsageError: a target too small for the policy or the limits, a measurement that is missing,
            a model without layers to plan.
    """
    shapes = model.layer_shapes() if layers is None else list(layers)
    plannable = _Layers.of(model, target.prompt_tokens, shapes)
    drafts = _Drafts(model, allocator, target, profile, policy, min_tokens, plannable)
    total, notes = _total(drafts)
    draft = drafts.of(total)
    totals = drafts.totals(draft.document)
    document = draft.document.model_copy(update={"totals": totals})
    notes = [*notes, *_notes(target, plannable, draft.split), *draft.refused]
    if policy is None and target.bytes is not None:
        notes.append(
            "note: no policy is named (-p), so bytes are those of one that keeps no numbers of its "
            "own; others hold more"
        )
    return Planned(document, notes)


@dataclass(frozen=True)
class _Draft:
    """A plan without its totals, how it was split, and why it has no section for RocketKV."""

    document: PlanDocument
    split: Allocation
    refused: list[str]


@dataclass(frozen=True)
class _Drafts:
    """All plans for one request, by the tokens of the free layers together."""

    model: ModelShape
    allocator: Allocator
    target: Target
    profile: ProfileDocument | None
    policy: Policy | None
    min_tokens: int | None
    layers: _Layers

    @property
    def text(self) -> Text:
        """What the plan is for."""
        target = self.target
        given = (target.prompt_tokens, target.max_new_tokens, target.batch)
        return Text(*given, vocabulary=self.model.vocabulary)

    @property
    def least(self) -> int:
        """The smallest budget of a layer that the request allows, a longer prompt given."""
        if self.min_tokens is not None:
            return self.min_tokens
        return 1 if self.policy is None else self.policy.min_budget

    def of(self, total: int) -> _Draft:
        """Split so many tokens over the free layers."""
        layers, target, policy = self.layers, self.target, self.policy
        least = _least(self, total)
        scale = Fraction(1)
        if target.ratio is not None:
            scale = length_scale(self.profile, target.prompt_tokens)
        window = None
        if policy is not None and policy.score.when == "prompt":
            window = policy.score.window
        problem = AllocationProblem(
            total=total,
            lo=[min(least, layers.prompt_tokens)] * len(layers.free),
            hi=[layers.prompt_tokens] * len(layers.free),
            window=window,
            **evidence(self.allocator, self.profile, layers.free, scale),
        )
        split = self.allocator.split(problem)
        rocketkv, refused = _rocketkv(self, total // len(layers.free))
        document = PlanDocument(
            model=self.model,
            target=target,
            layers=layers.plan(spell_allocator(self.allocator), problem.lo[0], split),
            rocketkv=rocketkv,
            policy=None if policy is None else str(policy),
        )
        return _Draft(document, split, refused)

    def forecast(self, document: PlanDocument) -> Forecast:
        """Forecast what a run of the policy holds."""
        return forecast_plan(document, self.policy, self.text, self.layers.shapes)

    def totals(self, document: PlanDocument) -> Totals:
        """Say what it all takes."""
        layers, n = self.layers.shapes, self.target.prompt_tokens
        held = [min(tokens, n) for tokens in document.layers.tokens]
        used = kv_bytes(layers, held)
        found = self.forecast(document)
        storage, traffic = _amounts(found)
        if self.policy is not None:
            return Totals(
                tokens=sum(held), **storage.model_dump(), storage=storage, traffic=traffic
            )
        return Totals(
            tokens=sum(held),
            bytes=used * self.target.batch,
            share_of_full=used / kv_bytes(layers, tokens_held(layers, n)),
            storage=storage,
            traffic=traffic,
        )


def _amounts(found: Forecast) -> tuple[Amount, Amount]:
    storage = Amount(bytes=found.storage, share_of_full=found.storage / found.full_storage)
    traffic = Amount(bytes=found.traffic, share_of_full=found.traffic / found.full_traffic)
    return storage, traffic


@dataclass(frozen=True)
class _Layers:
    """The layers of a model before the budget is split.

    Attributes:
        free: indices of the layers to split over.
        prompt_tokens: length of the longest prompt.
        shapes: what each layer stores of a token.
    """

    free: list[int]
    prompt_tokens: int
    shapes: list[LayerShape | None]

    @classmethod
    def of(cls, model: ModelShape, prompt: int, shapes: list[LayerShape | None]) -> _Layers:
        free = [i for i, kind in enumerate(model.layer_types) if kind in FREE]
        if not free:
            raise UsageError(
                f"model `{model.id}` has no layer whose budget is free",
                hint="layers with a sliding window keep just that, whatever the budget",
            )
        return cls(free, prompt, shapes)

    @property
    def fixed(self) -> dict[int, int]:
        """Tokens that each layer holds at most whose budget is not free."""
        windows = {i: layer.window or 0 for i, layer in enumerate(self.shapes) if layer is not None}
        return {i: windows.get(i, 0) for i in range(len(self.shapes)) if i not in self.free}

    def tokens(self, split: Sequence[int]) -> list[int]:
        """Return the tokens of every layer."""
        held = self.fixed | dict(zip(self.free, split, strict=True))
        return [held[i] for i in range(len(held))]

    def plan(self, allocator: str, least: int, split: Allocation) -> LayerPlan:
        n = self.prompt_tokens
        free = dict(zip(self.free, split.tokens, strict=True))
        return LayerPlan(
            allocator=allocator,
            min_tokens=least,
            tokens=self.tokens(split.tokens),
            fractions=[free[i] / n if i in free else None for i in range(len(self.shapes))],
        )


def _total(drafts: _Drafts) -> tuple[int, list[str]]:
    """Return the tokens of all free layers together, per KV head, and what to say of them."""
    budget, layers, policy = drafts.target.budget, drafts.layers, drafts.policy
    count = len(layers.free)
    if budget.bytes is None:
        return budget.for_prompt(drafts.target.prompt_tokens) * count, []
    if policy is not None and policy.stores_all:
        mean = min(DEFAULT_TOKENS, layers.prompt_tokens)
        needed = drafts.forecast(drafts.of(mean * count).document).storage
        if needed > budget.bytes:
            raise UsageError(
                f"{budget} is too small: `{policy}` stores everything, which takes {needed} bytes",
                hint=f"--bytes {needed}B, or a policy that evicts",
            )
        told = f"note: `{policy}` stores everything; a token reads {mean} pairs per KV head"
        return mean * count, [told]

    def fits(total: int) -> bool:
        return drafts.forecast(drafts.of(total).document).storage <= budget.bytes

    same = policy is not None and policy.score.layers == "same"
    step = count if same else 1  # equal in all layers
    least, most = min(drafts.least, layers.prompt_tokens) * count, layers.prompt_tokens * count
    if policy is not None and policy.two_stages:
        step, most = count, drafts.target.context * count
        pairs = drafts.target.context
        least = count * least_allowed(lambda t: _plan_rocketkv(drafts, t), drafts.least, pairs)
    found = largest(lambda steps: fits(steps * step), least // step, most // step)
    if found is not None:
        return found * step, []
    needed = drafts.forecast(drafts.of(least).document).storage
    asked = least // count
    why = f"policy `{policy}`" if drafts.min_tokens is None and policy else "--min-tokens"
    why = "" if asked == 1 else f" ({why})"
    what = "token" if asked == 1 else "tokens"
    what = "pairs per step" if policy is not None and policy.two_stages else what
    raise UsageError(
        f"{budget} is too small: {asked} {what} in every layer{why} take {needed} bytes",
        hint=f"--bytes {needed}B",
    )


def _least(drafts: _Drafts, total: int) -> int:
    """Return the least tokens of a layer, and refuse a total that is below them."""
    layers, target, policy = drafts.layers, drafts.target, drafts.policy
    mean = min(total // len(layers.free), layers.prompt_tokens)
    if (
        drafts.min_tokens is not None
        and policy is not None
        and drafts.min_tokens < policy.min_budget
    ):
        raise UsageError(
            f"a layer of {_counted(drafts.min_tokens)} is too small for policy `{policy}`",
            hint=f"--min-tokens {policy.min_budget}",
        )
    asked = min(drafts.least, layers.prompt_tokens)
    if mean >= asked:
        return asked if drafts.min_tokens is not None else min(max(LEAST, asked), mean)
    why = f"policy `{policy}`" if drafts.min_tokens is None and policy else "--min-tokens"
    of_prompt = f" of {target.prompt_tokens}" if target.ratio is not None else ""
    raise UsageError(
        f"{target.budget}{of_prompt} is {_counted(mean)} per layer, fewer than the {asked} of {why}"
    )


def _counted(tokens: int) -> str:
    return "1 token" if tokens == 1 else f"{tokens} tokens"


def _rocketkv(drafts: _Drafts, budget: int) -> tuple[RocketKVSection | None, list[str]]:
    """Return RocketKV's section, or why there is none; a plan for RocketKV itself needs one."""
    model, policy = drafts.model, drafts.policy
    asked = policy is not None and policy.budget_is_traffic and policy.reader.planned
    try:
        stored = [drafts.layers.shapes[i] for i in drafts.layers.free]
        per_head = 2 * model.head_dim * DTYPE_BYTES.get(model.dtype or "", 0)
        if per_head and max(layer.token_bytes for layer in stored if layer) != per_head:
            raise UsageError(f"`{model.id}` does not store keys and values per head")
        plan = _plan_rocketkv(drafts, budget)
    except UsageError as error:
        if asked:
            raise
        return None, [f"note: no plan for rocketkv: {error}"]
    return _section(plan, model.head_dim), []


def _plan_rocketkv(drafts: _Drafts, budget: int) -> RocketKVPlan:
    """Plan for the policy, where it is RocketKV or has no stage 1, or for RocketKV as it is."""
    policy, options = drafts.policy, {}
    if policy is not None and policy.two_stages:
        options = {"window": policy.score.window, "split": policy.score.split}
    elif policy is not None and policy.budget_is_traffic and policy.reader.planned:
        options = {"window": 0, "split": 0.0}
    target = drafts.target
    return plan_rocketkv(
        target.context,
        budget,
        drafts.model.head_dim,
        max_new_tokens=target.max_new_tokens,
        **options,
    )


def _section(plan: RocketKVPlan, head_dim: int) -> RocketKVSection:
    ratio, split = plan.compression_ratio, plan.split_factor
    paper = 1.0 if plan.dense else nominal_storage(ratio, split, doubled=True)
    return RocketKVSection(
        **asdict(plan),
        storage=Cost(exact=plan.storage(), paper=paper),
        traffic=Cost(exact=plan.traffic(head_dim), paper=1 / ratio),
    )


def _notes(target: Target, layers: _Layers, split: Allocation) -> list[str]:
    notes = []
    sliding = sum(tokens > 0 for tokens in layers.fixed.values())
    if sliding:
        notes.append(
            f"note: {sliding} of {len(layers.shapes)} layers keep their sliding window; "
            f"the target is that of the other {len(layers.free)}"
        )
    if split.clamped:
        notes.append(
            f"note: {target.budget} is more than all of a prompt of {target.prompt_tokens} tokens; "
            "every layer keeps it whole"
        )
    return notes
