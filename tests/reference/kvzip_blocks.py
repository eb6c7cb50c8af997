"""KVzip block by block, by plain loops: dictionaries of keys and values, and one sorted list.

The model runs without a cache; its attention is replaced by loops over what each head has kept.
"""

import math

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.reference.kvzip import dot, length


class Streaming:
    """What each layer and KV head keeps of a text, and the scores of what competes.

    Attributes:
        stored: of each layer and head, key and value by position.
        scores: of each layer and head, a number by position; what has none stays.
        most: tokens that a head held at most in the mean, and when.
    """

    def __init__(self, model, sinks=4, around=(0, 0), plus=False):
        self.model, self.sinks, self.around, self.plus = model, sinks, around, plus
        config = model.config
        self.heads = [
            (layer, head)
            for layer in range(config.num_hidden_layers)
            for head in range(config.num_key_value_heads)
        ]
        self.stored = {place: {} for place in self.heads}
        self.scores = {place: {} for place in self.heads}
        self.all_scores = {place: {} for place in self.heads}
        self.most = 0

    def read(self, ids, block, budget, first, later, lead=8):
        """Read all of a text of one sequence; logits after each token of its last block."""
        n, (before, behind) = len(ids), self.around
        begin, end = max(self.sinks, before), n - behind
        done = 0
        while done < n:
            size = block if n - done >= block * 5 / 4 else n - done
            logits = self._feed(ids[done : done + size], done)
            done += size
            self.most = max(self.most, sum(map(len, self.stored.values())) / len(self.heads))
            if n <= budget:
                continue
            own = [j for j in range(done - size, done) if begin <= j < end]
            if own:
                told = (
                    first if own[0] == begin else [*later, *ids[max(begin, own[0] - lead) : own[0]]]
                )
                self._feed([*told, *(ids[j] for j in own)], done, own)
            self._cut(done, budget)
        return logits

    def _cut(self, done, budget):
        layers = [
            [self.scores[layer, head] for head in range(self.model.config.num_key_value_heads)]
            for layer in range(self.model.config.num_hidden_layers)
        ]
        stay = kept_of(layers, {place: [*own] for place, own in self.stored.items()}, budget)
        for place, positions in stay.items():
            for each in (self.stored, self.scores):
                each[place] = {j: own for j, own in each[place].items() if j in positions}

    def _feed(self, tokens, start, repeated=None):
        """Feed tokens at positions from `start` on: stored, or else repeating some positions."""
        hidden = {}

        def attend(module, query, key, value, mask, scaling, **more):
            out = torch.zeros_like(query)
            layer, group = module.layer_idx, query.shape[1] // key.shape[1]
            for head in range(key.shape[1]):
                held = dict(self.stored[layer, head])
                new = [start + i for i in range(len(tokens))]
                for i, j in enumerate(new):
                    held[j, "new"] = (key[0, head, i].tolist(), value[0, head, i].tolist())
                for member in range(head * group, (head + 1) * group):
                    for i, j in enumerate(new):
                        seen = [p for p in held if not isinstance(p, tuple) or p[0] <= j]
                        shares = softmax(query[0, member, i].tolist(), seen, held, scaling)
                        row = [
                            sum(shares[p] * held[p][1][c] for p in seen)
                            for c in range(value.shape[-1])
                        ]
                        out[0, member, i] = torch.tensor(row)
                        if repeated is not None:
                            self._score(
                                module,
                                layer,
                                head,
                                member,
                                query,
                                i,
                                held,
                                j,
                                repeated,
                                scaling,
                                hidden,
                            )
                if repeated is None:
                    for j in new:
                        self.stored[layer, head][j] = held[j, "new"]
            return out.transpose(1, 2), None

        hooks = [
            each.self_attn.register_forward_pre_hook(
                lambda module, args, kwargs: hidden.update(
                    {module.layer_idx: kwargs["hidden_states"][0].tolist()}
                ),
                with_kwargs=True,
            )
            for each in self.model.model.layers
        ]
        ALL_ATTENTION_FUNCTIONS.register("loops", attend)
        before = self.model.config._attn_implementation
        self.model.config._attn_implementation = "loops"
        try:
            places = torch.arange(start, start + len(tokens))[None]
            ids = torch.tensor([list(tokens)])
            return self.model(ids, position_ids=places, use_cache=False).logits[0]
        finally:
            self.model.config._attn_implementation = before
            for hook in hooks:
                hook.remove()

    def _score(self, module, layer, head, member, query, i, held, j, repeated, scaling, hidden):
        seen = [*range(self.sinks), *repeated]
        seen += [p for p in held if isinstance(p, tuple) and p[0] <= j]
        shares = softmax(query[0, member, i].tolist(), seen, held, scaling)
        for p in repeated:
            weight = shares[p]
            if self.plus:
                columns = module.o_proj.weight.chunk(query.shape[1], 1)[member].tolist()
                weight *= length(columns, held[p][1]) / math.hypot(*hidden[layer][i])
            for scores in (self.scores, self.all_scores):
                scores[layer, head][p] = max(scores[layer, head].get(p, 0.0), weight)


def softmax(query, seen, held, scale):
    logits = {p: dot(query, held[p][0]) * scale for p in seen}
    top = max(logits.values())
    whole = sum(math.exp(logit - top) for logit in logits.values())
    return {p: math.exp(logit - top) / whole for p, logit in logits.items()}


def kept_of(scores, stored, budget):
    """The positions that stay of those stored, by layer and head, where all compete.

    Args:
        scores: of each layer and head, a number for each position that competes.
        stored: of each (layer, head), the positions that are stored.
        budget: tokens of a head in the mean.
    """
    stay = {
        place: [j for j in own if j not in scores[place[0]][place[1]]]
        for place, own in stored.items()
    }
    ranked = sorted(
        (-scores[layer][head][j], j, layer, head)
        for (layer, head), own in stored.items()
        for j in own
        if j in scores[layer][head]
    )
    free = budget * len(stored) - sum(map(len, stay.values()))
    for _, j, layer, head in ranked[:free]:
        stay[layer, head].append(j)
    return {place: sorted(own) for place, own in stay.items()}
