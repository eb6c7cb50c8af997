"""Make a plan: tokens of every layer, RocketKV's sizes and totals, for one target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction

from kvtool.documents.plan import (
    DTYPE_BYTES,
    FREE,
    SLIDING,
    Cost,
    LayerPlan,
    PlanDocument,
    RocketKVSection,
    Target,
    Totals,
)
from kvtool.documents.profile import ModelShape, ProfileDocument
from kvtool.errors import UsageError
from kvtool.maths.allocation import Allocation
from kvtool.planning.evidence import evidence, length_scale
from kvtool.planning.rocketkv import RocketKVPlan, nominal_storage, plan_rocketkv
from kvtool.policies.allocate.room import Allocator, Room
from kvtool.policies.allocate.table import spell_allocator
from kvtool.sizes import fraction_of

LEAST = 8
"""Tokens of a layer that gets least, where nothing else is asked for: 4 sinks, 3 heavy, 1 recent
(D2O)."""


@dataclass(frozen=True)
class Needs:
    """What a policy asks of every layer.

    Attributes:
        policy: its spelling, None for no policy in particular.
        least: the smallest budget it works with.
        window: newest tokens that it always keeps, None for none.
    """

    policy: str | None = None
    least: int = 1
    window: int | None = None


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
    needs: Needs = Needs(),
    min_tokens: int | None = None,
    layer_bytes: Sequence[int] | None = None,
) -> Planned:
    """Plan budgets for a model.

    Args:
        allocator: how the target is split over layers.
        profile: of the same model; only some allocators need one.
        min_tokens: least of every layer; None leaves it to the policy and `LEAST`.
        layer_bytes: of one token in every layer; None shares `kv_bytes_per_token` out evenly.

    Raises:
        UsageError: a target too small for the policy or the limits, a measurement that is missing,
            a model without layers to plan.
    """
    layers = _Layers.of(model, target.prompt_tokens, layer_bytes)
    total = _total(target, layers)
    least = _least(target, layers, total, needs, min_tokens)
    scale = length_scale(profile, target.prompt_tokens) if target.ratio is not None else Fraction(1)
    room = Room(
        total=total,
        lo=[min(least, layers.prompt_tokens)] * len(layers.free),
        hi=[layers.prompt_tokens] * len(layers.free),
        window=needs.window,
        **evidence(allocator, profile, layers.free, scale),
    )
    split = allocator.split(room)
    rocketkv, refused = _rocketkv(model, layers, target, total // len(layers.free), needs)
    document = PlanDocument(
        model=model,
        target=target,
        layers=layers.plan(spell_allocator(allocator), room.lo[0], split),
        rocketkv=rocketkv,
        totals=layers.totals(split, target.batch),
        policy=needs.policy,
    )
    return Planned(document, [*_notes(target, layers, split), *refused])


@dataclass(frozen=True)
class _Layers:
    """The layers of a model before the budget is split.

    Attributes:
        free: indices of the layers to split over.
        fixed: tokens that each other layer holds at most.
        bytes: of one token in every layer.
        prompt_tokens: length of the longest prompt.
    """

    free: list[int]
    fixed: dict[int, int]
    bytes: Sequence[int]
    prompt_tokens: int

    @classmethod
    def of(cls, model: ModelShape, prompt_tokens: int, sizes: Sequence[int] | None) -> _Layers:
        kinds = model.layer_types
        free = [i for i, kind in enumerate(kinds) if kind in FREE]
        sliding = [i for i, kind in enumerate(kinds) if kind in SLIDING]
        if not free:
            raise UsageError(
                f"model `{model.id}` has no layer whose budget is free",
                hint="layers with a sliding window keep just that, whatever the budget",
            )
        if sliding and model.sliding_window is None:
            raise UsageError(f"model `{model.id}` slides over windows of unknown width")
        fixed = dict.fromkeys(set(range(len(kinds))) - set(free), 0)
        fixed |= {i: max(1, model.sliding_window - 1) for i in sliding}
        if sizes is None:
            each = model.kv_bytes_per_token // (len(free) + len(sliding))
            sizes = [each if i in free or i in sliding else 0 for i in range(len(kinds))]
        return cls(free, fixed, sizes, prompt_tokens)

    @property
    def per_token(self) -> int:
        """Bytes of one token in a layer whose budget is free."""
        return max(self.bytes[i] for i in self.free)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of one row in the layers that are not planned."""
        return sum(min(held, self.prompt_tokens) * self.bytes[i] for i, held in self.fixed.items())

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
            fractions=[free[i] / n if i in free else None for i in range(len(self.bytes))],
        )

    def totals(self, split: Allocation, batch: int) -> Totals:
        n = self.prompt_tokens
        held = [min(tokens, n) for tokens in self.tokens(split.tokens)]
        full = self.fixed_bytes + n * sum(self.bytes[i] for i in self.free)
        used = sum(tokens * size for tokens, size in zip(held, self.bytes, strict=True))
        return Totals(tokens=sum(held), bytes=used * batch, share_of_full=used / full)


def _total(target: Target, layers: _Layers) -> int:
    """Return the tokens of all free layers together, per KV head."""
    budget = target.budget
    if budget.tokens is not None:
        return budget.tokens * len(layers.free)
    if budget.ratio is not None:
        return fraction_of(budget.ratio, target.prompt_tokens) * len(layers.free)
    return max(0, (budget.bytes // target.batch - layers.fixed_bytes) // layers.per_token)


def _least(
    target: Target, layers: _Layers, total: int, needs: Needs, min_tokens: int | None
) -> int:
    """Return the least tokens of a layer, and refuse a total that is below them."""
    mean = min(total // len(layers.free), layers.prompt_tokens)
    if min_tokens is not None and min_tokens < needs.least:
        raise UsageError(
            f"a layer of {_counted(min_tokens)} is too small for policy `{needs.policy}`",
            hint=f"--min-tokens {needs.least}",
        )
    asked = needs.least if min_tokens is None else min_tokens
    asked = min(asked, layers.prompt_tokens)
    if mean >= asked:
        return asked if min_tokens is not None else min(max(LEAST, asked), mean)
    why = f"policy `{needs.policy}`" if min_tokens is None and needs.policy else "--min-tokens"
    if target.bytes is not None:
        needed = layers.fixed_bytes + asked * layers.per_token * len(layers.free)
        raise UsageError(
            f"{target.budget} is too small: {_counted(asked)} in every layer"
            f"{'' if asked == 1 else f' ({why})'} take {needed * target.batch} bytes",
            hint=f"--bytes {needed * target.batch}B",
        )
    of_prompt = f" of {target.prompt_tokens}" if target.ratio is not None else ""
    raise UsageError(
        f"{target.budget}{of_prompt} is {_counted(mean)} per layer, fewer than the {asked} of {why}"
    )


def _counted(tokens: int) -> str:
    return "1 token" if tokens == 1 else f"{tokens} tokens"


def _rocketkv(
    model: ModelShape, layers: _Layers, target: Target, budget: int, needs: Needs
) -> tuple[RocketKVSection | None, list[str]]:
    """Return RocketKV's section, or why there is none; a plan for RocketKV itself needs one."""
    name = (needs.policy or "").partition("+")[0].partition("(")[0]
    asked = name in ("rocketkv", "rocketkv-mt")
    options = {} if needs.window is None or not asked else {"window": needs.window}
    try:
        if model.dtype in DTYPE_BYTES and layers.per_token != (
            2 * model.kv_heads * model.head_dim * DTYPE_BYTES[model.dtype]
        ):
            raise UsageError(f"`{model.id}` does not store keys and values per head")
        plan = plan_rocketkv(
            target.context,
            budget,
            model.head_dim,
            max_new_tokens=target.max_new_tokens,
            **options,
        )
    except UsageError as error:
        if asked:
            raise
        return None, [f"note: no plan for rocketkv: {error}"]
    return _section(plan, model.head_dim), []


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
            f"note: {sliding} of {len(layers.bytes)} layers keep their sliding window; "
            f"the target is that of the other {len(layers.free)}"
        )
    if split.clamped:
        notes.append(
            f"note: {target.budget} is more than all of a prompt of {target.prompt_tokens} tokens; "
            "every layer keeps it whole"
        )
    return notes
