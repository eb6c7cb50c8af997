"""Run a layer's step of one cache on the queries, keys and values of another's run."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvtool.cache.steps.block import KnownColumns
from kvtool.cache.steps.call import Call, PendingStep, Placement
from kvtool.cache.steps.step import run_step
from kvtool.cache.whole.cache import KVCache
from kvtool.errors import KvtoolError


def replay(
    cache: KVCache,
    step: PendingStep,
    call: Call,
    attended: Tensor | None = None,
    columns: KnownColumns | None = None,
) -> Tensor:
    """Let a layer take in what another cache's layer just did, and attend to what it holds itself.

    Args:
        cache: goes through the whole text in this way, beginning empty.
        step, call: a step of another cache, without padding.
        attended: what that one attended to, where this one attends to the same; None: computed.
        columns: what others that attend to the same have summed of it; None: there are none.

    Returns:
        (batch, heads, q_len, value_dim).

    Raises:
        KvtoolError: stored latents; a policy that scores by logits or hidden states.
    """
    name, why = f"policy `{cache.policy.score.name}`", None
    if cache.parts.by_logits:
        why = f"{name} goes by the model's logits"
    elif cache.policy.sees_hidden:
        why = f"{name} looks at hidden states"
    elif call.key is not call.raw_key:
        why = "the model stores latents"
    if why is not None:
        raise KvtoolError(
            f"{why}, so it cannot be replayed layer by layer", hint="measure it end to end"
        )
    layer = cache.slot_layer(step.layer.index)
    if step.decoding:
        cache.prepare_decode(layer)
        key, value = layer.write_token(step.new_key, step.new_value)
    else:
        key, value = layer.update(step.new_key, step.new_value)
        cache.meter.run(key.nbytes + value.nbytes)
        cache.begin_block(layer, call.query.shape[1], None, call.q_len)
    seen = step.layer.seen
    placed = call.context.placement or Placement(0, seen - call.q_len, seen)
    block = cache.layer_block
    context = replace(call.context, block=block, placement=placed, group=None, norms=None)
    own = replace(
        call,
        key=key,
        value=value,
        raw_key=key,
        raw_value=value,
        context=context,
        attended=attended,
        columns=columns,
    )
    return run_step(layer, own, step.decoding)
