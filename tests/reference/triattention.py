"""TriAttention from its formula, pair by pair, with keys turned back to before RoPE.

A vector is a list of numbers, and a pair of them a complex number. Queries are those of a model's
own projections, before RoPE.
"""

import cmath
import math

from .policies import Reference


class TriAttention(Reference):
    """Keeps the tokens to which the centres of the prompt's queries point.

    Args:
        frequencies: of the pairs that are turned, radians a position.
        interleaved: whether the numbers of a pair are neighbours.
        factor: by which a model multiplies what it turns (YaRN).
        prompt: whether all tokens of the prompt stay.
    """

    def __init__(
        self,
        budget,
        recent=128,
        horizon=65536,
        prompt=False,
        frequencies=(),
        interleaved=False,
        factor=1.0,
    ):
        super().__init__(budget)
        self.recent, self.horizon, self.prompt = recent, horizon, prompt
        self.frequencies, self.interleaved, self.factor = list(frequencies), interleaved, factor
        self.in_prompt, self.of_prompt = True, 0

    def look(self, keys):
        """See `keys[head]`, `{position: [numbers]}` of all tokens so far, after RoPE."""
        self.keys = keys
        self.seen = 1 + max(keys[0])

    def hear(self, queries):
        """See `queries[query_head]`, a list with the query of every token so far before RoPE."""
        if self.in_prompt:
            pairs = [[self.pairs(query) for query in own] for own in queries]
            self.centres = [mean(own) for own in pairs]
            self.lengths = [mean([[abs(q) for q in query] for query in own]) for own in pairs]
            self.of_prompt = len(queries[0])

    def pairs(self, vector):
        """The pairs that are turned, then the others, as complex numbers."""
        turned = 2 * len(self.frequencies)
        found = []
        for part in (vector[:turned], vector[turned:]):
            part = [*part, 0.0] if len(part) % 2 else part
            half = len(part) // 2
            for i in range(half):
                own = (part[2 * i], part[2 * i + 1])
                found.append(complex(*(own if self.interleaved else (part[i], part[i + half]))))
        return found

    def pull(self, query_head, key, position):
        """S of a key at a position, at the time of the next token."""
        distances = [2**i for i in range(64) if 2**i <= self.horizon]
        total = 0.0
        for f, stored in enumerate(self.pairs(key)):
            turns = f < len(self.frequencies)
            omega, factor = (self.frequencies[f], self.factor) if turns else (0.0, 1.0)
            k = stored / factor * cmath.exp(-1j * omega * position)
            mu, m = self.centres[query_head][f], self.lengths[query_head][f]
            weight = sum(cmath.exp(1j * omega * d) for d in distances) / len(distances)
            angle = omega * (self.seen - position) + cmath.phase(mu * k.conjugate())
            waves = abs(mu) * abs(k) * (cmath.exp(1j * angle) * weight).real
            total += factor**2 * (waves + (m - abs(mu)) * abs(k))
        return total

    def scores(self, head, positions, values):
        best, group = [-math.inf] * len(positions), len(self.centres) // len(self.keys)
        for member in range(head * group, (head + 1) * group):
            pulls = [self.pull(member, self.keys[head][p], p) for p in positions]
            middle = sum(pulls) / len(pulls)
            spread = math.sqrt(sum((pull - middle) ** 2 for pull in pulls) / len(pulls))
            for j, pull in enumerate(pulls):
                best[j] = max(best[j], (pull - middle) / max(spread, 1e-6))
        return best

    def forced(self, head, positions, victims):
        asked = self.of_prompt if self.prompt else 0
        last = positions[-1] - min(self.recent, (self.budget - asked) // 2)
        return {p for p in positions if p > last or p < asked}


def mean(vectors):
    return [sum(column) / len(vectors) for column in zip(*vectors, strict=True)]
