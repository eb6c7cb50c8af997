"""Plan budgets of all layers in one call, before anything runs.

The model is known by its configuration: what its layers store, in which dtype, at which length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.calls.base_settings import at_least
from kvtool.calls.from_python import UNSAID, check_keywords, checked, keywords_of, takes
from kvtool.calls.plan_settings import PlanSettings, policy_to_plan
from kvtool.errors import UsageError
from kvtool.model_shape import DTYPE_BYTES, has_key_biases, layer_shapes
from kvtool.models.folder import REFERENCE, check_folder
from kvtool.planning.bytes import check_dims
from kvtool.planning.split_facts import BudgetCurves, default_allocator, read_curves
from kvtool.policies.allocate.table import parse_allocator, spell_allocator
from kvtool.policies.allocate.uniform import Curves
from kvtool.sizes import MOST_TOKENS, Budget, parse_count
from kvtool.transformers_versions import check_transformers
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from kvtool.calls.fitting import PlannedRun
    from kvtool.documents.memory import ModelShape
    from kvtool.documents.plan import PlanDocument, Target, Way
    from kvtool.documents.profile import ProfileDocument
    from kvtool.documents.results import ResultsDocument
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
    from kvtool.models.load import read_config
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
    longest = shape.trained_length
    if longest is None or longest > MOST_TOKENS:
        raise UsageError(
            f"model `{shape.id}` gives {longest or 'no'} tokens as its longest context, and up to "
            f"{MOST_TOKENS} can be planned for",
            hint="--context 32K",
        )
    watcher.note(f"context: {longest} tokens, the model's longest (change: --context)")
    return longest


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
    profile, named = _read_source(source)
    policy = settings.get("policy")
    asked_policy = {"policy": UNSAID if policy is None else policy}
    settings = checked(PlanSettings, settings | targets | asked_policy)
    _ = PlanSettings(policy=settings["policy"], **targets).target
    model = _read_model(named if model is None else model, settings.get("dtype"))
    asked = PlanSettings(**settings | model | {"profile": profile})
    watcher = Watcher() if watcher is None else watcher
    return prepare_plan(asked, watcher).make(watcher)


def _read_source(source: Any) -> tuple[ProfileDocument | None, Any]:
    """Return a profile, or a model: whichever is given."""
    from kvtool.documents.profile import ProfileDocument
    from kvtool.documents.source import is_document, read_as

    named = isinstance(source, (str, Path)) and is_document(source)
    if named or isinstance(source, (Mapping, ProfileDocument)):
        return read_as(source, ProfileDocument, "a profile", command="kvtool.plan"), None
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
        where: the run that is planned for, in bytes or on a device; None: neither is given.
        ways: to run the model there, for a plan that lists them.
    """

    settings: PlanSettings
    model: PlannedModel
    allocator: Allocator
    target: Target
    profile: ProfileDocument | None
    policy: Policy | None
    least: int | None
    curves: BudgetCurves | None = None
    where: PlannedRun | None = None
    ways: list[Way] | None = None
    recommendation: tuple[Recommendation, ResultsDocument] | None = None

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
        if self.recommendation is not None:
            from kvtool.calls.recommended import reasons
            from kvtool.report.words import guarantee_lines

            found, results = self.recommendation
            document = found.planned.document
            notes = reasons(found, results, document, self.target.bytes or 0)
            notes += guarantee_lines(results) if self.settings.guarantee is not None else []
        else:
            from kvtool.planning.make_plan import make_plan

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
            document, notes = planned.document, planned.notes
        for line in notes:
            watcher.note(line)
        return document if self.where is None else self.where.listed(document, self.ways)

    def command(self, document: PlanDocument, path: str) -> str | None:
        """Spell the command that runs a recommended plan from a file; None for other plans."""
        if self.recommendation is None:
            return None
        from kvtool.calls.recommended import command

        return command(self.recommendation[0], self.settings, document, path)


def prepare_plan(settings: PlanSettings, watcher: Watcher) -> PlanRun:
    """Check what is asked for, and choose what is left open: in a memory alone the ways choose.

    Raises:
        UsageError, KvtoolError: as `plan`.
    """
    results, where, ways = None, None, None
    if settings.guarantee is not None and settings.recommend is None:
        raise UsageError("--guarantee is that of a run", hint="--recommend RESULTS")
    if settings.recommend is not None:
        from kvtool.calls.recommended import for_results, read_run

        results = read_run(settings.recommend)
        settings = for_results(settings, results, watcher)
    profile = _read_profile(settings.profile)
    policy = policy_to_plan(settings)
    splits = profile is not None and (policy is None or policy.takes_budget)
    allocator = _allocator(settings, profile if splits else None, policy)
    least = settings.min_tokens
    least = None if least is None else at_least(1, least, "--min-tokens")
    check_transformers()
    model = find_model(settings, profile, watcher)
    check_dims(policy, model.layers)
    lengths = _lengths(settings, model, profile, watcher)
    budget = settings.target
    lists = policy is None and (budget is None or budget.bytes is not None)
    if model.config is not None and (lists or settings.memory is not None):
        where = _where(settings, model, lengths, results)
        ways = where.ways() if lists and (budget is None or not settings.dry_run) else None
    if settings.memory is not None and where is None:
        raise UsageError("--memory needs the model's configuration", hint="-m MODEL")
    if budget is None and where is not None:
        if policy is None:
            policy, budget = where.best(ways or [])
        else:
            budget = where.budget(policy)
    elif where is not None and policy is not None and budget is not None and budget.bytes is None:
        where.check(policy, budget.for_prompt(lengths["context"] - lengths["max_new_tokens"]))
    target = _target(budget or Budget(ratio=Fraction(1)), lengths)
    curves = _read_curves(settings, model, watcher)
    run = PlanRun(settings, model, allocator, target, profile, policy, least, curves, where, ways)
    return run if results is None else _recommended(run, results)


def _where(
    settings: PlanSettings,
    model: PlannedModel,
    lengths: dict[str, int],
    results: ResultsDocument | None,
) -> PlannedRun:
    from kvtool.calls.fitting import planned_run
    from kvtool.planning.bytes import Text

    new, losses = lengths["max_new_tokens"], None
    text = Text(lengths["context"] - new, new, lengths["batch"], model.shape.vocabulary)
    if results is not None:
        from kvtool.planning.recommend import measured_losses

        losses = measured_losses(results)
    return planned_run(settings, model.shape, model.layers, model.config, text, losses)


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
    found = recommend(results, place, run.settings.guarantee)
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
    from kvtool.documents.source import read_as

    return read_as(profile, ProfileDocument, "profile", command="kvtool plan-budget")


def _lengths(
    settings: PlanSettings, model: PlannedModel, profile: ProfileDocument | None, watcher: Watcher
) -> dict[str, int]:
    """Return the lengths to plan for, by their names in a target."""
    new = 0
    if settings.context is not None:
        context = at_least(1, settings.context, "--context")
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
