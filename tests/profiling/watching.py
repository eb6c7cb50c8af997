"""Run a model over a text, and let a study see it."""

from __future__ import annotations

import torch

import kvtool
from kvtool.generation import decode_step, prefill
from kvtool.profiling.seen import Seen


def watch(model, ids, steps, *studies) -> list[Seen]:
    """Feed a text, then `steps` tokens that the model takes to be most likely.

    Returns:
        What was seen, in order, with copies of the queries and keys.
    """
    cache, steps_seen = kvtool.build_cache(model, "full"), []

    def see(step, call, out):
        seen = Seen(step, call, out)
        for study in studies:
            study.see(seen)
        steps_seen.append((seen.layer, seen.decoding, seen.query.clone(), seen.key.clone()))

    cache.watch_steps(see)
    with torch.inference_mode():
        logits = prefill(model, cache, ids)
        for _ in range(steps):
            logits = decode_step(model, cache, logits.argmax(-1))
    return steps_seen


def full_attention(steps_seen, layer: int, scale: float):
    """Weights of all queries of a layer as a list of rows per query head, by the definition."""
    own = [(query, key) for index, _, query, key in steps_seen if index == layer]
    queries = torch.cat([query for query, _ in own], 1)
    keys = own[-1][1]
    group = queries.shape[0] // keys.shape[0]
    rows = []
    for head, query in enumerate(queries):
        logits = [(keys[head // group][: i + 1] @ query[i] * scale) for i in range(query.shape[0])]
        rows.append([line.softmax(0) for line in logits])
    return rows
