"""The oracle with merging: evicted tokens change keys and values of kept ones, token by token.

The cache of the model still holds every token; changed keys and values override it.
"""

import math

from .oracle import Oracle
from .policies import Reference, mean_rows

MASK = (1 << 64) - 1


class Summing(Reference):
    """Any policy, with the attention that every token has received so far beside it."""

    def __init__(self, base):
        super().__init__(base.budget)
        self.base, self.prompt_only, self.sums = base, base.prompt_only, {}

    def observe(self, attention):
        for head, members in enumerate(attention):
            for row in mean_rows(members):
                for position, weight in row.items():
                    self.sums[head, position] = self.sums.get((head, position), 0.0) + weight
        self.base.observe(attention)

    def keep(self, head, positions, values):
        return self.base.keep(head, positions, values)

    def forget(self, head, kept):
        self.base.forget(head, kept)


class MergingOracle(Oracle):
    """An oracle whose evicted tokens go through `merge`, made anew for each layer."""

    def __init__(self, model, make_policy, make_merge):
        super().__init__(model, lambda: Summing(make_policy()))
        self.make_merge, self.merges, self.changed = make_merge, {}, {}

    def step(self, layer, query, key, value, *settings):
        key, value = key.clone(), value.clone()
        changed = self.changed.setdefault(layer, {})
        for (head, position), (k, v) in changed.items():
            key[0, head, position], value[0, head, position] = key.new_tensor(k), key.new_tensor(v)
        seen, length = key.shape[2], query.shape[2]
        new = list(range(seen - length, seen))
        before = [kept + new for kept in self.kept.get(layer, [[]] * key.shape[1])]
        out = super().step(layer, query, key, value, *settings)
        merge = self.merges.setdefault(layer, self.make_merge(layer))
        for head, kept in enumerate(self.kept[layer]):
            gone = [p for p in before[head] if p not in set(kept)]
            if not gone:
                continue
            pairs = {
                p: (key[0, head, p].tolist(), value[0, head, p].tolist()) for p in before[head]
            }
            sums = {p: self.policies[layer].sums[head, p] for p in before[head]}
            for p, pair in merge.absorb(head, gone, kept, pairs, sums, seen).items():
                changed[head, p] = pair
        return out


def cosine(a, b):
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / max(math.hypot(*a), 1e-8) / max(math.hypot(*b), 1e-8)


class D2O:
    """Equations 6 to 12 of D2O, head by head."""

    def __init__(self, beta=0.7, merge="kv"):
        self.beta, self.merge, self.tau = beta, merge, {}

    def absorb(self, head, gone, kept, pairs, sums, seen):
        best = {}
        for i in gone:
            likeness = {j: cosine(pairs[i][0], pairs[j][0]) for j in kept}
            target = min(kept, key=lambda j: (-likeness[j], j))
            best[i] = (likeness[target], target)
        mean = sum(m for m, _ in best.values()) / len(best)
        if head in self.tau:
            self.tau[head] = self.beta * mean + (1 - self.beta) * self.tau[head]
        else:
            self.tau[head] = mean
        result = {}
        for j in kept:
            into = [i for i in gone if best[i][1] == j and best[i][0] >= self.tau[head]]
            if into:
                weights = {i: math.exp(best[i][0]) for i in into} | {j: math.e}
                total = sum(weights.values())
                key, value = (
                    [
                        sum(weights[i] / total * pairs[i][part][d] for i in weights)
                        for d in range(len(pairs[j][part]))
                    ]
                    for part in (0, 1)
                )
                result[j] = (key if self.merge == "kv" else pairs[j][0], value)
        return result


def split_mix(number):
    """The finaliser of SplitMix64 -> a number in [0, 1), to 24 bits."""
    number &= MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    number ^= number >> 31
    return (number >> 40) / 2**24


class CaM:
    """Evicted values added to the next m kept ones."""

    def __init__(self, layer, m=32, deterministic=False, seed=0):
        self.layer, self.m, self.deterministic, self.seed = layer, m, deterministic, seed

    def draw(self, head, seen, position):
        stream = seen * 1_000_003 + self.layer + (self.seed << 40) + (head << 50)
        return split_mix(position * 0x9E3779B97F4A7C15 + stream * 0x2545F4914F6CDD1D)

    def absorb(self, head, gone, kept, pairs, sums, seen):
        added = {}
        for i in gone:
            targets = [j for j in kept if j > i][: self.m]
            if not targets:
                continue
            mean = sum(sums[j] for j in targets) / len(targets)
            chance = sums[i] / mean if mean > 0 else float(sums[i] > 0)
            chance = min(max(chance, 0.0), 1.0)
            if not self.deterministic:
                chance = float(self.draw(head, seen, i) < chance)
            for j in targets:
                total = added.setdefault(j, [0.0] * len(pairs[i][1]))
                for d, x in enumerate(pairs[i][1]):
                    total[d] += chance * x / len(targets)
        return {
            j: (pairs[j][0], [a + b for a, b in zip(pairs[j][1], extra, strict=True)])
            for j, extra in added.items()
        }
