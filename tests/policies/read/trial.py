"""A product's reader and its slow twin, shown the same queries, keys and values of one KV head."""

from __future__ import annotations

import torch

from kvtool.policies.read.view import ReadView, Stored

# the worked example: one KV head, two query heads, four channels, four tokens
KEYS = [[1, 0, 2, -1], [0, 1, -1, 0], [-2, 1, 0, 3], [1, -1, 1, 0]]
VALUES = [[1, 0], [0, 1], [2, 2], [3, -1]]
QUERIES = [[2, 0.1, 1, -0.5], [1, -0.2, -0.5, 0.5]]


def tensor(rows):
    """Rows of one head -> (1, 1, rows, dim)."""
    return torch.tensor(rows, dtype=torch.float32)[None, None]


def make_view(reader, queries, keys, values, basis=None):
    keys, values = tensor(keys), tensor(values)
    tables = reader.start(Stored(keys, values, keys.shape[2], basis))
    queries = tensor(queries)
    return ReadView(queries, keys, tables, keys.shape[2], scale=keys.shape[3] ** -0.5)


def chosen(reader, queries, keys, values, basis=None):
    """What a reader chooses: a sorted list of tokens for every query head."""
    choice = reader.choose(make_view(reader, queries, keys, values, basis))
    if choice.slots is None:
        return [list(range(len(keys)))] * len(queries)
    slots = choice.slots[0, 0]
    rows = slots if slots.dim() == 2 else slots.expand(len(queries), -1)
    return [sorted(row.tolist()) for row in rows]


def read(reader, queries, keys, values, basis=None):
    """What a reader puts out: (query heads, value_dim)."""
    view = make_view(reader, queries, keys, values, basis)
    choice = reader.choose(view)
    slots = choice.slots[0, 0].expand(len(queries), -1)
    weights = (view.query[0, 0] @ view.keys[0, 0].T * view.scale).gather(1, slots).softmax(-1)
    out = (weights[..., None] * tensor(values)[0, 0][slots]).sum(1)
    if choice.weight is None:
        return out
    share = choice.weight[0, 0][:, None]
    return share * out + (1 - share) * choice.rest[0, 0]


def random_case(seed, group=4, tokens=37, dim=8, grain=None):
    """Queries, keys and values; whole numbers over `grain`, so that ties are many and exact."""
    source = torch.Generator().manual_seed(seed)

    def draw(rows, width):
        if grain is None:
            return (torch.randn(rows, width, generator=source) * 1.5).tolist()
        return (torch.randint(-2, 3, (rows, width), generator=source) / grain).tolist()

    return draw(group, dim), draw(tokens, dim), draw(tokens, 3)


def grown_tables(reader, keys, values, start, basis=None):
    """Tables made of the first tokens, the others appended in place one by one."""
    keys, values = tensor(keys), tensor(values)
    tables = reader.start(Stored(keys[:, :, :start], values[:, :, :start], start, basis))
    for at in range(start, keys.shape[2]):
        for name, count in reader.columns(at + 1).items():
            missing = count - tables[name].shape[-1]
            if missing > 0:
                room = tables[name].new_full((*tables[name].shape[:-1], missing), float("nan"))
                tables[name] = torch.cat([tables[name], room], -1)
        reader.append(tables, keys[:, :, at], values[:, :, at], at)
    return tables


def same_tables(reader, case, start, basis=None):
    """Tables after appending equal tables made of everything."""
    _, keys, values = case
    grown = grown_tables(reader, keys, values, start, basis)
    stored = Stored(tensor(keys), tensor(values), start, basis)
    fresh = reader.start(stored)
    assert fresh.keys() == grown.keys()
    for name, table in fresh.items():
        torch.testing.assert_close(grown[name], table)
