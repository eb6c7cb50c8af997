"""Which heads of a model most need the whole text: from a file of scores, or by measurement."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvtool.cache.cache import KVCache
from kvtool.cache.hooks.attachment import attachment
from kvtool.cache.steps.call import Call
from kvtool.cache.steps.pending import PendingStep
from kvtool.cache.storage.tensor_parallel import heads_of_layer, shards_of
from kvtool.model_shape import layer_shapes, trained_length
from kvtool.policies.allocate.duo import PROXY, rank_heads, reach_of_heads, read_scores
from kvtool.policies.policy import Policy
from kvtool.policies.scores.full import Full

_TOKENS, _DISTANCES = 1024, 500  # of the random text, and how far back heads are watched


def rank_model(model: PreTrainedModel, source: str) -> Tensor:
    """Rank the KV heads of all attention layers.

    Args:
        source: a file of scores, or `proxy`, which runs the model once over a random text.

    Returns:
        (attention layers, kv_heads) int64, 0 for the head that most needs the whole text.

    Raises:
        UsageError: a file that does not fit the model.
    """
    if source != PROXY:
        stored = [layer for layer in layer_shapes(model.config) if layer is not None]
        return rank_heads(read_scores(source, (len(stored), stored[0].kv_heads)))
    noted = attachment(model)
    assert noted is not None, "build_cache attaches"
    return noted.once("head ranks", lambda: rank_heads(measure_reach(model)))


@torch.no_grad()
def measure_reach(model: PreTrainedModel) -> Tensor:
    """Score every KV head by how far back it looks in a random text, always the same one.

    Returns:
        (attention layers, kv_heads) float32 on the CPU.
    """
    config = model.config.get_text_config(decoder=True)
    n = min(_TOKENS, trained_length(config) or _TOKENS)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, n), generator=generator).to(model.device)
    shards = shards_of(model)
    shapes, reaches = layer_shapes(config), list[Tensor]()

    def watch(step: PendingStep, call: Call, out: Tensor) -> None:
        distances = min(_DISTANCES, max(1, n // 2))
        reach = reach_of_heads(call.query, call.raw_key, call.scale, distances)
        shape, held = shapes[step.layer.index], call.raw_key.shape[1]
        heads = heads_of_layer(shards, config, shape, call.query.shape[1], held)
        reaches.append(heads.all(reach[None, :, None], 0).flatten().cpu())

    cache = KVCache(config, Policy(Full()), None)
    cache.watch_steps(watch)
    model(input_ids=ids, past_key_values=cache, use_cache=True)
    return torch.stack(reaches)
