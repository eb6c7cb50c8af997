"""Heads of a layer that compete for its budget, head by head and entry by entry."""

from copy import deepcopy
from fractions import Fraction

from .policies import Reference
from .selection import choose_kept

STATE = ("total", "seen", "voters", "last")  # what a policy has learned, whatever its budget


def apportion(wishes, total, most):
    """Fractions that sum to the total -> whole numbers, none above its limit.

    What a head cannot use goes to the others in proportion, until none is above the limit; then the
    largest remainders are rounded up, the lower head first.
    """
    shares = list(wishes)
    while any(share > limit for share, limit in zip(shares, most, strict=True)):
        bound = [share >= limit for share, limit in zip(shares, most, strict=True)]
        left = total - sum(limit for limit, is_bound in zip(most, bound, strict=True) if is_bound)
        free = sum(wish for wish, is_bound in zip(wishes, bound, strict=True) if not is_bound)
        shares = [
            Fraction(limit) if is_bound else wish * left / free
            for wish, limit, is_bound in zip(wishes, most, bound, strict=True)
        ]
    counts = [int(share) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda head: (counts[head] - shares[head], head))
    for head in by_rest[: total - sum(counts)]:
        counts[head] += 1
    return counts


def head_counts(scores, total, share, least=0):
    """How many entries each head gets: scores[head] lists those that compete."""
    entries = []
    for head, row in enumerate(scores):
        own = sorted((-score, place) for place, score in enumerate(row))
        for i, (score, place) in enumerate(own):
            entries.append((0 if i < least else 1, score, place, head))
    best = sorted(entries)[:total]
    share = Fraction(str(share))
    mixed = [
        (1 - share) * sum(entry[3] == head for entry in best) + share * total / len(scores)
        for head in range(len(scores))
    ]
    return apportion(mixed, total, [len(row) for row in scores])


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
        """See [(positions, values)] of all heads before any of them is cut, prompt by prompt."""
        total, held = self.budget * len(heads), sum(len(positions) for positions, _ in heads)
        if held <= total:
            return
        scores, forced, free = [], [], []
        for head, (positions, values) in enumerate(heads):
            victims = len(positions) - self.budget
            forced.append(self.mean.forced(head, positions, victims))
            scores.append(self.mean.scores(head, positions, values))
            free.append(
                [s for s, p in zip(scores[-1], positions, strict=True) if p not in forced[-1]]
            )
        left = total - sum(len(positions) for positions in forced)
        counts = head_counts(free, left, self.share, 0 if self.prompt_only else 1)
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
