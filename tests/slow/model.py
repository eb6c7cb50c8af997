"""A model whose full cache stays, and whose attention leaves evicted keys out, query by query.

The attention function is registered with transformers under the name `slow`; the policies of each
layer hang on the module-level run, set for one run at a time.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache
from transformers.masking_utils import AttentionMaskInterface

_RUN: dict = {}


def _no_mask(*args, **kwargs):
    return None


def _attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    layer = module.layer_idx
    policy = _RUN["policies"][layer]
    heads, total, q_len = key.shape[1], key.shape[2], query.shape[2]
    group = query.shape[1] // heads
    queries = list(range(total - q_len, total))
    out = torch.zeros(1, q_len, query.shape[1], value.shape[-1])
    rows = [[[] for _ in range(heads)] for _ in queries]
    for h in range(heads):
        for i, position in enumerate(queries):
            keys = sorted(policy.kept[h] + [p for p in queries if p <= position])
            for g in range(group):
                q = query[0, h * group + g, i]
                logits = (key[0, h, keys] @ q).double() * scaling
                weights = logits.softmax(0)
                out[0, i, h * group + g] = (weights @ value[0, h, keys].double()).float()
                rows[i][h].append(dict(zip(keys, weights.tolist(), strict=True)))
    values = [dict(enumerate(value[0, h].double().tolist())) for h in range(heads)]
    _RUN["scores"][layer] = policy.block(rows, queries, values, _RUN["prompt"])
    return out, None


AttentionInterface.register("slow", _attention)
AttentionMaskInterface.register("slow", _no_mask)


class SlowRun:
    """Runs a model over blocks and then token by token, with one slow policy per layer."""

    def __init__(self, model: AutoModelForCausalLM, policies: list) -> None:
        model.set_attn_implementation("slow")
        self.model, self.policies = model, policies
        self.cache = DynamicCache()
        self.scores: dict = {}

    def feed(self, ids: torch.Tensor, prompt: bool) -> torch.Tensor:
        """Feed (1, n) ids as one block and return the last logits."""
        _RUN.update(policies=self.policies, prompt=prompt, scores=self.scores)
        with torch.no_grad():
            return self.model(ids, past_key_values=self.cache).logits[:, -1]

    def kept(self, layer: int) -> list[list[int]]:
        """Kept positions of each KV head."""
        return self.policies[layer].kept
