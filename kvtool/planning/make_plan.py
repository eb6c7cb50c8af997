"""Make a plan: tokens of every layer, RocketKV's sizes and totals, for one target.

Allocators split the budget over the layers, by what a profile says of those whose budget is free.
RocketKV's section of a plan has what its two stages need, for a policy and a target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from kvtool.documents.memory import ModelShape
from kvtool.documents.plan import (
    Amount,
    Cost,
    LayerPlan,
    PlanDocument,
    PredictedLoss,
    RocketKVSection,
    Target,
    Totals,
)
from kvtool.errors import UsageError
from kvtool.maths.allocation import Allocation
from kvtool.model_shape import DTYPE_BYTES, FREE, LayerShape
from kvtool.planning.budgets import forecast_plan
from kvtool.planning.bytes import check_dims, free_of, kv_bytes, tokens_held
from kvtool.planning.peak import reading_bytes, repeating_bytes
from kvtool.planning.plan_in_use import text_of
from kvtool.planning.rocketkv_stages import (
    RocketKVPlan,
    goes_by_stages,
    nominal_storage,
    plan_rocketkv,
    split_of,
)
from kvtool.planning.search import largest_that_fits, least_allowed
from kvtool.planning.split_facts import BudgetCurves, by_heads, evidence, length_scale, loss_note
from kvtool.policies.allocate.fixed import PlannedHeads, with_fixed_heads
from kvtool.policies.allocate.optimal import LossForecast, forecast_heads, forecast_losses
from kvtool.policies.allocate.problem import AllocationProblem
from kvtool.policies.allocate.table import spell_allocator
from kvtool.policies.parts import Allocator
from kvtool.sizes import DEFAULT_TOKENS, bytes_in_words, bytes_to_type, longest_block

if TYPE_CHECKING:
    from kvtool.documents.profile import ProfileDocument
    from kvtool.policies.policy import Policy


@dataclass(frozen=True)
class PlannableLayers:
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
    def of(cls, model: ModelShape, prompt: int, shapes: list[LayerShape | None]) -> PlannableLayers:
        free = [i for i, kind in enumerate(model.layer_types) if kind in FREE]
        if not free:
            raise UsageError(
                f"model `{model.id}` has no layer whose budget is free",
                hint="layers with a sliding window keep just that, whatever the budget",
            )
        return cls(free, prompt, shapes)

    @property
    def free_shapes(self) -> list[LayerShape]:
        """What the layers to split over store."""
        return free_of(self.shapes)

    @property
    def fixed(self) -> dict[int, int]:
        """Tokens that each layer holds at most whose budget is not free."""
        windows = {i: layer.window or 0 for i, layer in enumerate(self.shapes) if layer is not None}
        return {i: windows.get(i, 0) for i in range(len(self.shapes)) if i not in self.free}

    def plan(self, allocator: str, least: int, split: Allocation) -> LayerPlan:
        """Put a split of the free layers among the others."""
        n, layers = self.prompt_tokens, range(len(self.shapes))
        free = dict(zip(self.free, split.tokens, strict=True))
        held = self.fixed | free
        heads = None
        if split.by_head is not None:
            own = dict(zip(self.free, split.by_head, strict=True))
            heads = [own.get(i) for i in layers]
        return LayerPlan(
            allocator=allocator,
            min_tokens=least,
            tokens=[held[i] for i in layers],
            fractions=[free[i] / n if i in free else None for i in layers],
            heads=heads,
        )


def make_section(
    model: ModelShape,
    layers: Sequence[LayerShape],
    target: Target,
    policy: Policy | None,
    budget: int,
) -> tuple[RocketKVSection | None, list[str]]:
    """Return RocketKV's section, or why there is none; a plan for RocketKV itself needs one.

    Args:
        layers: those whose budget is free.
        policy: what will run; None for no policy in particular.
        budget: pairs that a step reads of a layer and KV head.

    Raises:
        UsageError: there can be none, and the policy uses it.
    """
    try:
        per_head = 2 * model.head_dim * DTYPE_BYTES.get(model.dtype or "", 0)
        if per_head and max(layer.token_bytes for layer in layers) != per_head:
            raise UsageError(f"`{model.id}` does not store keys and values per head")
        plan = plan_for(model, target, policy, budget)
    except UsageError as error:
        if policy is not None and goes_by_stages(policy):
            raise
        return None, [f"note: no plan for rocketkv: {error}"]
    ratio, split = plan.compression_ratio, plan.split_factor
    paper = 1.0 if plan.dense else nominal_storage(ratio, split, doubled=True)
    storage = Cost(exact=plan.storage(), paper=paper)
    traffic = Cost(exact=plan.traffic(model.head_dim), paper=1 / ratio)
    return RocketKVSection(**asdict(plan), storage=storage, traffic=traffic), []


def plan_for(model: ModelShape, target: Target, policy: Policy | None, budget: int) -> RocketKVPlan:
    """Plan for the policy, where it is RocketKV or has no stage 1, or for RocketKV as it is."""
    more: dict[str, Any] = {}
    if policy is not None and goes_by_stages(policy):
        window = policy.score.window if policy.two_stages else 0
        more = {"window": window, "split": split_of(policy)}
    given = target.context, budget, model.head_dim
    return plan_rocketkv(*given, max_new_tokens=target.max_new_tokens, **more)


LEAST = 8
"""Tokens of a layer that gets least, where nothing else is asked for: 4 sinks, 3 heavy, 1 recent
(D2O)."""


@dataclass(frozen=True)
class Planned:
    """A plan, and the notes for its reader, one line each."""

    document: PlanDocument
    notes: list[str]

    @property
    def held(self) -> int:
        """Bytes that are held at most."""
        return self.document.planned_bytes or 0  # it has totals, as every plan that was just made


def make_plan(
    model: ModelShape,
    allocator: Allocator,
    target: Target,
    *,
    profile: ProfileDocument | None = None,
    policy: Policy | None = None,
    min_tokens: int | None = None,
    layers: Sequence[LayerShape | None] | None = None,
    curves: BudgetCurves | None = None,
) -> Planned:
    """Plan budgets for a model.

    Args:
        allocator: how the target is split over layers.
        profile: of the same model; only some allocators need one.
        policy: what will run; None for no policy in particular.
        min_tokens: least of every layer; None leaves it to the policy and `LEAST`.
        layers: what each layer stores; None shares `kv_bytes_per_token` out evenly.
        curves: published budgets, for the allocator `curves`.

    Raises:
        UsageError: a target too small for the policy or the limits, a measurement that is missing,
            a model without layers to plan, or whose heads the policy's codec cannot store; budgets
            of KV heads for a policy that keeps as many tokens in all of them.
    """
    shapes = model.layer_shapes() if layers is None else list(layers)
    check_dims(policy, shapes)
    if policy is not None and by_heads(allocator):
        with_fixed_heads(policy, PlannedHeads())
    plannable = PlannableLayers.of(model, target.prompt_tokens, shapes)
    given = (model, allocator, target, profile, policy, min_tokens, plannable)
    drafts = Drafts(*given, curves)
    total, notes = _total(drafts)
    draft = drafts.of(total)
    totals = totals_of(draft.document, policy, shapes)
    document = PlanDocument(**{**dict(draft.document), "totals": totals})
    notes = [*notes, *_notes(target, plannable, draft.split), *draft.refused]
    if totals.reading is not None and policy is not None:
        n, held = target.prompt_tokens, draft.document.layers.tokens
        block = longest_block(n, policy.own_block or n)
        slots = [min(n, tokens + block) for tokens in held]
        stored, *beside = repeating_bytes(policy, shapes, slots, n, block)
        blocks = (stored + max(beside)) * target.batch
        notes.append(
            f"note: `{policy}` keeps the whole prompt until it is cut: while it is read the cache "
            f"takes {bytes_in_words(totals.reading)}, with --prefill block "
            f"{bytes_in_words(blocks)} at most"
        )
    if draft.losses is not None:
        notes.append(loss_note(draft.losses, allocator))
    if policy is None and target.bytes is not None:
        notes.append(
            "note: no policy is named (-p), so bytes are those of one that keeps no numbers of its "
            "own; others hold more"
        )
    return Planned(document, notes)


@dataclass(frozen=True)
class Draft:
    """A plan without its totals, how it was split, and why it has no section for RocketKV.

    The plan's sections are validated, and whether they agree is not.

    Attributes:
        losses: what the answer is expected to lose; None: not measured.
    """

    document: PlanDocument
    split: Allocation
    refused: list[str]
    losses: LossForecast | None = None


@dataclass(frozen=True)
class Drafts:
    """All plans for one request, by the tokens of the free layers together."""

    model: ModelShape
    allocator: Allocator
    target: Target
    profile: ProfileDocument | None
    policy: Policy | None
    min_tokens: int | None
    layers: PlannableLayers
    curves: BudgetCurves | None = None

    @property
    def least(self) -> int:
        """The smallest budget of a layer that the request allows, a longer prompt given."""
        if self.min_tokens is not None:
            return self.min_tokens
        return 1 if self.policy is None else self.policy.min_budget

    @property
    def why_least(self) -> str:
        """What that follows from, in words."""
        named = self.min_tokens is None and self.policy is not None
        return f"policy `{self.policy}`" if named else "--min-tokens"

    @property
    def measured(self) -> int:
        """The smallest budget whose loss the profile holds, where the allocator uses losses."""
        losses = None if self.profile is None else self.profile.metrics.answer_loss
        by_loss = self.allocator.metric == "answer_loss"
        return min(losses.budgets) if by_loss and losses is not None else 1

    def of(self, total: int) -> Draft:
        """Split a total of tokens over the free layers."""
        layers, target, policy = self.layers, self.target, self.policy
        least = _least(self, total)
        scale = Fraction(1)
        if target.ratio is not None:
            scale = length_scale(self.profile, target.prompt_tokens)
        problem = AllocationProblem(
            total=total,
            min_budgets=[min(least, layers.prompt_tokens)] * len(layers.free),
            max_budgets=[layers.prompt_tokens] * len(layers.free),
            window=None if policy is None else policy.voting_window,
            **evidence(
                self.allocator, self.profile, layers.free, scale, self._shares(total), policy
            ),
        )
        split = self.allocator.split(problem)
        losses = None
        if problem.head_curves:
            losses = forecast_heads(problem, split)
        elif problem.curves.budgets:
            losses = forecast_losses(problem, split.tokens)
        mean = total // len(layers.free)
        rocketkv, refused = make_section(self.model, layers.free_shapes, target, policy, mean)
        document = PlanDocument.model_construct(
            model=self.model,
            target=target,
            layers=layers.plan(spell_allocator(self.allocator), problem.min_budgets[0], split),
            rocketkv=rocketkv,
            policy=None if policy is None else str(policy),
            predicted_loss=None if losses is None else PredictedLoss(**asdict(losses)),
        )
        return Draft(document, split, refused, losses)

    def _shares(self, total: int) -> list[float] | None:
        """Return the published shares of the free layers for a total, None without curves."""
        if self.curves is None:
            return None
        ratio = total / (len(self.layers.free) * self.layers.prompt_tokens)
        shares = self.curves.at(ratio)
        return [shares[i] for i in self.layers.free]

    def bytes(self, total: int) -> int:
        """Forecast what a run of the policy holds with a total of tokens."""
        plan = self.of(total).document
        return forecast_plan(plan, self.policy, text_of(plan), self.layers.shapes).storage


def totals_of(
    plan: PlanDocument, policy: Policy | None, layers: Sequence[LayerShape | None]
) -> Totals:
    """Say what a plan takes, by its tokens and stages alone.

    Args:
        policy: that runs; None for no policy in particular.
        layers: what each layer stores.
    """
    n = plan.target.prompt_tokens
    held = [min(tokens, n) for tokens in plan.layers.tokens]
    found = forecast_plan(plan, policy, text_of(plan), layers)
    storage = Amount(bytes=found.storage, share_of_full=found.storage / found.full_storage)
    traffic = Amount(bytes=found.traffic, share_of_full=found.traffic / found.full_traffic)
    size, share, whole = storage.bytes, storage.share_of_full, None
    if policy is None:
        used = kv_bytes(layers, held)
        size, share = used * plan.target.batch, used / kv_bytes(layers, tokens_held(layers, n))
    elif policy.repetition is not None:
        whole = reading_bytes(policy, layers, held, n, n, waits=True) * plan.target.batch
    return Totals(
        tokens=sum(held),
        bytes=size,
        share_of_full=share,
        storage=storage,
        traffic=traffic,
        reading=whole,
    )


def _total(drafts: Drafts) -> tuple[int, list[str]]:
    """Return the tokens of all free layers together, per KV head, and what to say of them."""
    budget, layers, policy = drafts.target.budget, drafts.layers, drafts.policy
    count, size = len(layers.free), budget.bytes
    if size is None:
        return budget.for_prompt(drafts.target.prompt_tokens) * count, []
    if policy is not None and (policy.stores_all or not policy.takes_budget):
        mean = min(DEFAULT_TOKENS, layers.prompt_tokens)
        mean = mean if policy.takes_budget else layers.prompt_tokens
        needed = drafts.bytes(mean * count)
        if needed > size:
            raise UsageError(
                f"{bytes_in_words(size)} is too small: `{policy}` stores everything, which takes "
                f"{bytes_in_words(needed)}",
                hint=f"--bytes {bytes_to_type(needed)}; without -p the ways that fit are listed",
            )
        note = f"note: `{policy}` stores everything; a token reads {mean} pairs per KV head"
        return mean * count, [note] if policy.takes_budget else []

    same = policy is not None and policy.score.layer_tokens == "same"
    step = count if same else 1  # equal in all layers
    smallest = max(drafts.least, drafts.measured)
    least, most = min(smallest, layers.prompt_tokens) * count, layers.prompt_tokens * count
    if policy is not None and policy.two_stages:
        step, most = count, drafts.target.context * count
        pairs = drafts.target.context
        least = count * least_allowed(
            lambda t: plan_for(drafts.model, drafts.target, policy, t), drafts.least, pairs
        )
    found = largest_that_fits(
        lambda steps: drafts.bytes(steps * step), size, least // step, most // step
    )
    if found is not None:
        return found * step, []
    needed = drafts.bytes(least)
    asked = least // count
    why = "the smallest budget whose loss the profile holds"
    why = why if drafts.measured > drafts.least else drafts.why_least
    why = "" if asked == 1 else f" ({why})"
    what = f"{asked} pairs per step" if policy and policy.two_stages else _counted(asked)
    raise UsageError(
        f"{bytes_in_words(size)} is too small: {what} in every layer{why} take "
        f"{bytes_in_words(needed)}",
        hint=f"--bytes {bytes_to_type(needed)}",
    )


def _least(drafts: Drafts, total: int) -> int:
    """Return the least tokens of a layer, and refuse a total that is below them."""
    layers, target, policy = drafts.layers, drafts.target, drafts.policy
    mean = min(total // len(layers.free), layers.prompt_tokens)
    least = drafts.min_tokens
    if least is not None and policy is not None and least < policy.min_budget:
        raise UsageError(
            f"a layer of {_counted(least)} is too small for policy `{policy}`",
            hint=f"--min-tokens {policy.min_budget}",
        )
    asked = min(drafts.least, layers.prompt_tokens)
    if mean >= asked:
        return asked if drafts.min_tokens is not None else min(max(LEAST, asked), mean)
    of_prompt = f" of {target.prompt_tokens}" if target.ratio is not None else ""
    raise UsageError(
        f"{target.budget}{of_prompt} is {_counted(mean)} per layer, fewer than the {asked} of "
        f"{drafts.why_least}"
    )


def _counted(tokens: int) -> str:
    return "1 token" if tokens == 1 else f"{tokens} tokens"


def _notes(target: Target, layers: PlannableLayers, split: Allocation) -> list[str]:
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
