"""Heads of a layer that compete for its budget, head by head and entry by entry."""

from copy import deepcopy

from .policies import Reference
from .selection import choose_kept

STATE = ("total", "seen", "voters", "last")  # what a policy has learned, whatever its budget


def head_counts(scores, base, share, least=0):
    """How many entries each head gets: scores[head] lists those that compete."""
    entries = []
    for head, row in enumerate(scores):
        own = sorted((-score, place) for place, score in enumerate(row))
        for i, (score, place) in enumerate(own):
            entries.append((0 if i < least else 1, score, place, head))
    best = sorted(entries)[: base * len(scores)]
    mixed = [
        (1 - share) * sum(entry[3] == head for entry in best) + share * base
        for head in range(len(scores))
    ]
    counts = [int(x + 1e-9) for x in mixed]
    by_rest = sorted(range(len(mixed)), key=lambda head: (counts[head] - mixed[head], head))
    for head in by_rest[: base * len(scores) - sum(counts)]:
        counts[head] += 1
    return counts


class Competing(Reference):
    """A policy whose heads compete at the end of the prompt and keep their counts from then on.

    Args:
        make: a budget -> the policy of one head.
    """

    def __init__(self, make, budget, share=0.2):
        super().__init__(budget)
        self.make, self.share = make, share
        self.mean = make(budget)
        self.prompt_only = self.mean.prompt_only
        self.own = {}  # head -> its policy, once the budget is split

    def observe(self, attention):
        for policy in {id(p): p for p in (self.mean, *self.own.values())}.values():
            policy.observe(attention)

    def compete(self, heads):
        """See [(positions, values)] of all heads before any of them is cut."""
        if self.own or len(heads[0][0]) <= self.budget:
            return
        scores, forced, free = [], [], []
        for head, (positions, values) in enumerate(heads):
            victims = len(positions) - self.budget
            forced.append(self.mean.forced(head, positions, victims))
            scores.append(self.mean.scores(head, positions, values))
            free.append(
                [s for s, p in zip(scores[-1], positions, strict=True) if p not in forced[-1]]
            )
        base = self.budget - len(forced[0])
        least = 0 if self.prompt_only else 1
        counts = head_counts(free, base, self.share, least)
        self.first = {}
        for head, (positions, _) in enumerate(heads):
            tokens = counts[head] + len(forced[head])
            places = {j for j, p in enumerate(positions) if p in forced[head]}
            chosen = choose_kept(scores[head], tokens, places)
            self.first[head] = [positions[j] for j in chosen]
            self.own[head] = self.make(tokens)
            source, target = self.inner(self.mean), self.inner(self.own[head])
            for name in STATE:
                if hasattr(source, name):
                    setattr(target, name, deepcopy(getattr(source, name)))

    def inner(self, policy):
        """The policy below a modifier."""
        return getattr(policy, "base", policy)

    def keep(self, head, positions, values):
        if head in getattr(self, "first", {}):
            return self.first.pop(head)
        return self.own.get(head, self.mean).keep(head, positions, values)

    def forget(self, head, kept):
        for policy in (self.own.get(head), None if self.own else self.mean):
            if policy is not None:
                policy.forget(head, kept)
