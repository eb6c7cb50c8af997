"""Expected Attention from its formula, with plain loops, and an oracle that shows it the queries.

A vector is a list of numbers. Queries are those of a model's own projections, before RoPE; the
turns are a model's own as well, or a formula's.
"""

import math
import sys

import torch

from .oracle import Oracle
from .policies import Reference


class Expected(Reference):
    """Keeps the tokens that normally distributed queries of later positions would attend to.

    Args:
        turn: (vector, position) -> the vector as the model turns queries there; None: as it is.
        scale: of the logits; None: 1 / sqrt(dim).
    """

    prompt_only = True

    def __init__(
        self,
        budget,
        sinks=4,
        future=512,
        covariance=True,
        values=True,
        epsilon=0.01,
        turn=None,
        scale=None,
    ):
        super().__init__(budget)
        self.sinks, self.future = sinks, future
        self.covariance, self.values, self.epsilon = covariance, values, epsilon
        self.turn, self.scale = turn, scale
        self.earlier = None  # number, mean and scatter of the queries of the prompts before

    def look(self, keys):
        """See `keys[head]`, `{position: [numbers]}` of all tokens so far."""
        self.keys = keys

    def hear(self, queries):
        """See `queries[query_head]`, a list with the query of every token so far before RoPE."""
        self.queries = queries

    def scores(self, head, positions, values):
        attention = self.importance(head, positions)
        if not self.values:
            return attention
        found = []
        for a, p in zip(attention, positions, strict=True):
            length = math.sqrt(sum(number * number for number in values[p]))
            found.append((a + self.epsilon) * length if p >= self.sinks else 0.0)
        return found

    def importance(self, head, positions):
        group = len(self.queries) // len(self.keys)
        total = [0.0 for _ in positions]
        for query_head in range(head * group, (head + 1) * group):
            logits = self.logits(self.queries[query_head], self.keys[head], positions)
            highest = max(logits.values(), default=0.0)
            weights = {p: math.exp(logit - highest) for p, logit in logits.items()}
            whole = sum(weights.values())
            for j, p in enumerate(positions):
                total[j] += weights[p] / whole / group if p in weights else 0.0
        return total

    def logits(self, queries, keys, positions):
        """What queries of the future are expected to give each token but the sinks."""
        dim, seen = len(queries[0]), len(queries)
        scale = dim**-0.5 if self.scale is None else self.scale
        count, mean, scatter = self.moments(queries)
        turn = self.mean_rotation(seen, dim)
        ahead = multiply(turn, [[number] for number in mean])
        spread = [[number / max(count, 1) for number in row] for row in scatter]
        spread = multiply(multiply(turn, spread), transpose(turn))
        found = {}
        for p in positions:
            if p < self.sinks:
                continue
            key = [[number] for number in keys[p]]
            first = multiply(transpose(ahead), key)[0][0]
            second = multiply(multiply(transpose(key), spread), key)[0][0]
            found[p] = first * scale + second * scale**2 / 2
        return found

    def moments(self, queries):
        """Number, mean and scatter of all queries of a head but those of the sinks."""
        asked, dim = queries[self.sinks :], len(queries[0])
        before, centre, whole = 0, [0.0] * dim, [[0.0] * dim for _ in range(dim)]
        if self.earlier is not None:
            before, centre, whole = self.earlier[tuple(queries[0])]
        new = asked[before:]
        mean = [sum(column) / len(asked) for column in zip(*asked, strict=True)] or centre
        own = [sum(column) / len(new) for column in zip(*new, strict=True)] or mean
        scatter = [[0.0] * dim for _ in range(dim)]
        if self.covariance:
            for i in range(dim):
                for j in range(dim):
                    scatter[i][j] = whole[i][j] + sum(
                        (query[i] - own[i]) * (query[j] - own[j]) for query in new
                    )
                    between = (own[i] - centre[i]) * (own[j] - centre[j])
                    scatter[i][j] += between * before * len(new) / max(len(asked), 1)
        return len(asked), mean, scatter

    def end_prompt(self):
        """Keep the queries so far as their moments, correlations in steps of 1/127."""
        earlier = {}
        for queries in self.queries:
            count, mean, scatter = self.moments(queries)
            rounded = [row[:] for row in scatter]
            for i, row in enumerate(scatter):
                for j, number in enumerate(row):
                    width = math.sqrt(scatter[i][i] * scatter[j][j])
                    if i != j and width > 0:
                        rounded[i][j] = round(number / width * 127) / 127 * width
            earlier[tuple(queries[0])] = count, mean, rounded  # a head is known by its first query
        self.earlier = earlier

    def mean_rotation(self, seen, dim):
        """The mean of the matrices that turn a vector to positions seen .. seen + future - 1."""
        units = [[float(i == j) for j in range(dim)] for i in range(dim)]
        if self.turn is None:
            return units
        columns = []
        for unit in units:
            turned = [self.turn(unit, p) for p in range(seen, seen + self.future)]
            columns.append([sum(each) / self.future for each in zip(*turned, strict=True)])
        return transpose(columns)

    def forced(self, head, positions, victims):
        return {p for p in positions if p < self.sinks}


def multiply(a, b):
    columns = transpose(b)
    return [[sum(x * y for x, y in zip(row, col, strict=True)) for col in columns] for row in a]


def transpose(matrix):
    return [list(column) for column in zip(*matrix, strict=True)]


def halves(frequencies):
    """Turn number i against number i + pairs by position times frequency i."""
    pairs = len(frequencies)

    def turn(vector, position):
        turned = list(vector)
        for i, frequency in enumerate(frequencies):
            x, y = vector[i], vector[i + pairs]
            cosine, sine = math.cos(position * frequency), math.sin(position * frequency)
            turned[i], turned[i + pairs] = x * cosine - y * sine, y * cosine + x * sine
        return turned

    return turn


def turn_of(model):
    """How a model turns queries, by its own functions, its factor (YaRN) included."""
    table = {}

    def turn(vector, position):
        if position not in table:
            places = torch.tensor([[position]])
            table[position] = model.model.rotary_emb(torch.zeros(1), places)
        apply = sys.modules[type(model).__module__].apply_rotary_pos_emb
        query = torch.tensor(vector).view(1, 1, 1, -1)
        return apply(query, query, *table[position])[0].flatten().tolist()

    return turn


class AskingOracle(Oracle):
    """The oracle for policies that are shown queries before RoPE, by hooks on what makes them."""

    def __init__(self, *args):
        super().__init__(*args)
        self.asked = {}

    def feed(self, ids):
        self.fresh = {}
        hooks = [
            getattr(layer.self_attn, "q_norm", layer.self_attn.q_proj).register_forward_hook(
                lambda _module, _args, out, index=index: self.fresh.__setitem__(index, out)
            )
            for index, layer in enumerate(self.model.model.layers)
        ]
        try:
            return super().feed(ids)
        finally:
            for hook in hooks:
                hook.remove()

    def look(self, layer, policy, key):
        policy = getattr(policy, "base", getattr(policy, "policy", policy))  # that is modified
        if hasattr(policy, "hear"):
            states = self.fresh[layer].flatten(2)[0]
            made = states.view(len(states), -1, key.shape[-1]).transpose(0, 1).tolist()
            known = self.asked.setdefault(layer, [[] for _ in made])
            for head, new in zip(known, made, strict=True):
                head.extend(new)
            policy.in_prompt = self.in_prompt
            policy.hear(known)
        super().look(layer, policy, key)
