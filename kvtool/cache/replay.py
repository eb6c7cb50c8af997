"""Run a layer's step of one cache on the queries, keys and values of another's run."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvtool.cache.cache import KVCache
from kvtool.cache.kernels import Call
from kvtool.cache.step import attend
from kvtool.errors import KvtoolError


def replay(cache: KVCache, index: int, call: Call, *, decoding: bool) -> Tensor:
    """Let a layer take in what another cache's layer just did, and attend to what it holds itself.

    Args:
        cache: goes through the whole text in this way, beginning empty.
        call: a step of a cache that keeps everything, without padding: its newest keys and values
            stand at the end.

    Returns:
        (batch, heads, q_len, value_dim).

    Raises:
        KvtoolError: keys that are stored in another form than they are attended in.
    """
    if call.key.shape != call.raw_key.shape:
        raise KvtoolError("a model with latent attention cannot be replayed layer by layer")
    layer, new = cache.layers[index], call.q_len
    key, value = layer.update(
        call.raw_key[:, :, -new:], call.raw_value[:, :, -new:], decoding=decoding
    )
    if not decoding:
        cache.set_budget(layer, None, new)
    own = replace(call, key=key, value=value, raw_key=key, raw_value=value, block=cache.block)
    return attend(layer, own, decoding)
