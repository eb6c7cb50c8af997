"""The model that a plan is for: what its layers store, in which dtype, at which length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtool.calls.plan_settings import PlanSettings
from kvtool.errors import UsageError
from kvtool.models.folder import REFERENCE
from kvtool.sizes import MOST_TOKENS
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from kvtool.documents.memory import ModelShape
    from kvtool.documents.profile import ProfileDocument
    from kvtool.model_shape import LayerShape


@dataclass(frozen=True)
class PlannedModel:
    """The model to plan for, and what each of its layers stores."""

    shape: ModelShape
    layers: list[LayerShape | None]


def find_model(
    given: PlanSettings, profile: ProfileDocument | None, watcher: Watcher
) -> PlannedModel:
    """Return the profile's model, or the one asked for; both must be the same."""
    if profile is not None and given.model is None:
        return _of_profile(given, profile)
    if given.model is None:
        watcher.note(f"model: {REFERENCE} (bundled; choose another with --model)")
    from kvtool.documents.memory import ModelShape
    from kvtool.model_shape import layer_shapes
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
    return PlannedModel(shape, layer_shapes(config, shape.dtype))


def _of_profile(given: PlanSettings, profile: ProfileDocument) -> PlannedModel:
    """Return the model of a profile, without asking for its configuration."""
    from kvtool.model_shape import DTYPE_BYTES

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
    """Return the length to plan for where nobody has given one, and say so."""
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
