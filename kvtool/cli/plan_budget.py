"""`kvtool plan-budget`: tokens per layer for a target, before anything runs."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtool.cli.output import render, write_configuration, write_data
from kvtool.cli.plan_options import PlanOptions, check_paths, positive, read_target
from kvtool.cli.terminal import Terminal
from kvtool.errors import UsageError
from kvtool.models.folder import REFERENCE
from kvtool.sizes import parse_count

if TYPE_CHECKING:
    from kvtool.documents.model_shape import ModelShape
    from kvtool.documents.plan import PlanDocument, Target
    from kvtool.documents.profile import ProfileDocument
    from kvtool.model_shape import LayerShape
    from kvtool.policies.parts import Allocator
    from kvtool.policies.policy import Policy
    from kvtool.sizes import Budget


@dataclass(frozen=True)
class _Model:
    """The model to plan for, and what each of its layers stores."""

    shape: ModelShape
    layers: list[LayerShape | None]


def plan_budget(options: PlanOptions, terminal: Terminal) -> None:
    """Plan budgets of all layers for a target: tokens, a share of the prompt, or bytes.

    Weights are never loaded.
    """
    budget = read_target(options)
    check_paths(options)
    profile = _read_profile(options)
    from kvtool.planning.plan import make_plan
    from kvtool.policies.allocate.table import parse_allocator

    allocator = parse_allocator(options.allocator or ("uniform" if profile is None else "d2o"))
    least = None if options.min_tokens is None else positive(options.min_tokens, "--min-tokens")
    policy = _policy(options)
    model = _model(options, profile, terminal)
    target = _target(options, budget, model.shape, profile, terminal)
    if options.dry_run:
        resolved = _configuration(options, model, allocator, target, policy, least)
        write_configuration(resolved, options, terminal)
        return
    planned = make_plan(
        model.shape,
        allocator,
        target,
        profile=profile,
        policy=policy,
        min_tokens=least,
        layers=model.layers,
    )
    for line in planned.notes:
        terminal.note(line)
    _write(planned.document, options, terminal)


def _read_profile(options: PlanOptions) -> ProfileDocument | None:
    if options.profile is None:
        return None
    from kvtool.documents.profile import ProfileDocument
    from kvtool.documents.source import check_kind, read_source

    source = read_source(options.profile, option="profile")
    check_kind(source, takes=("profile",), command="kvtool plan-budget")
    return source.validate(ProfileDocument)


def _policy(options: PlanOptions) -> Policy | None:
    """Return the policy to plan for."""
    if options.policy is None:
        return None
    from kvtool.policies.grammar import parse_policy

    policy = parse_policy(options.policy)
    if not policy.takes_budget:
        raise UsageError(f"policy `{policy}` keeps everything, so there is no budget to plan")
    return policy


def _model(options: PlanOptions, profile: ProfileDocument | None, terminal: Terminal) -> _Model:
    """Return the profile's model, or the one asked for; both must be the same."""
    if profile is not None and options.model is None:
        return _of_profile(options, profile)
    if options.model is None:
        terminal.note(f"model: {REFERENCE} (bundled; choose another with --model)")
    from kvtool.documents.model_shape import ModelShape
    from kvtool.model_shape import layer_shapes
    from kvtool.models.load import load_config
    from kvtool.models.placement import resolve_device, resolve_dtype

    dtype: str = options.dtype or "auto"
    if options.model is None:  # whatever the bundled model runs in on this machine
        dtype = resolve_dtype(dtype, resolve_device(options.device or "auto", options.device_map))
    config = load_config(
        options.model, revision=options.revision, trust_remote_code=options.trust_remote_code
    )
    shape = ModelShape.of(
        config, name=options.model or REFERENCE, revision=options.revision, dtype=dtype
    )
    if profile is not None and profile.model.config_hash != shape.config_hash:
        raise UsageError(
            f"the profile is of model `{profile.model.id}`, whose configuration differs from that "
            f"of `{shape.id}`",
            hint=f"kvtool profile -m {shape.id}",
        )
    if options.dtype in (None, "auto"):
        why = "in which it would run here" if options.model is None else "the checkpoint's own"
        terminal.note(f"dtype: {shape.dtype}, {why} (change: --dtype)")
    return _Model(shape, layer_shapes(config, shape.dtype))


def _of_profile(options: PlanOptions, profile: ProfileDocument) -> _Model:
    """Return the model of a profile, without asking for its configuration."""
    from kvtool.documents.model_shape import DTYPE_BYTES

    shape, memory = profile.model, profile.metrics.memory
    sizes = None if memory is None else memory.layer_bytes_per_token
    if memory is not None and memory.dtype != shape.dtype:
        sizes = None
    if options.dtype in (None, "auto", shape.dtype):
        return _Model(shape, shape.layer_shapes(sizes))
    if shape.dtype not in DTYPE_BYTES:
        raise UsageError(
            "--dtype: the profile does not say in which dtype its bytes are counted",
            hint=f"-m {shape.id} counts anew",
        )
    per_token = shape.kv_bytes_per_token * DTYPE_BYTES[options.dtype] // DTYPE_BYTES[shape.dtype]
    shape = shape.model_copy(update={"dtype": options.dtype, "kv_bytes_per_token": per_token})
    return _Model(shape, shape.layer_shapes())


def _target(
    options: PlanOptions,
    budget: Budget,
    shape: ModelShape,
    profile: ProfileDocument | None,
    terminal: Terminal,
) -> Target:
    """Put target and lengths together."""
    from kvtool.documents.plan import Target

    if options.context is not None:
        context = positive(options.context, "--context")
    else:
        context = _usual_context(shape, profile, terminal)
    new = 0 if options.max_new_tokens is None else parse_count(options.max_new_tokens)
    if not 0 <= new < context:
        raise UsageError(f"--max-new-tokens {new} leaves no prompt in a context of {context}")
    ratio = None if budget.ratio is None else str(budget)
    return Target(
        ratio=ratio,
        tokens=budget.tokens,
        bytes=budget.bytes,
        context=context,
        max_new_tokens=new,
        batch=options.batch,
    )


def _usual_context(shape: ModelShape, profile: ProfileDocument | None, terminal: Terminal) -> int:
    if profile is not None and profile.data is not None:
        terminal.note(f"context: {profile.data.tokens} tokens, as profiled (change: --context)")
        return profile.data.tokens
    if shape.trained_length is None:
        raise UsageError(f"model `{shape.id}` has no longest context", hint="--context 32K")
    terminal.note(
        f"context: {shape.trained_length} tokens, the model's longest (change: --context)"
    )
    return shape.trained_length


def _configuration(
    options: PlanOptions,
    model: _Model,
    allocator: Allocator,
    target: Target,
    policy: Policy | None,
    least: int | None,
) -> dict[str, Any]:
    """Return what a dry run prints."""
    from kvtool.policies.allocate.table import spell_allocator

    return {
        "model": model.shape.id,
        "revision": model.shape.revision,
        "dtype": model.shape.dtype,
        "profile": options.profile,
        "target": target.model_dump(),
        "allocator": spell_allocator(allocator),
        "policy": None if policy is None else str(policy),
        "min_tokens": least,
    }


def _write(document: PlanDocument, options: PlanOptions, terminal: Terminal) -> None:
    if options.plot_path is not None:
        from kvtool.report.plans import draw_plan

        draw_plan(document, options.plot_path)
        terminal.note(f"wrote {options.plot_path}")
    form = options.choose_format("text" if _shown(options, terminal) else "yaml")
    if form != "text":
        write_data(render(document, form, ""), options, terminal)
        return
    from kvtool.report.plans import plan_table

    if _shown(options, terminal):
        terminal.print(plan_table(document))
        return
    from rich.console import Console

    text = io.StringIO()
    Console(file=text, highlight=False, width=100).print(plan_table(document))
    write_data(text.getvalue(), options, terminal)


def _shown(options: PlanOptions, terminal: Terminal) -> bool:
    """Tell whether a person reads the data as it comes."""
    return terminal.interactive and options.output_path is None
