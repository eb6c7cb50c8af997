"""A model on a full cache that looks only at what a slow policy has kept.

Nothing is ever removed from the cache: each query attends, in float32, to the kept tokens of its
KV head and to the tokens of its own block up to itself. The weights go to the slow policy, which
says which tokens are kept from then on.
"""

from dataclasses import dataclass, field

import torch
from transformers import AttentionInterface, DynamicCache

from .policies import Recency

ATTENTION = "oracle_eager"
_running = []  # the oracle whose forward runs now


class Oracle:
    """One text on one model, fed block by block and token by token.

    Args:
        model: any decoder that uses transformers' attention interface.
        make_policy: () -> a policy of `policies`, called once for each layer.
        cached_heads: KV heads of the cache where that is fewer than attention sees: latent
            attention caches one for all, its weights count for that one, and the values of all
            heads are side by side in it.
    """

    def __init__(self, model, make_policy, cached_heads=None):
        self.model, self.make_policy, self.cached_heads = model, make_policy, cached_heads
        self.cache = DynamicCache()
        self.policies, self.kept = {}, {}
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

    def dots(self, layer, query, own, keys, visible, slots):
        """Dot products of a query at position `own` with the keys at the visible positions.

        Args:
            query, keys: (head_dim,) and (tokens seen, head_dim), rotated by their positions.
            slots: positions of kept tokens and of the block, in ascending order.
        """
        return keys[visible].float() @ query.float()

    def look(self, layer, policy, key):
        """Show a policy the keys of all tokens so far, (1, cached heads, tokens, head_dim)."""
        if hasattr(policy, "look"):
            policy.look([dict(enumerate(head.tolist())) for head in key[0]])

    def step(self, layer, query, key, value, scale, window, softcap, sinks):
        """Attend, show the weights to the policy of the layer, let it choose what stays."""
        _, heads, length, _ = query.shape
        _, kv_heads, seen, width = value.shape
        cached = self.cached_heads or kv_heads
        new = list(range(seen - length, seen))
        kept = self.kept.setdefault(layer, [[] for _ in range(cached)])
        out = torch.empty(1, length, heads, width)
        attention = [[] for _ in range(cached)]
        for head in range(heads):
            slots = kept[head // (heads // cached)] + new
            kv_head = head // (heads // kv_heads)
            rows = []
            for i, own in enumerate(new):
                visible = [p for p in slots if p <= own and (window is None or p > own - window)]
                logits = self.dots(layer, query[0, head, i], own, key[0, kv_head], visible, slots)
                logits = logits * scale
                if softcap is not None:
                    logits = torch.tanh(logits / softcap) * softcap
                if sinks is not None:  # a logit with no key takes part in the softmax
                    logits = torch.cat([logits, sinks[head : head + 1]])
                weights = torch.softmax(logits, dim=-1)[: len(visible)]
                out[0, i, head] = weights @ value[0, kv_head, visible].float()
                rows.append(dict(zip(visible, weights.tolist(), strict=True)))
            attention[head // (heads // cached)].append(rows)
        if layer not in self.policies:
            own = self.make_policy() if window is None else Recency(window - 1)
            self.policies[layer] = own
        policy = self.policies[layer]
        policy.observe(attention)
        self.look(layer, policy, key[:, :cached])
        if hasattr(policy, "ask"):
            own = [query[0, h].tolist() for h in range(heads)]
            group = heads // cached
            policy.ask([own[h * group : (h + 1) * group] for h in range(cached)], scale)
        side_by_side = value[0].view(cached, -1, seen, width).transpose(1, 2).flatten(2)
        if hasattr(policy, "compete") and self.in_prompt:
            values = [dict(enumerate(side_by_side[head].tolist())) for head in range(cached)]
            policy.compete([(kept[head] + new, values[head]) for head in range(cached)])
        policy.in_prompt = self.in_prompt
        for head in range(cached):
            positions = kept[head] + new
            if policy.prompt_only and not self.in_prompt:
                kept[head] = positions
                continue
            values = dict(enumerate(side_by_side[head].tolist()))
            kept[head] = policy.keep(head, positions, values)
            policy.forget(head, kept[head])
        return out


@dataclass
class Trace:
    """What happened after the prompt (entry 0) and after each decoded token."""

    tokens: list = field(default_factory=list)  # the token chosen from entry i's logits
    logits: list = field(default_factory=list)
    kept: list = field(default_factory=list)  # kept[i][layer][head] -> positions


def run(model, make_policy, prompt, block, steps, cached_heads=None, kind=Oracle):
    """Prompt in blocks of `block` (None: at once), then `steps` tokens, each the likeliest."""
    oracle = kind(model, make_policy, cached_heads)
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
    special = [settings.get(name) for name in ("sliding_window", "softcap", "s_aux")]
    return _running[-1].step(module.layer_idx, query, key, value, scaling, *special), None


AttentionInterface.register(ATTENTION, _attend)
