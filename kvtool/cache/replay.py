"""Run a layer's step of one cache on the queries, keys and values of another's run."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvtool.cache.cache import KVCache
from kvtool.cache.handover import Fed, Taken
from kvtool.cache.kernels import Call
from kvtool.cache.step import attend
from kvtool.errors import KvtoolError


def replay(cache: KVCache, taken: Taken, call: Call) -> Tensor:
    """Let a layer take in what another cache's layer just did, and attend to what it holds itself.

    Args:
        cache: goes through the whole text in this way, beginning empty.
        taken, call: a step of another cache, without padding.

    Returns:
        (batch, heads, q_len, value_dim).

    Raises:
        KvtoolError: keys that are stored in another form than they are attended in; a policy that
            goes by the model's logits.
    """
    if cache.surprisals is not None:
        raise KvtoolError(
            f"policy `{cache.policy.score.name}` goes by the model's logits, "
            "so it cannot be replayed layer by layer",
            hint="measure it end to end",
        )
    if call.key is not call.raw_key:
        raise KvtoolError("a model with latent attention cannot be replayed layer by layer")
    layer = cache.layers[taken.layer.index]
    if taken.decoding:
        cache.start_reading(layer)
    key, value = layer.update(taken.new_key, taken.new_value, decoding=taken.decoding)
    if not taken.decoding:
        cache.set_budget(layer, None, call.q_len)
    block = cache.layer_block
    placed = call.fed or Fed(0, taken.layer.seen - call.q_len, taken.layer.seen)
    own = replace(call, key=key, value=value, raw_key=key, raw_value=value, block=block, fed=placed)
    return attend(layer, own, taken.decoding)
