"""A model on a full cache whose decoded tokens read what a slow reader chooses.

Prompts are read in full. At the end of a prompt a slow policy may choose what the reader has to
choose from (`make_policy`); with `forget`, nothing else is ever seen again.
"""

import torch

from .oracle import Oracle


class ReadingOracle(Oracle):
    """One text on one model.

    Args:
        make_reader: (tokens to choose from when the prompt ended, their keys, tokens seen) -> a
            reader of `readers`; called for every layer and KV head.
        make_policy: (tokens seen) -> a policy of `policies` that cuts a prompt; None: all stays.
        forget: whether what was cut is gone, or only out of this turn's sight.
    """

    def __init__(self, model, make_reader, make_policy=None, forget=True, skip_layers=0):
        super().__init__(model, make_policy)
        self.make_reader, self.forget, self.skip_layers = make_reader, forget, skip_layers
        self.stored, self.readers = {}, {}

    def turn(self, ids):
        """A prompt, at once -> logits of its last token."""
        self.in_prompt = True
        logits = self.feed(ids)
        self.in_prompt = False
        return logits

    def step(self, layer, query, key, value, scale, window, softcap, sinks):
        heads, length = query.shape[1:3]
        kv_heads, seen = key.shape[1:3]
        new = list(range(seen - length, seen))
        out = torch.empty(1, length, heads, value.shape[-1])
        group = heads // kv_heads
        stored = self.stored.setdefault(layer, [[] for _ in range(kv_heads)])
        kept = self.kept.setdefault(layer, [[] for _ in range(kv_heads)])
        attention = []
        for head in range(kv_heads):
            stored[head] = stored[head] + new
            kept[head] = kept[head] + new
            members = slice(head * group, (head + 1) * group)
            if self.in_prompt or window is not None or layer < self.skip_layers:
                visible = stored[head] if self.in_prompt or window is not None else kept[head]
                rows = self.dense(
                    out[0, :, members],
                    query[0, members],
                    key[0, head],
                    value[0, head],
                    new,
                    visible,
                    scale,
                    window,
                    softcap,
                    sinks,
                    members,
                )
                attention.append(rows)
                continue
            reader = self.readers[layer, head]
            found = reader.read(
                query[0, members, 0].tolist(),
                key[0, head, kept[head]].tolist(),
                value[0, head, kept[head]].tolist(),
                scale,
            )
            out[0, 0, members] = torch.tensor(found)
        if self.in_prompt:
            self.end_prompt(layer, attention, key, value, window)
        return out

    def dense(self, out, query, key, value, new, visible, scale, window, softcap, sinks, members):
        """Attend in full; the weights of every query head, a row for each new token."""
        weights = []
        for member in range(query.shape[0]):
            rows = []
            for i, own in enumerate(new):
                seen = [p for p in visible if p <= own and (window is None or p > own - window)]
                logits = key[seen].float() @ query[member, i].float() * scale
                if softcap is not None:
                    logits = torch.tanh(logits / softcap) * softcap
                if sinks is not None:
                    logits = torch.cat([logits, sinks[members][member : member + 1]])
                row = torch.softmax(logits, dim=-1)[: len(seen)]
                out[i, member] = row @ value[seen].float()
                rows.append(dict(zip(seen, row.tolist(), strict=True)))
            weights.append(rows)
        return weights

    def end_prompt(self, layer, attention, key, value, window):
        """Cut, and make the readers of this turn."""
        stored, kept = self.stored[layer], self.kept[layer]
        for head in range(len(stored)):
            kept[head] = list(stored[head])
        if self.make_policy is not None and window is None:
            policy = self.make_policy(key.shape[2])
            policy.observe(attention)
            for head in range(len(stored)):
                values = dict(enumerate(value[0, head].tolist()))
                kept[head] = policy.keep(head, stored[head], values)
                if self.forget:
                    stored[head] = list(kept[head])
        for head in range(len(stored)):
            keys = key[0, head, kept[head]]
            self.readers[layer, head] = self.make_reader(len(kept[head]), keys, key.shape[2])
