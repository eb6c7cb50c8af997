"""Every policy as plain Python over one layer: a dictionary from position to number per KV head."""

from __future__ import annotations

import math

Row = dict[int, float]  # position of a key -> weight


def mean_row(rows: list[Row]) -> Row:
    """Mean over the query heads of a group."""
    return {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}


def worst_first(score: Row, candidates: list[int]) -> list[int]:
    """Candidates from the first to go to the last: lowest score, ties the higher position first."""
    return sorted(candidates, key=lambda position: (score[position], -position))


class Slow:
    """A policy on one layer.

    Args:
        heads: KV heads.
        budget: tokens kept per head.
    """

    prompt_only = False

    def __init__(self, heads: int, budget: int, rescore: str | None = None, **options) -> None:
        self.heads, self.budget, self.rescore, self.options = heads, budget, rescore, options
        self.kept: list[list[int]] = [[] for _ in range(heads)]

    def score(self, head: int, stored: list[int], rows: list[list[list[Row]]]) -> Row:
        """Number of each stored position; `rows[i][head]` holds query i's rows, per query head."""
        raise NotImplementedError

    def protected(self, head: int, stored: list[int], victims: int, block: int) -> set[int]:
        return set()

    def observe(self, head: int, rows: list[list[list[Row]]], queries: list[int]) -> None:
        pass

    def block(self, rows, queries: list[int], values: list[dict[int, list[float]]], prompt: bool):
        """Take in a block: rows[i][head][g][key], the queries' positions, values[head][key]."""
        scores = []
        for head in range(self.heads):
            stored = sorted(self.kept[head] + queries)
            self.observe(head, rows, queries)
            victims = len(stored) - self.budget
            if (self.prompt_only and not prompt) or victims <= 0:
                self.kept[head] = stored
                scores.append(None)
                continue
            score = self.score(head, stored, rows)
            if self.rescore:
                score = rescored(score, stored, values[head], fast=self.rescore == "fastcaote")
            forced = self.protected(head, stored, victims, len(queries))
            order = worst_first(score, [p for p in stored if p not in forced])
            gone = set(order[:victims])
            self.kept[head] = [p for p in stored if p not in gone]
            self.forget(head, gone)
            scores.append(score)
        return scores

    def forget(self, head: int, gone: set[int]) -> None:
        pass


def rescored(score: Row, stored: list[int], values: dict[int, list[float]], fast: bool) -> Row:
    """CAOTE and FastCAOTE, by the closed form."""
    total = sum(score[p] for p in stored)
    share = {p: score[p] / total if total > 0 else 1 / len(stored) for p in stored}
    width = len(values[stored[0]])
    weight = {p: 1 / len(stored) for p in stored} if fast else share
    centre = [sum(weight[p] * values[p][d] for p in stored) for d in range(width)]
    out = {}
    for p in stored:
        distance = math.sqrt(sum((centre[d] - values[p][d]) ** 2 for d in range(width)))
        rest = 1 - share[p]
        out[p] = math.inf if rest < 1e-6 else share[p] / rest * distance
    return out


class Recency(Slow):
    def score(self, head, stored, rows):
        return {p: float(p) for p in stored}


class Streaming(Recency):
    def protected(self, head, stored, victims, block):
        return {p for p in stored if p < self.options.get("sinks", 4)}


class Accumulating(Slow):
    """Policies with numbers per head and position."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.numbers: list[dict[int, list[float]]] = [{} for _ in range(self.heads)]

    def observe(self, head, rows, queries):
        for query in rows:
            row = mean_row(query[head])
            for key, weight in row.items():
                self.numbers[head].setdefault(key, [0.0, 0.0, 0.0])
                self.add(self.numbers[head][key], weight, len(row))

    def forget(self, head, gone):
        for position in gone:
            self.numbers[head].pop(position)

    def recent(self, stored, count):
        return {p for p in stored if p > stored[-1] - count}

    def protected(self, head, stored, victims, block):
        return self.recent(stored, self.options.get("recent", self.budget // 2))


class H2O(Accumulating):
    def add(self, numbers, weight, visible):
        numbers[0] += weight

    def score(self, head, stored, rows):
        return {p: self.numbers[head][p][0] for p in stored}


class Scissorhands(Accumulating):
    def add(self, numbers, weight, visible):
        numbers[0] += weight * visible >= 1 - 1e-6

    def score(self, head, stored, rows):
        return {p: self.numbers[head][p][0] for p in stored}


class RoCo(Accumulating):
    def add(self, numbers, weight, visible):
        numbers[0] += weight
        numbers[1] += weight * weight
        numbers[2] += 1

    def score(self, head, stored, rows):
        return {p: self.numbers[head][p][0] / self.numbers[head][p][2] for p in stored}

    def deviation(self, head, p):
        total, squares, count = self.numbers[head][p]
        if count == 1:
            return 0.0
        return math.sqrt(max(squares / count - (total / count) ** 2, 0.0))

    def protected(self, head, stored, victims, block):
        recent = self.options.get("protect_recent", min(10, self.budget // 4))
        sinks = self.options.get("sinks", 4)
        forced = self.recent(stored, recent) | {p for p in stored if p < sinks}
        free = [p for p in stored if p not in forced]
        scope = min(self.options.get("scope", self.budget // 2), max(0, len(free) - victims))
        varied = sorted(free, key=lambda p: (-self.deviation(head, p), p))
        return forced | set(varied[:scope])


class TOVA(Slow):
    def score(self, head, stored, rows):
        last = rows[-1]
        if self.options.get("head_reduce", "layer") == "layer" and not self.rescore:
            every = [row for group in last for row in group]
            # heads of a layer keep the same tokens, so their rows have the same keys
            return mean_row(every)
        return mean_row(last[head])


class SnapKV(Slow):
    prompt_only = True

    def window(self, stored, block):
        return stored[-min(self.options.get("window", 32), block) :]

    def score(self, head, stored, rows):
        window = self.window(stored, len(rows))
        votes = dict.fromkeys(stored, 0.0)
        for query in rows[-len(window) :]:
            for key, weight in mean_row(query[head]).items():
                votes[key] += weight
        past = stored[: -len(window)]
        kernel, pool = self.options.get("kernel", 7), self.options.get("pool", "max")
        out = {p: votes[p] for p in window}
        for i, p in enumerate(past):
            near = [
                votes[past[j]]
                for j in range(i - kernel // 2, i + kernel // 2 + 1)
                if 0 <= j < len(past)
            ]
            out[p] = max(near) if pool == "max" else sum(near) / kernel
        return out

    def protected(self, head, stored, victims, block):
        return set(self.window(stored, block))


POLICIES = {
    "recency": Recency,
    "streaming": Streaming,
    "h2o": H2O,
    "scissorhands": Scissorhands,
    "roco": RoCo,
    "tova": TOVA,
    "snapkv": SnapKV,
}
