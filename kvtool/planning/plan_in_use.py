"""Refuse a plan that is not for its model or device, and say what a run by a plan holds.

A plan's decisions are obeyed. What follows from them is counted anew, from the configuration of the
model that runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvtool.documents.memory import ModelShape
from kvtool.documents.plan import PlanDocument
from kvtool.errors import UsageError
from kvtool.identity import config_hash
from kvtool.model_shape import layer_shapes
from kvtool.planning.budgets import forecast_plan, in_dtype
from kvtool.planning.bytes import Text
from kvtool.planning.rocketkv_stages import goes_by_stages
from kvtool.policies.policy import Policy
from kvtool.sizes import bytes_in_words

_ALWAYS_TAKEN = 0.1  # of a device: its libraries and its screen, which no plan counts
_OBEYED = ("layers", "heads", "kv_heads", "head_dim", "latent_dim", "layer_types", "sliding_window")


def check_plan(plan: PlanDocument, config: Any) -> None:
    """Refuse a plan that was made for another model, or whose `model` was edited.

    Args:
        config: of the model that runs.

    Raises:
        UsageError: another configuration, or the first value that it does not have.
    """
    for wrong in _mismatches(plan, config):
        raise UsageError(wrong, hint="make the plan anew: kvtool plan-budget -m MODEL ..")


def _mismatches(plan: PlanDocument, config: Any) -> Iterator[str]:
    if plan.model.config_hash != config_hash(config):
        yield f"the plan was made for model `{plan.model.id}`, whose configuration is another one"
    shape = ModelShape.of(config, name=plan.model.id)
    for name in _OBEYED:
        given, right = getattr(plan.model, name), getattr(shape, name)
        if given != right:
            made = f"and the model's configuration makes it {right}"
            yield f"the plan's `model.{name}` is {given}, {made}"
    for i, own in enumerate(plan.layers.heads or []):
        layer = layer_shapes(config)[i]
        if own is not None and layer is not None and len(own) != layer.kv_heads:
            heads = f"{len(own)} KV heads, and the model {layer.kv_heads}"
            yield f"the plan's `layers.heads.{i}` has {heads}"


def check_free(plan: PlanDocument, place: str, free: int | None, *, strict: bool) -> str | None:
    """Say that a plan was made for more memory than is free; None where it was not.

    A tenth of the plan's memory may be taken already, as it is on every device.

    Args:
        place: the device, in words.
        free: its bytes; None where the system does not say.
        strict: whether to refuse in place of a warning.

    Raises:
        UsageError: that is so, and `strict`.
    """
    device = plan.device
    if device is None or free is None or free >= device.memory * (1 - _ALWAYS_TAKEN):
        return None
    told = (
        f"the plan is for a memory of {bytes_in_words(device.memory)}, and "
        f"{bytes_in_words(free)} are free on {place}"
    )
    if strict:
        raise UsageError(told, hint="make the plan anew: kvtool plan-budget --memory SIZE")
    return f"warning: {told}"


def held_by_plan(
    plan: PlanDocument, policy: Policy, config: Any, dtype: str, text: Text | None = None
) -> int:
    """Count the bytes that a run holds at most.

    Args:
        config: of the model that runs.
        dtype: of the cache, by name.
        text: that is fed; None: what was planned for.
    """
    text = text or text_of(plan)
    vocabulary = config.get_text_config(decoder=True).vocab_size
    layers = in_dtype(layer_shapes(config), dtype)
    return forecast_plan(plan, policy, replace(text, vocabulary=vocabulary), layers).storage


def text_of(plan: PlanDocument) -> Text:
    """Return what a plan is for."""
    target = plan.target
    given = (target.prompt_tokens, target.max_new_tokens, target.batch)
    return Text(*given, vocabulary=plan.model.vocabulary)


def beyond_plan(plan: PlanDocument, held: int, text: Text) -> str | None:
    """Say what a run holds after a "prompt of ..", None where it is no more than planned.

    Args:
        held: bytes that the run holds at most of the text.
    """
    target, promised, rows = plan.target, plan.planned_bytes, text.sequences
    more_rows = rows > target.batch
    if not more_rows and (promised is None or held <= promised):
        return None
    run = f" in {rows} rows" if more_rows else ""
    planned = f" in {target.batch} row{'s' * (target.batch > 1)}" if more_rows else ""
    whose = "the plan is" if promised is None else f"the plan's {promised} are"
    return (
        f"prompt of {text.prompt} tokens and up to {text.new} new ones{run}, {held} bytes are "
        f"held; {whose} for {target.prompt_tokens} and {target.max_new_tokens}{planned}"
    )


def check_run(plan: PlanDocument, policy: Policy, config: Any, dtype: str) -> list[str]:
    """Refuse a run that a plan's bytes rule out, and say where its totals are not those of the run.

    Args:
        config: of the model that runs.
        dtype: of the cache, by name.

    Returns:
        Notes for the user, one line each.

    Raises:
        UsageError: a policy whose own sizes are not the plan's; a target in bytes that the run
            would exceed.
    """
    _check_sizes(plan, policy)
    if not policy.takes_budget:
        return []
    target, planned, own = plan.target, plan.planned_bytes, plan.model.dtype
    other_dtype = own is not None and dtype != own
    other_policy = plan.policy is None or plan.policy != str(policy)
    held = held_by_plan(plan, policy, config, dtype)
    if target.bytes is not None and held > target.bytes:
        if other_dtype and held_by_plan(plan, policy, config, own or dtype) <= target.bytes:
            whose, would, change = own, f"in {dtype} the run", f"--dtype {dtype}"
            first = f"--dtype {own}, or "
        else:
            whose = "no policy in particular" if plan.policy is None else f"policy `{plan.policy}`"
            whose = whose if other_policy else "other tokens and stages than it has"
            would, change, first = f"`{policy}`", f"-p '{policy}'", ""
        raise UsageError(
            f"the plan's {target.budget} are for {whose}, and {would} would hold {held} bytes",
            hint=f"{first}make the plan anew: kvtool plan-budget .. {change}",
        )
    notes = []
    if other_dtype:
        notes.append(f"note: the plan is for {own}, and this run is in {dtype}")
    if plan.policy is not None and other_policy:
        notes.append(
            f"note: the plan's totals are those of `{plan.policy}`, and this is `{policy}`"
        )
    if planned is not None and planned != held and (notes or not other_policy):
        notes = notes or ["note: the plan's totals are not those of its tokens and stages"]
        notes[-1] += f": held are {held} bytes, not {planned}"
    return notes


def _check_sizes(plan: PlanDocument, policy: Policy) -> None:
    """Refuse sizes in a policy string that are not those of the plan's stages."""
    section = plan.rocketkv
    if section is None or not goes_by_stages(policy):
        return
    sizes = (
        ("split", policy.score, section.split_factor),
        ("page", policy.reader, section.page_size),
        ("k1", policy.reader, section.head_dims),
        ("k", policy.reader, section.top_k),
    )
    for name, part, planned in sizes:
        own = getattr(part, name, None)
        if None not in (own, planned) and own != planned:
            raise UsageError(
                f"policy `{policy}` has {name} {own}, and the plan {planned}",
                hint=f"leave out {name}={own}, or make the plan anew: kvtool plan-budget .. "
                f"-p '{policy}'",
            )
