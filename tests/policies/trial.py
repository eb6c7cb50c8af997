"""A product's policy and its slow twin, shown the same attention, with no cache and no model."""

import torch

from kvtool import parse_policy
from kvtool.cache.steps.view import observe
from kvtool.maths.selection import keep_top, lowest
from kvtool.policies.evidence import AttentionRows
from kvtool.policies.parts import Evidence, SlotView
from tests.reference import policies as reference

# the attention of four queries, one head; row i sees tokens 0..i
FIXTURE = [[1, 0, 0, 0], [0.6, 0.4, 0, 0], [0.5, 0.2, 0.3, 0], [0.4, 0.1, 0.3, 0.2]]
VALUES = [[1, 0], [0, 4], [1, 1], [2, 0]]


class Trial:
    """A layer that is fed blocks and evicts nothing; `scores` and `kept` say what it would do.

    Slots are laid out in the order `layout`, a list of positions: policies must use positions.
    """

    def __init__(self, text, budget, kv_heads=1, values=None, layout=None, layer=0):
        self.policy = parse_policy(text)
        self.budget, self.kv_heads, self.layer = budget, kv_heads, layer
        self.values, self.layout = values, layout
        self.state, self.seen, self.view, self.last = {}, 0, None, None

    def feed(self, weights, values=None, chunk=None):
        """A block: (kv_heads, group, rows, tokens so far), tokens in ascending position."""
        weights = torch.as_tensor(weights, dtype=torch.float32)
        heads, _, rows, tokens = weights.shape
        score = self.policy.ranking
        self.seen += rows
        assert tokens == self.seen
        order = list(range(tokens)) if self.layout is None else self.layout[:tokens]
        self.order = torch.tensor(order)
        positions = self.order.to(torch.int32).expand(1, heads, tokens)
        if values is None:
            values = torch.zeros(heads, tokens, 1)
        values = torch.as_tensor(values, dtype=torch.float32)[None, :, self.order]
        self.view = SlotView(
            values=(values,),
            positions=positions,
            tokens_seen=self.seen,
            budget=self.budget,
            held=tokens,
            layer=self.layer,
            block=rows,
        )
        grown = {name: torch.zeros(1, heads, tokens) for name in score.statistics}
        for name, number in self.state.items():
            grown[name][..., : number.shape[-1]] = number
        self.state = grown
        queries = torch.arange(tokens - rows, tokens)
        visible = (self.order <= queries[:, None])[None, None]
        weights = weights[None][..., self.order]
        if self.policy.needs_all_rows:
            step = chunk or rows
            for start in range(0, rows, step):
                part = slice(start, start + step)
                seen = AttentionRows(weights[..., part, :], visible[:, :, part])
                observe(self.policy, self.state, self.view, seen)
        self.last = None
        if score.evidence is Evidence.LAST_ROWS:
            part = slice(max(rows - score.window, 0), None)
            self.last = AttentionRows(weights[..., part, :], visible[:, :, part])
        return self

    def by_position(self, numbers):
        """Numbers by slot -> by position."""
        result = torch.empty_like(numbers)
        result[..., self.order] = numbers
        return result

    def importance(self):
        score = self.policy.ranking
        numbers = score.importance(self.state, self.view, self.last)
        if self.policy.rescore is not None:
            numbers = self.policy.rescore.rescore(numbers, self.view)
        return numbers.expand(1, self.kv_heads, self.seen)

    def scores(self):
        """(kv_heads, tokens) by position."""
        return self.by_position(self.importance())[0]

    def protected(self):
        """A set of positions for each head."""
        mask = self.policy.ranking.protected(self.state, self.view, self.seen - self.budget)
        if mask is None:
            return [set()] * self.kv_heads
        mask = self.by_position(mask.expand(1, self.kv_heads, self.seen))[0]
        return [set(row.nonzero()[:, 0].tolist()) for row in mask]

    def kept(self):
        """Positions that each head keeps."""
        forced = self.policy.ranking.protected(self.state, self.view, self.seen - self.budget)
        _, kept = keep_top(self.importance(), self.view.positions, self.budget, forced, self.budget)
        return kept[0].tolist()

    def victim(self):
        """Position that each head gives up when one has to go."""
        forced = self.policy.ranking.protected(self.state, self.view, 1)
        distinct = self.policy.score.distinct and self.policy.rescore is None
        slot = lowest(self.importance(), self.view.positions, forced, distinct)
        return self.view.positions[0].gather(1, slot[0, :, None])[:, 0].tolist()


class Twin:
    """The slow policy behind the same calls."""

    def __init__(self, base, budget, kv_heads=1, modifier=None, **settings):
        self.policy = reference.build(base, budget, modifier, **settings)
        self.kv_heads, self.seen = kv_heads, 0

    def feed(self, weights, values=None):
        weights = torch.as_tensor(weights, dtype=torch.float32).tolist()
        self.values = None
        if values is not None:
            values = torch.as_tensor(values, dtype=torch.float32).tolist()
            self.values = [dict(enumerate(head)) for head in values]
        rows = len(weights[0][0])
        attention = []
        for head in weights:
            members = []
            for member in head:
                ends = range(self.seen + 1, self.seen + rows + 1)
                upto = [row[:end] for row, end in zip(member, ends, strict=True)]
                members.append([dict(enumerate(row)) for row in upto])
            attention.append(members)
        self.seen += rows
        self.policy.observe(attention)
        return self

    def _each(self, call):
        positions = list(range(self.seen))
        values = self.values or [None] * self.kv_heads
        return [call(head, positions, values[head]) for head in range(self.kv_heads)]

    def scores(self):
        return torch.tensor(self._each(self.policy.scores))

    def protected(self):
        evicted = self.seen - self.policy.budget
        return self._each(lambda head, positions, _: self.policy.forced(head, positions, evicted))

    def kept(self):
        return self._each(self.policy.keep)


def one_head(rows):
    """Rows of one query head -> (1, 1, rows, tokens)."""
    return [[rows]]


def causal_rows(generator, kv_heads, group, rows, tokens, grain=None):
    """Random attention of the last `rows` of `tokens`; in multiples of 1 / grain ties are exact."""
    shape = (kv_heads, group, rows, tokens)
    future = torch.arange(tokens) > torch.arange(tokens - rows, tokens)[:, None]
    if grain is None:
        logits = torch.randn(shape, generator=generator) * 3
        return logits.masked_fill(future, float("-inf")).softmax(-1)
    counts = torch.randint(0, 4, shape, generator=generator).float()
    return counts.masked_fill(future, 0) / grain


def spell(base, modifier=None, **settings):
    """A policy string."""
    inside = ",".join(f"{key}={value}" for key, value in settings.items())
    return base + (f"({inside})" if inside else "") + (f"+{modifier}" if modifier else "")


def random_pair(seed, blocks, budget, base, modifier=None, grain=None, **settings):
    """The product and its twin after the same random blocks: 2 KV heads, groups of 4.

    The product holds its slots in random order and sees the rows of a block two at a time.
    """
    generator = torch.Generator().manual_seed(seed)
    layout, tokens = [], 0
    for rows in blocks:
        layout += (tokens + torch.randperm(rows, generator=generator)).tolist()
        tokens += rows
    trial = Trial(spell(base, modifier, **settings), budget, 2, layout=layout)
    twin = Twin(base, budget, 2, modifier, **settings)
    values = torch.randn(2, tokens, 3, generator=generator)
    tokens = 0
    for rows in blocks:
        tokens += rows
        weights = causal_rows(generator, 2, 4, rows, tokens, grain)
        trial.feed(weights, values[:, :tokens], chunk=2)
        twin.feed(weights, values[:, :tokens])
    return trial, twin
