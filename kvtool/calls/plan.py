"""Plan budgets of all layers in one call, before anything runs.

The model is known by its configuration: what its layers store, in which dtype, at which length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.calls.from_python import (
    check_choice,
    check_keywords,
    check_text,
    keywords_of,
    read_policy,
    spell_dtype,
    takes,
)
from kvtool.calls.plan_settings import PlanSettings, policy_to_plan, positive
from kvtool.documents.budget_curves import BudgetCurves, read_curves
from kvtool.errors import UsageError, quote
from kvtool.model_shape import DTYPE_BYTES, has_key_biases, layer_shapes
from kvtool.models.folder import REFERENCE, check_folder
from kvtool.planning.bytes import check_dims
from kvtool.planning.evidence import default_allocator
from kvtool.policies.allocate.curves import Curves
from kvtool.policies.allocate.table import parse_allocator, spell_allocator
from kvtool.policies.allocate.uniform import Uniform
from kvtool.sizes import MOST_TOKENS, Budget, parse_count
from kvtool.transformers_versions import check_transformers
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from kvtool.calls.ways import WaysRun
    from kvtool.documents.memory import ModelShape
    from kvtool.documents.plan import PlanDocument, Target
    from kvtool.documents.profile import ProfileDocument
    from kvtool.documents.results import ResultsDocument
    from kvtool.documents.ways import Way
    from kvtool.model_shape import LayerShape
    from kvtool.planning.recommend import Recommendation
    from kvtool.policies.parts import Allocator
    from kvtool.policies.policy import Policy


@dataclass(frozen=True)
class PlannedModel:
    """The model to plan for, and what each of its layers stores.

    Attributes:
        config: None where a profile alone describes the model.
    """

    shape: ModelShape
    layers: list[LayerShape | None]
    config: Any = None


def find_model(
    given: PlanSettings, profile: ProfileDocument | None, watcher: Watcher
) -> PlannedModel:
    """Return the profile's model, or the one asked for; both must be the same."""
    if profile is not None and given.model is None:
        return _of_profile(given, profile)
    if given.model is None:
        watcher.note(f"model: {REFERENCE} (bundled; choose another with --model)")
    from kvtool.documents.memory import ModelShape
    from kvtool.models.configuration import read_config
    from kvtool.models.placement import resolve_device, resolve_dtype

    dtype: str = given.dtype or "auto"
    if given.model is None:  # whatever the bundled model runs in on this machine
        dtype = resolve_dtype(dtype, resolve_device(given.device or "auto", given.device_map))
    config = given.config
    if config is None:
        config = read_config(given.model, **given.checkpoint())
    shape = ModelShape.of(
        config, name=given.model or REFERENCE, revision=given.revision, dtype=dtype
    )
    if profile is not None and profile.model.config_hash != shape.config_hash:
        raise UsageError(
            f"the profile is of model `{profile.model.id}`, whose configuration differs from that "
            f"of `{shape.id}`",
            hint=f"kvtool profile -m {shape.id}",
        )
    if given.dtype in (None, "auto"):
        why = "in which it would run here" if given.model is None else "the checkpoint's own"
        watcher.note(f"dtype: {shape.dtype}, {why} (change: --dtype)")
    return PlannedModel(shape, layer_shapes(config, shape.dtype), config)


def _of_profile(given: PlanSettings, profile: ProfileDocument) -> PlannedModel:
    """Return the model of a profile, without asking for its configuration."""
    shape, memory = profile.model, profile.metrics.memory
    sizes = None if memory is None else memory.layer_bytes_per_token
    if memory is not None and memory.dtype != shape.dtype:
        sizes = None
    if given.dtype in (None, "auto", shape.dtype):
        return PlannedModel(shape, shape.layer_shapes(sizes))
    if shape.dtype not in DTYPE_BYTES:
        raise UsageError(
            "--dtype: the profile does not say in which dtype its bytes are counted",
            hint=f"-m {shape.id} counts anew",
        )
    per_token = shape.kv_bytes_per_token * DTYPE_BYTES[given.dtype] // DTYPE_BYTES[shape.dtype]
    shape = shape.model_copy(update={"dtype": given.dtype, "kv_bytes_per_token": per_token})
    return PlannedModel(shape, shape.layer_shapes())


def usual_context(shape: ModelShape, profile: ProfileDocument | None, watcher: Watcher) -> int:
    """Return the length to plan for where no caller has given one, and say so."""
    if profile is not None and profile.data is not None:
        watcher.note(f"context: {profile.data.tokens} tokens, as profiled (change: --context)")
        return profile.data.tokens
    if shape.trained_length is None:
        raise UsageError(f"model `{shape.id}` has no longest context", hint="--context 32K")
    if shape.trained_length > MOST_TOKENS:
        raise UsageError(
            f"model `{shape.id}` gives {shape.trained_length} tokens as its longest context, more "
            f"than the {MOST_TOKENS} that can be planned for",
            hint="--context 32K",
        )
    watcher.note(f"context: {shape.trained_length} tokens, the model's longest (change: --context)")
    return shape.trained_length


_LEFT_OUT = ("budget", "seed", "device", "device_map", "attn_implementation")


@takes(PlanSettings, leave_out=_LEFT_OUT)
def plan(
    source: Any = None,
    *,
    tokens: int | str | None = None,
    model: Any = None,
    watcher: Watcher | None = None,
    **settings: Any,
) -> PlanDocument:
    """Plan budgets of all layers for a target: tokens, a share of the prompt, or bytes.

    Weights are never loaded.

    Args:
        source: a profile as a document, its data or its file; a model as a configuration, loaded,
            a folder or a hub ID; None is the bundled reference model.
        tokens: mean per layer and KV head.
        ratio: share of the prompt, such as 0.2 or `20%`.
        bytes: memory held in all layers and rows, such as `64MiB`.
        model: of the profile, where its configuration is to be read.
        recommend: results, or the folder of a run: plan its best variant that fits into `bytes`.
        dtype: of keys and values; None: of a loaded model its own, else the checkpoint's.
        watcher: takes notes and progress; None: no caller does.

    `settings` are those of `PlanSettings`; each is what the option of `kvtool plan-budget` with its
    name is.

    Returns:
        What `kvtool plan-budget` writes.

    Raises:
        UsageError: no target or several, settings that are wrong or do not go together.
        KvtoolError: a model that cannot be compressed.
    """
    if isinstance(tokens, float):
        raise UsageError(
            f"tokens must be a whole number, got {tokens}",
            hint="ratio takes a share of the prompt",
        )
    check_keywords("plan", settings, keywords_of(PlanSettings, leave_out=_LEFT_OUT))
    mean = None if tokens is None else parse_count(tokens)
    names = ("ratio", "bytes", "memory")
    given = {"budget": mean, **{name: settings.get(name) for name in names}}
    targets: dict[str, Any] = {
        name: None if each is None else str(each) for name, each in given.items()
    }
    batch, policy = settings.get("batch", 1), settings.get("policy")
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise UsageError(f"batch must be 1 or more, got {quote(repr(batch))}")
    dtype = spell_dtype(settings.get("dtype"))
    check_choice("dtype", dtype)
    check_text("allocator", settings.get("allocator"))
    profile, named = _read_source(source)
    policy = None if policy is None else read_policy(policy)
    _ = PlanSettings(policy=policy, **targets).target
    model = _read_model(named if model is None else model, dtype)
    asked = PlanSettings(**settings | targets | model | {"profile": profile, "policy": policy})
    watcher = Watcher() if watcher is None else watcher
    return prepare_plan(asked, watcher).make(watcher)


def _read_source(source: Any) -> tuple[ProfileDocument | None, Any]:
    """Return a profile, or a model: whichever is given."""
    from kvtool.documents.from_python import document_of, is_document
    from kvtool.documents.plan import PlanDocument
    from kvtool.documents.profile import ProfileDocument

    if isinstance(source, ProfileDocument):
        return source, None
    if isinstance(source, Mapping) or (isinstance(source, (str, Path)) and is_document(source)):
        from kvtool.documents.source import check_kind

        read = document_of(source, "a profile")
        assert not isinstance(read, PlanDocument), "no document was given"
        check_kind(read, takes=("profile",), command="kvtool.plan")
        return read.validate(ProfileDocument), None
    return None, source


def _read_model(model: Any, dtype: str | None) -> dict[str, Any]:
    """Return settings for the model that is given by name, as a configuration, or loaded."""
    if model is None or isinstance(model, (str, Path)):
        name = None if model is None else str(model)
        if name is not None:
            check_folder(name, config_only=True)
        return {"model": name, "dtype": dtype}
    from kvtool.cache.hooks.families import check_supported

    model = getattr(model, "model", model) if hasattr(model, "config_hash") else model
    config = getattr(model, "config", model)
    if not hasattr(config, "get_text_config"):
        raise UsageError(
            "a plan is made from a profile, a configuration, a folder, a hub ID or a loaded model, "
            f"got {type(model).__name__}"
        )
    check_supported(config)
    if config is not model and dtype in (None, "auto"):
        dtype = str(model.dtype).removeprefix("torch.")
    name = config._name_or_path or config.model_type
    return {"model": name, "dtype": dtype, "config": config}


@dataclass(frozen=True)
class PlanRun:
    """A plan that is all checked, and not made yet.

    Attributes:
        least: tokens of a layer.
        recommendation: that chose the policy, and has the plan; with the results it rests on.
        ways: to run the model, with the device that is planned for.
        lists: the plan lists them.
        listed: the same, where they have been made.
    """

    settings: PlanSettings
    model: PlannedModel
    allocator: Allocator
    target: Target
    profile: ProfileDocument | None
    policy: Policy | None
    least: int | None
    curves: BudgetCurves | None = None
    recommendation: tuple[Recommendation, ResultsDocument] | None = None
    ways: WaysRun | None = None
    lists: bool = False
    listed: list[Way] | None = None

    def describe(self) -> dict[str, Any]:
        """Return what a dry run prints."""
        return {
            "model": self.model.shape.id,
            "revision": self.model.shape.revision,
            "dtype": self.model.shape.dtype,
            "profile": self.settings.profile,
            "target": self.target.model_dump(),
            "allocator": spell_allocator(self.allocator),
            "policy": None if self.policy is None else str(self.policy),
            "min_tokens": self.least,
        }

    def make(self, watcher: Watcher) -> PlanDocument:
        """Make the plan."""
        made = self._plan(watcher)
        if self.ways is None:
            return made
        if not self.lists:
            return self.ways.placed(made)
        return self.ways.listed(made, self.ways.ways() if self.listed is None else self.listed)

    def _plan(self, watcher: Watcher) -> PlanDocument:
        if self.recommendation is not None:
            return self._recommended(*self.recommendation, watcher)
        from kvtool.planning.plan import make_plan

        planned = make_plan(
            self.model.shape,
            self.allocator,
            self.target,
            profile=self.profile,
            policy=self.policy,
            min_tokens=self.least,
            layers=self.model.layers,
            curves=self.curves,
        )
        for line in planned.notes:
            watcher.note(line)
        return planned.document

    def _recommended(
        self, found: Recommendation, results: ResultsDocument, watcher: Watcher
    ) -> PlanDocument:
        from kvtool.calls.recommended import reasons

        document = found.planned.document
        for line in reasons(found, results, document, self.target.bytes or 0):
            watcher.note(line)
        return document

    def command(self, document: PlanDocument, path: str) -> str | None:
        """Spell the command that runs a recommended plan from a file; None for other plans."""
        if self.recommendation is None:
            return None
        from kvtool.calls.recommended import command

        return command(self.recommendation[0], self.settings, document, path)


def prepare_plan(settings: PlanSettings, watcher: Watcher) -> PlanRun:
    """Check what is asked for.

    Raises:
        UsageError, KvtoolError: as `plan`.
    """
    results = None
    if settings.recommend is not None:
        from kvtool.calls.recommended import for_results, read_run

        results = read_run(settings.recommend)
        settings = for_results(settings, results, watcher)
    profile = _read_profile(settings.profile)
    policy = policy_to_plan(settings)
    splits = profile is not None and (policy is None or policy.takes_budget)
    allocator = _allocator(settings, profile if splits else None, policy)
    least = settings.min_tokens
    least = None if least is None else positive(least, "--min-tokens")
    check_transformers()
    model = find_model(settings, profile, watcher)
    check_dims(policy, model.layers)
    lengths = _lengths(settings, model, profile, watcher)
    run = _run(settings, model, lengths, policy, results)
    curves = _read_curves(settings, model, watcher)
    run = replace(run, allocator=allocator, profile=profile, least=least, curves=curves)
    return run if results is None else _recommended(run, results)


def _run(
    settings: PlanSettings,
    model: PlannedModel,
    lengths: dict[str, int],
    policy: Policy | None,
    results: ResultsDocument | None,
) -> PlanRun:
    """Put together the target, the policy and the ways; in a memory alone the ways choose."""
    budget, ways = settings.target, None
    lists = policy is None and (budget is None or budget.bytes is not None)
    if model.config is not None and (lists or settings.memory is not None):
        ways = _ways(settings, model, lengths, results)
    if settings.memory is not None and ways is None:
        raise UsageError("--memory needs the model's configuration", hint="-m MODEL")
    listed = None
    if budget is None and ways is not None:
        if policy is None:
            listed = ways.ways()
            policy, budget = ways.best(listed)
        else:
            budget = ways.budget(policy)
    elif ways is not None and policy is not None and budget is not None:
        _check_memory(ways, policy, budget, lengths)
    budget = budget or Budget(ratio=Fraction(1))
    return PlanRun(
        settings,
        model,
        Uniform(),
        _target(budget, lengths),
        None,
        policy,
        None,
        ways=ways,
        lists=lists,
        listed=listed,
    )


def _check_memory(ways: WaysRun, policy: Policy, budget: Budget, lengths: dict[str, int]) -> None:
    """Refuse a budget in tokens or a share that does not fit on the device."""
    if budget.bytes is None:
        ways.check(policy, budget.for_prompt(lengths["context"] - lengths["max_new_tokens"]))


def _ways(
    settings: PlanSettings,
    model: PlannedModel,
    lengths: dict[str, int],
    results: ResultsDocument | None,
) -> WaysRun:
    from kvtool.calls.ways import find_ways
    from kvtool.planning.bytes import Text

    new = lengths["max_new_tokens"]
    vocabulary = model.shape.vocabulary
    text = Text(lengths["context"] - new, new, lengths["batch"], vocabulary)
    size = None if settings.target is None else settings.target.bytes
    losses = None
    if results is not None:
        from kvtool.planning.recommend import measured_losses

        losses = measured_losses(results)
    return find_ways(
        settings, model.shape, model.layers, model.config, text, size=size, losses=losses
    )


def _allocator(
    settings: PlanSettings, profile: ProfileDocument | None, policy: Policy | None
) -> Allocator:
    """Return the allocator that is asked for, else the one that what is given calls for."""
    if settings.curves is None:
        return parse_allocator(settings.allocator or default_allocator(profile, policy))
    if settings.allocator not in (None, Curves.name):
        raise UsageError(
            f"--curves splits the budget, and so does --allocator {settings.allocator}",
            hint="leave out one of them",
        )
    if settings.recommend is not None:
        raise UsageError("--curves and --recommend exclude each other; keep one")
    return Curves()


def _read_curves(
    settings: PlanSettings, model: PlannedModel, watcher: Watcher
) -> BudgetCurves | None:
    if settings.curves is None:
        return None
    found = read_curves(settings.curves, model.shape.layers, model.shape.kv_heads)
    if found.by_head:
        watcher.note("note: the curves are of KV heads; each layer gets the mean of its heads")
    return found


def _recommended(run: PlanRun, results: ResultsDocument) -> PlanRun:
    """Choose the policy and its budget by what was measured."""
    from kvtool.planning.recommend import Place, recommend

    biased = run.model.config is not None and has_key_biases(run.model.config)
    place = Place(run.model.shape, run.target, run.profile, run.model.layers, biased)
    found = recommend(results, place)
    return replace(
        run,
        policy=found.evidence.policy,
        allocator=parse_allocator(found.planned.document.layers.allocator),
        recommendation=(found, results),
    )


def _read_profile(profile: str | ProfileDocument | None) -> ProfileDocument | None:
    if not isinstance(profile, str):
        return profile
    from kvtool.documents.profile import ProfileDocument
    from kvtool.documents.source import check_kind, read_source

    source = read_source(profile, option="profile")
    check_kind(source, takes=("profile",), command="kvtool plan-budget")
    return source.validate(ProfileDocument)


def _lengths(
    settings: PlanSettings, model: PlannedModel, profile: ProfileDocument | None, watcher: Watcher
) -> dict[str, int]:
    """Return the lengths to plan for, by their names in a target."""
    new = 0
    if settings.context is not None:
        context = positive(settings.context, "--context")
    else:
        context = usual_context(model.shape, profile, watcher)
    if settings.max_new_tokens is not None:
        new = parse_count(settings.max_new_tokens)
    if not 0 <= new < context:
        raise UsageError(f"--max-new-tokens {new} leaves no prompt in a context of {context}")
    return {"context": context, "max_new_tokens": new, "batch": settings.batch}


def _target(budget: Budget, lengths: dict[str, int]) -> Target:
    """Put target and lengths together."""
    from kvtool.documents.plan import Target

    return Target(
        ratio=None if budget.ratio is None else str(budget),
        tokens=budget.tokens,
        bytes=budget.bytes,
        **lengths,
    )
