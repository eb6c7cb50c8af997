"""DuoAttention, head by head: which positions a text leaves, block by block and token by token."""

import math

UP_TO = 640  # sinks and recent tokens of a streaming head, at most


class Head:
    """One head of one text.

    Args:
        budget: mean tokens over all heads.
        rank: place among the `of` heads of the model, 0 for the one that most needs the whole text.
    """

    def __init__(self, budget, rank, of):
        self.budget, self.rank, self.of = budget, rank, of
        self.kept, self.seen = [], 0
        self.limit = budget  # as long as the text has fitted

    def block(self, tokens):
        """A prompt, a block of one, or a turn."""
        self._take(tokens)
        if self.seen <= self.budget:
            return
        share = max(self.budget - UP_TO, 0) / (self.seen - UP_TO) if self.seen > UP_TO else 0
        retrieves = self.rank < math.floor(share * self.of + 1e-9)
        self.limit = math.inf if retrieves else min(self.budget, UP_TO)
        self._cut()

    def token(self):
        """A decoded token."""
        self._take(1)
        self._cut()

    def _take(self, tokens):
        self.kept += range(self.seen, self.seen + tokens)
        self.seen += tokens

    def _cut(self):
        if len(self.kept) > self.limit:
            sinks = 128 if self.budget > 256 else self.budget // 5
            recent = self.limit - sinks
            self.kept = self.kept[:sinks] + self.kept[-recent:]
