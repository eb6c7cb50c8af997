"""Refitted values by plain loops: one softmax after another, and elimination by hand."""

import math

from .oracle import Oracle


def softmax(query, keys, scale, softcap=None, sink=None):
    """Weights of one query on some keys; none on no key."""
    logits = [sum(a * b for a, b in zip(query, key, strict=True)) * scale for key in keys]
    if softcap is not None:
        logits = [math.tanh(logit / softcap) * softcap for logit in logits]
    every = logits + ([] if sink is None else [sink])
    if not logits:
        return []
    top = max(every)
    whole = sum(math.exp(logit - top) for logit in every)
    return [math.exp(logit - top) / whole for logit in logits]


def average(weights, values, dim):
    return [sum(w * v[d] for w, v in zip(weights, values, strict=True)) for d in range(dim)]


def solve(matrix, right):
    """X with matrix X = right, by Gauss and Jordan."""
    size = len(matrix)
    rows = [[*matrix[i], *right[i]] for i in range(size)]
    for column in range(size):
        best = max(range(column, size), key=lambda i: abs(rows[i][column]))
        rows[column], rows[best] = rows[best], rows[column]
        pivot = rows[column][column]
        rows[column] = [x / pivot for x in rows[column]]
        for i in range(size):
            if i != column:
                factor = rows[i][column]
                pairs = zip(rows[i], rows[column], strict=True)
                rows[i] = [x - factor * y for x, y in pairs]
    return [row[size:] for row in rows]


def refit(queries, keys, values, kept, ridge, scale, softcap=None):
    """The values of the kept positions of one KV head, by position.

    Args:
        queries: (position, vector, learned sink or None) of the queries of all query heads.
        keys, values: vectors by position, of all that there were before the cut.
    """
    dim, rows, missing = len(next(iter(values.values()))), [], []
    for place, query, sink in queries:
        seen, own = [p for p in keys if p <= place], [p for p in kept if p <= place]
        whole = softmax(query, [keys[p] for p in seen], scale, softcap, sink)
        few = softmax(query, [keys[p] for p in own], scale, softcap, sink)
        out = average(whole, [values[p] for p in seen], dim)
        there = average(few, [values[p] for p in own], dim)
        by_position = dict(zip(own, few, strict=True))
        rows.append([by_position.get(p, 0.0) for p in kept])
        missing.append([a - b for a, b in zip(out, there, strict=True)])
    count = len(kept)
    products = [[sum(row[i] * row[j] for row in rows) for j in range(count)] for i in range(count)]
    penalty = ridge * sum(products[i][i] for i in range(count)) / count
    for i in range(count):
        products[i][i] += penalty
    right = [
        [sum(row[i] * lack[d] for row, lack in zip(rows, missing, strict=True)) for d in range(dim)]
        for i in range(count)
    ]
    change = solve(products, right)
    return {
        p: [a + b for a, b in zip(values[p], change[i], strict=True)] for i, p in enumerate(kept)
    }


class RefitOracle(Oracle):
    """An oracle whose kept values are refitted whenever a prompt or a turn is cut."""

    def __init__(self, model, make_policy, queries, ridge):
        super().__init__(model, make_policy)
        self.queries, self.ridge, self.changed = queries, ridge, {}

    def step(self, layer, query, key, value, scale, window, softcap, sinks):
        value, changed = value.clone(), self.changed.setdefault(layer, {})
        for (head, position), vector in changed.items():
            value[0, head, position] = value.new_tensor(vector)
        seen, length, kv_heads = key.shape[2], query.shape[2], key.shape[1]
        new = list(range(seen - length, seen))
        before = [own + new for own in self.kept.get(layer, [[]] * kv_heads)]
        out = super().step(layer, query, key, value, scale, window, softcap, sinks)
        if window is not None:
            return out
        group = query.shape[1] // kv_heads
        for head, kept in enumerate(self.kept[layer]):
            if set(kept) == set(before[head]):
                continue
            rows = [
                (p, query[0, h, i].tolist(), None if sinks is None else sinks[h].item())
                for h in range(head * group, (head + 1) * group)
                for i, p in list(enumerate(new))[-self.queries :]
            ]
            keys, values = (
                {p: each[0, head, p].tolist() for p in before[head]} for each in (key, value)
            )
            fitted = refit(rows, keys, values, kept, self.ridge, scale, softcap)
            changed.update(((head, p), vector) for p, vector in fitted.items())
        return out
