"""The oracle with CaliDrop: evicted tokens are still there, and a held query attends to them."""

import math

import torch

from .oracle import Oracle


def attend(query, keys, values, scale):
    """Attention of one query to a list of keys -> output, log-sum-exp."""
    if not len(keys):
        return torch.zeros(values.shape[-1]), -math.inf
    logits = keys.float() @ query.float() * scale
    return torch.softmax(logits, 0) @ values.float(), torch.logsumexp(logits, 0).item()


class CalibratingOracle(Oracle):
    """An oracle whose outputs are calibrated by the evicted part.

    What is held is a query alone: its attention is computed anew from all that is gone, at every
    step, so nothing is ever folded in.
    """

    def __init__(self, model, make_policy, theta1, theta2, by_layer=False):
        super().__init__(model, make_policy)
        self.theta1, self.theta2, self.by_layer = theta1, theta2, by_layer
        self.held, self.counts = {}, {}

    def step(self, layer, query, key, value, scale, *special):
        heads, length, seen, kv_heads = query.shape[1], query.shape[2], key.shape[2], key.shape[1]
        before = [list(kept) for kept in self.kept.get(layer, [[]] * kv_heads)]
        out = super().step(layer, query, key, value, scale, *special)
        for i in range(length):
            own = seen - length + i
            cosines = self.cosines(layer, query[0, :, i]) if self.decodes(length) else None
            for head in range(heads):
                kv = head // (heads // kv_heads)
                kept = before[kv] + list(range(seen - length, own + 1))
                gone = [p for p in range(seen - length) if p not in set(before[kv])]
                q = query[0, head, i]
                if not self.decodes(length):
                    everything = sorted(gone + kept)
                    out[0, i, head], _ = attend(
                        q, key[0, kv, everything], value[0, kv, everything], scale
                    )
                    self.held[layer, head] = q
                elif gone:
                    cosine = cosines[head]
                    states = self.counts.setdefault(layer, [0, 0, 0])
                    if cosine < self.theta1:
                        self.held[layer, head] = q
                        states[0] += 1
                    elif not cosine > self.theta2:
                        states[1] += 1
                        continue
                    states[2] += 1
                    held = self.held[layer, head]
                    part, part_lse = attend(held, key[0, kv, gone], value[0, kv, gone], scale)
                    _, lse = attend(q, key[0, kv, kept], value[0, kv, kept], scale)
                    share = 1 / (1 + math.exp(part_lse - lse))
                    out[0, i, head] = share * out[0, i, head] + (1 - share) * part
        return out

    def decodes(self, length):
        return not self.in_prompt and length == 1

    def cosines(self, layer, queries):
        held = torch.stack([self.held[layer, head] for head in range(len(queries))])
        if self.by_layer:
            whole = torch.cosine_similarity(queries.flatten(), held.flatten(), dim=0)
            return [whole.item()] * len(queries)
        return torch.cosine_similarity(queries, held, dim=-1).tolist()
