"""SirLLM token by token: a full forward over the whole text at every step, eviction by mask.

Each token goes on seeing, in that forward, what was kept when it was read; so the logits are those
of a cache from which the others are gone.
"""

import torch


class SlowSirLLM:
    """One text on a model with eager attention and no windows.

    Attributes:
        kept: positions that are kept, ascending.
        surprisal: position -> number, of the kept tokens.
    """

    def __init__(self, model, budget, sinks=4, recent=0, decay=1.0):
        self.model, self.budget = model, budget
        self.sinks, self.recent, self.decay = sinks, recent, decay
        self.ids, self.seen_by, self.kept, self.surprisal = [], [], [], {}
        self.decays = False

    def begin_turn(self):
        self.decays = True

    def feed(self, ids):
        """A block or a token -> the logits after its last token."""
        if len(self.kept) + len(ids) > self.budget:
            self.cut(incoming=len(ids))
        start = len(self.ids)
        for position in range(start, start + len(ids)):
            self.seen_by.append([*self.kept, *range(start, position + 1)])
        self.ids += ids
        logits = self.forward()
        log_p = logits.double().log_softmax(-1)
        new = {p: -log_p[p - 1, self.ids[p]].item() for p in range(max(start, 1), len(self.ids))}
        if start == 0:
            new[0] = max(new.values(), default=0.0)
        self.surprisal |= new
        self.kept += range(start, len(self.ids))
        if len(self.kept) > self.budget:
            self.cut(incoming=0)
        return logits[-1]

    def forward(self):
        n = len(self.ids)
        mask = torch.full((1, 1, n, n), torch.finfo(torch.float32).min)
        for query, keys in enumerate(self.seen_by):
            mask[0, 0, query, keys] = 0
        with torch.no_grad():
            return self.model(
                torch.tensor([self.ids]), attention_mask=mask, use_cache=False
            ).logits[0]

    def cut(self, incoming):
        sinks = [p for p in self.kept if p < self.sinks]
        others = [p for p in self.kept if p >= self.sinks]
        room = max(self.budget - incoming, len(sinks))
        if room >= len(self.kept):
            return
        surprising = max(self.budget - self.sinks - self.recent - incoming, 0)
        best = sorted(others, key=lambda p: (-self.surprisal[p], p))[:surprising]
        newest = sorted(set(others) - set(best), reverse=True)
        kept = sinks + best
        self.kept = sorted(kept + newest[: room - len(kept)])
        factor = self.decay if self.decays else 1.0
        self.decays = False
        self.surprisal = {p: self.surprisal[p] * factor for p in self.kept}
