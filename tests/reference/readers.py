"""Sparse readers in plain Python: one KV head, one decoded token, lists of numbers.

`queries` are the vectors of the query heads of a group, `keys` and `values` those of the stored
tokens in order. `chosen` returns the list of token indices of every query head; `read` the outputs.
"""

import math


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def softmax(logits):
    top = max(logits)
    powers = [math.exp(x - top) for x in logits]
    return [power / sum(powers) for power in powers]


def best(scores, count):
    """Indices of the highest scores, ties to the lower index."""
    return sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:count]


def mean(rows):
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def mix(weights, values):
    return [
        sum(w * v[d] for w, v in zip(weights, values, strict=True)) for d in range(len(values[0]))
    ]


def attend(query, keys, values, scale):
    return mix(softmax([dot(query, key) * scale for key in keys]), values)


def heaviest(queries, count):
    """Channels of the largest summed magnitude."""
    return best([sum(abs(q[d]) for q in queries) for d in range(len(queries[0]))], count)


def temperature(query, channels):
    part = sum(abs(query[d]) for d in channels)
    return math.sqrt(len(query) * part / sum(map(abs, query)))


class Reader:
    """Reads the chosen tokens by exact attention; all of them, where they fit into `budget`."""

    budget = 0

    def chosen(self, queries, keys):
        raise NotImplementedError

    def finish(self, outputs, queries, keys, values, chosen):
        return outputs

    def read(self, queries, keys, values, scale):
        if len(keys) <= self.budget:
            return [attend(query, keys, values, scale) for query in queries]
        chosen = self.chosen(queries, keys)
        outputs = [
            attend(query, [keys[j] for j in own], [values[j] for j in own], scale)
            for query, own in zip(queries, chosen, strict=True)
        ]
        return self.finish(outputs, queries, keys, values, chosen)


class ExactTopK(Reader):
    def __init__(self, k, scope="query_head", budget=0):
        self.k, self.scope, self.budget = k, scope, budget

    def chosen(self, queries, keys):
        scale = len(keys[0]) ** -0.5
        rows = [softmax([dot(query, key) * scale for key in keys]) for query in queries]
        if self.scope == "query_head":
            return [best(row, self.k) for row in rows]
        return [best(mean(rows), self.k)] * len(queries)


class Quest(Reader):
    def __init__(self, page, k, budget=0):
        self.page, self.k, self.budget = page, k, budget

    def bound(self, query, page):
        return sum(
            max(query[d] * max(key[d] for key in page), query[d] * min(key[d] for key in page))
            for d in range(len(query))
        )

    def scores(self, queries, keys):
        pages = [keys[i : i + self.page] for i in range(0, len(keys), self.page)]
        return [sum(self.bound(query, page) for query in queries) for page in pages]

    def chosen(self, queries, keys):
        scores = self.scores(queries, keys)
        count = min(len(scores), max(3, self.k // self.page))
        pages = [*best(scores[:-1], count - 1), len(scores) - 1]
        tokens = [j for j in range(len(keys)) if j // self.page in pages]
        return [tokens] * len(queries)


class SparQ(Reader):
    def __init__(self, r, k, local=0, reallocate=True, budget=0):
        self.r, self.k, self.local, self.budget = r, k, local, budget
        self.reallocate = reallocate

    def estimates(self, queries, keys):
        channels = heaviest(queries, self.r)
        return [
            softmax(
                [
                    sum(query[d] * key[d] for d in channels) / temperature(query, channels)
                    for key in keys
                ]
            )
            for query in queries
        ]

    def chosen(self, queries, keys):
        past = len(keys) - self.local
        scores = mean(self.estimates(queries, keys))
        return [[*best(scores[:past], self.k - self.local), *range(past, len(keys))]] * len(queries)

    def finish(self, outputs, queries, keys, values, chosen):
        if not self.reallocate:
            return outputs
        average = mean(values)
        mixed = []
        for out, row, own in zip(outputs, self.estimates(queries, keys), chosen, strict=True):
            share = sum(row[j] for j in own)
            mixed.append([share * o + (1 - share) * v for o, v in zip(out, average, strict=True)])
        return mixed


class Loki(Reader):
    """`basis` is a list of d directions."""

    def __init__(self, basis, k, scope="group", budget=0):
        self.basis, self.k, self.scope, self.budget = basis, k, scope, budget

    def estimates(self, queries, keys):
        scale = len(keys[0]) ** -0.5
        rotated = [[dot(key, direction) for direction in self.basis] for key in keys]
        return [
            [
                dot([dot(query, direction) for direction in self.basis], key) * scale
                for key in rotated
            ]
            for query in queries
        ]

    def chosen(self, queries, keys):
        rows = self.estimates(queries, keys)
        if self.scope == "query_head":
            return [best(row, self.k) for row in rows]
        return [best(mean([softmax(row) for row in rows]), self.k)] * len(queries)


class HSA(Reader):
    def __init__(self, page, k1, k, budget=0):
        self.page, self.k1, self.k, self.budget = page, k1, k, budget

    def estimates(self, queries, keys):
        channels = heaviest(queries, self.k1)
        pages = [keys[i : i + self.page] for i in range(0, len(keys), self.page)]
        rows = []
        for query in queries:
            scores = []
            for page in pages:
                score = 0.0
                for d in channels:
                    end = max if sum(q[d] for q in queries) >= 0 else min
                    score += query[d] * end(key[d] for key in page)
                scores.append(score)
            tau = temperature(query, channels)
            rows.append(softmax([scores[j // self.page] / tau for j in range(len(keys))]))
        return rows

    def chosen(self, queries, keys):
        return [best(mean(self.estimates(queries, keys)), self.k)] * len(queries)
