"""A model on a full cache that looks only at what a slow policy has kept.

Nothing is ever removed from the cache: each query attends, in float32, to the kept tokens of its
KV head and to the tokens of its own block up to itself. The weights go to the slow policy, which
says what is kept from then on.
"""

from dataclasses import dataclass, field

import torch
from transformers import AttentionInterface, DynamicCache

ATTENTION = "oracle_eager"
_running = []  # the oracle whose forward runs now


class Oracle:
    def __init__(self, model, make_policy):
        self.model = model
        self.make_policy = make_policy  # () -> a policy of reference.policies, one for each layer
        self.cache = DynamicCache()
        self.policies, self.kept, self.scores = {}, {}, {}
        self.in_prompt = True

    def feed(self, ids):
        """One block, or one token -> the logits of its last token."""
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(ATTENTION)
        _running.append(self)
        try:
            with torch.no_grad():
                ids = torch.tensor([ids])
                out = self.model(ids, past_key_values=self.cache, use_cache=True)
        finally:
            _running.pop()
            self.model.set_attn_implementation(before)
        return out.logits[0, -1]

    def step(self, layer, query, key, value, scale):
        """Attend, show the weights to the policy of the layer, let it choose what stays."""
        _, heads, length, _ = query.shape
        _, kv_heads, seen, width = value.shape
        group = heads // kv_heads
        new = list(range(seen - length, seen))
        kept = self.kept.setdefault(layer, [[] for _ in range(kv_heads)])
        out = torch.empty(1, length, heads, width)
        attention = [[] for _ in range(kv_heads)]
        for head in range(heads):
            visible = kept[head // group] + new
            keys = key[0, head // group, visible].float()
            values = value[0, head // group, visible].float()
            rows = []
            for i in range(length):
                upto = len(visible) - length + i + 1
                logits = keys[:upto] @ query[0, head, i].float() * scale
                weights = torch.softmax(logits, dim=-1)
                out[0, i, head] = weights @ values[:upto]
                rows.append(dict(zip(visible[:upto], weights.tolist(), strict=True)))
            attention[head // group].append(rows)
        if layer not in self.policies:
            self.policies[layer] = self.make_policy()
        policy = self.policies[layer]
        policy.observe(attention)
        if policy.prompt_only and not self.in_prompt:
            self.kept[layer] = [old + new for old in kept]
            return out
        self.scores[layer] = []
        for head in range(kv_heads):
            positions = kept[head] + new
            values = {p: value[0, head, p].tolist() for p in positions}
            if len(positions) > policy.budget > 0:
                scored = policy.scores(head, positions, values)
                self.scores[layer].append(dict(zip(positions, scored, strict=True)))
            kept[head] = policy.keep(head, positions, values)
            policy.forget(head, kept[head])
        return out


@dataclass
class Trace:
    """What happened after the prompt (entry 0) and after each decoded token."""

    tokens: list = field(default_factory=list)  # the token chosen from entry i's logits
    logits: list = field(default_factory=list)
    kept: list = field(default_factory=list)  # kept[i][layer][head] -> positions


def run(model, make_policy, prompt, block, steps):
    """Prompt in blocks of `block` (None: at once), then `steps` tokens, each the likeliest."""
    oracle = Oracle(model, make_policy)
    trace = Trace()
    size = block or len(prompt)
    for start in range(0, len(prompt), size):
        logits = oracle.feed(prompt[start : start + size])
    for step in range(steps + 1):
        if step:
            oracle.in_prompt = False
            logits = oracle.feed([trace.tokens[-1]])
        trace.logits.append(logits)
        trace.tokens.append(int(logits.argmax()))
        trace.kept.append({layer: [list(k) for k in kept] for layer, kept in oracle.kept.items()})
    return trace


def _attend(module, query, key, value, attention_mask, scaling=None, **settings):
    return _running[-1].step(module.layer_idx, query, key, value, scaling), None


AttentionInterface.register(ATTENTION, _attend)
