"""One policy in one layer, token by token.

Positions are the tokens' places in the text. A row of attention is `{position: weight}` over the
tokens that its query sees; `attention[head][member]` is the list of rows of one query head, a row
for each query of the block in order; `values[head]` is `{position: [numbers]}`.
"""

import itertools
import math
import statistics

from .caote import caote_scores
from .selection import choose_kept, pool

FLOAT32 = 1e-6  # weights come in float32, where a uniform row of 25 lies below 1 / 25


def mean_rows(members):
    """The rows of a group's query heads -> their mean, still one row for each query."""
    rows = []
    for same_query in zip(*members, strict=True):
        rows.append({p: sum(row[p] for row in same_query) / len(same_query) for p in same_query[0]})
    return rows


class Reference:
    """Keeps the `budget` best scores of every KV head after every block."""

    prompt_only = False  # True: nothing is evicted once the prompt has ended

    def __init__(self, budget):
        self.budget = budget

    def observe(self, attention):
        """See the rows of a block, before anything of it is evicted."""

    def scores(self, head, positions, values):
        raise NotImplementedError

    def importance(self, head, positions):
        """What a modifier calls h: the score of every token, protected ones too."""
        return self.scores(head, positions, None)

    def forced(self, head, positions, victims):
        return set()

    def keep(self, head, positions, values):
        """The positions of one head that survive the block."""
        victims = len(positions) - self.budget
        if victims <= 0:
            return list(positions)
        forced = self.forced(head, positions, victims)
        chosen = choose_kept(
            self.scores(head, positions, values),
            self.budget,
            {j for j, p in enumerate(positions) if p in forced},
        )
        return [positions[j] for j in chosen]

    def forget(self, head, kept):
        """Drop what was known of tokens that are gone."""


class Full(Reference):
    def scores(self, head, positions, values):
        return [0.0 for _ in positions]

    def keep(self, head, positions, values):
        return list(positions)


class Recency(Reference):
    def scores(self, head, positions, values):
        return [float(p) for p in positions]


class Streaming(Recency):
    def __init__(self, budget, sinks=4):
        super().__init__(budget)
        self.sinks = sinks

    def forced(self, head, positions, victims):
        return {p for p in positions if p < self.sinks}


class KeyDiff(Reference):
    """Minus the cosine of each key and the mean of the unit keys."""

    def __init__(self, budget, sinks=0, recent=0):
        super().__init__(budget)
        self.sinks, self.recent = sinks, recent

    def look(self, keys):
        """See `keys[head]`, `{position: [numbers]}` of all tokens so far."""
        self.keys = keys

    def scores(self, head, positions, values):
        unit = {p: _unit(self.keys[head][p]) for p in positions}
        mean = [sum(column) / len(positions) for column in zip(*unit.values(), strict=True)]
        anchor = _unit(mean)
        return [-sum(a * b for a, b in zip(unit[p], anchor, strict=True)) for p in positions]

    def forced(self, head, positions, victims):
        last = positions[-1] - self.recent
        return {p for p in positions if p < self.sinks or p > last}


def _unit(vector):
    length = math.sqrt(sum(number * number for number in vector))
    return [number / length for number in vector]


class Knorm(KeyDiff):
    """Minus the length of each key, of 19 bits behind its first, so that equal tokens tie."""

    def scores(self, head, positions, values):
        lengths = [math.sqrt(_dot(key, key)) for key in map(self.keys[head].get, positions)]
        return [-_rounded(length) for length in lengths]


def _rounded(number, bits=20):
    """A number to so many significant bits."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(mantissa * 2**bits), exponent - bits)


class LagKV(KeyDiff):
    """What varies most on the scale of the next partition of what a head holds."""

    prompt_only = True

    def __init__(self, budget, sinks=4, lag=128, rank=True):
        super().__init__(budget, sinks)
        self.rank = rank
        self.lag = lag if budget >= sinks + 2 * lag else max((budget - sinks) // 4, 2)

    def partitions(self, positions):
        """Whole ones behind the sinks; what is left over is in none."""
        behind = [p for p in positions if p >= self.sinks]
        return [behind[i : i + self.lag] for i in range(0, len(behind) - self.lag + 1, self.lag)]

    def scores(self, head, positions, values):
        score = dict.fromkeys(positions, 1.0)
        parts = self.partitions(positions)
        for own, following in itertools.pairwise(parts):
            kinds = [self._shares(own, following, of) for of in (self.keys[head], values)]
            results = [(a + b) / 2 for a, b in zip(*kinds, strict=True)]
            lowest = sorted(range(self.lag), key=lambda i: (results[i], i))
            for rank, i in enumerate(lowest):
                score[own[i]] = rank / self.lag if self.rank else results[i]
        return [score[p] for p in positions]

    def _shares(self, own, following, vectors):
        scale = [(min(c), max(c)) for c in zip(*(vectors[p] for p in following), strict=True)]
        spread = []
        for p in own:
            z = [
                (x - low) / (high - low) if high > low else 0.0
                for x, (low, high) in zip(vectors[p], scale, strict=True)
            ]
            spread.append(statistics.stdev(z))
        return softmax(spread)

    def forced(self, head, positions, victims):
        judged = {p for part in self.partitions(positions)[:-1] for p in part}
        return set(positions) - judged


class RKV(KeyDiff):
    """What the newest queries attend to, and no other key says."""

    def __init__(self, budget, window=8, kernel=7, threshold=0.5, mix=0.1):
        super().__init__(budget)
        self.window, self.kernel, self.threshold, self.mix = window, kernel, threshold, mix
        self.asked = {}

    def ask(self, queries, scale):
        """See `queries[head][member]`, a list of the block's queries; keep the newest."""
        self.scale = scale
        for head, members in enumerate(queries):
            for member, own in enumerate(members):
                before = self.asked.get((head, member), [])
                self.asked[head, member] = (before + own)[-self.window :]

    def scores(self, head, positions, values):
        kept = [self.keys[head][p] for p in positions]
        newest = min(self.window, len(positions))
        pairs = zip(self.votes(head, kept, newest), self.repeated(kept), strict=True)
        return [self.mix * vote - (1 - self.mix) * again for vote, again in pairs]

    def votes(self, head, kept, newest):
        """Pooled votes of the newest queries on the older keys, nothing on the newest."""
        older = kept[: len(kept) - newest]
        members = [own for (h, _), own in sorted(self.asked.items()) if h == head]
        rows = []
        for same_token in zip(*members, strict=True):
            logits = [max(_dot(q, key) for q in same_token) * self.scale for key in older]
            rows.append(softmax(logits))
        mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
        return pool(mean, self.kernel, "max") + [0.0] * newest

    def repeated(self, kept):
        unit = [_unit(key) for key in kept]
        columns = [0.0] * len(kept)
        for i, own in enumerate(unit):
            row = [0.0 if i == j else _dot(own, other) for j, other in enumerate(unit)]
            alike = [j for j, cosine in enumerate(row) if cosine > self.threshold]
            row[alike[-1] if alike else 0] = 0.0
            columns = [total + cosine for total, cosine in zip(columns, row, strict=True)]
        return softmax([total / len(kept) for total in columns])

    def forced(self, head, positions, victims):
        return set(positions[-self.window :])


def _dot(one, other):
    return sum(a * b for a, b in zip(one, other, strict=True))


def softmax(logits):
    weights = [math.exp(logit - max(logits)) for logit in logits]
    return [weight / sum(weights) for weight in weights]


class Counting(Reference):
    """A number for every token of every head, added to row by row."""

    def __init__(self, budget, recent=None):
        super().__init__(budget)
        self.recent = budget // 2 if recent is None else recent
        self.total = {}

    def observe(self, attention):
        for head, members in enumerate(attention):
            total = self.total.setdefault(head, {})
            for row in mean_rows(members):
                for position, weight in row.items():
                    total[position] = total.get(position, 0.0) + self.worth(weight, len(row))

    def scores(self, head, positions, values):
        return [self.total[head][p] for p in positions]

    def forced(self, head, positions, victims):
        return {p for p in positions if p > positions[-1] - self.recent}

    def forget(self, head, kept):
        self.total[head] = {p: self.total[head][p] for p in kept}


class H2O(Counting):
    def worth(self, weight, visible):
        return weight


class D2O(H2O):
    def __init__(self, budget, sinks=4):
        super().__init__(budget)
        self.sinks = sinks
        self.recent = budget - sinks - round((budget - sinks) * 3 / 4)

    def forced(self, head, positions, victims):
        return super().forced(head, positions, victims) | {p for p in positions if p < self.sinks}


class Scissorhands(Counting):
    def worth(self, weight, visible):
        return 1.0 if weight * visible >= 1 - FLOAT32 else 0.0


class Tova(Reference):
    def __init__(self, budget, head_reduce="layer"):
        super().__init__(budget)
        self.head_reduce = head_reduce

    def observe(self, attention):
        self.last = [mean_rows(members)[-1] for members in attention]

    def scores(self, head, positions, values):
        if self.head_reduce == "kv_head":
            return [self.last[head][p] for p in positions]
        return [sum(row[p] for row in self.last) / len(self.last) for p in positions]


class Roco(Reference):
    def __init__(self, budget, scope=None, protect_recent=None, sinks=4, count_self=True):
        super().__init__(budget)
        self.scope = budget // 2 if scope is None else scope
        self.protect_recent = min(10, budget // 4) if protect_recent is None else protect_recent
        self.sinks = sinks
        self.count_self = count_self
        self.seen = {}  # head -> position -> every weight that the token ever got

    def observe(self, attention):
        for head, members in enumerate(attention):
            seen = self.seen.setdefault(head, {})
            for row in mean_rows(members):
                own = max(row)  # the query's own token is the last one that it sees
                for position, weight in row.items():
                    seen.setdefault(position, [])
                    if self.count_self or position != own:
                        seen[position].append(weight)

    def mean(self, head, position):
        weights = self.seen[head][position]
        return sum(weights) / len(weights) if weights else math.inf

    def std(self, head, position):
        weights = self.seen[head][position]
        if not weights:
            return 0.0
        mean = sum(weights) / len(weights)
        return math.sqrt(max(sum(w * w for w in weights) / len(weights) - mean * mean, 0.0))

    def scores(self, head, positions, values):
        return [self.mean(head, p) for p in positions]

    def forced(self, head, positions, victims):
        protected = {p for p in positions if p < self.sinks}
        protected |= set(positions[len(positions) - self.protect_recent :])
        others = [p for p in positions if p not in protected]
        scope = min(self.scope, len(others) - victims)
        widest = sorted(others, key=lambda p: (-self.std(head, p), p))
        return protected | set(widest[:scope])

    def forget(self, head, kept):
        self.seen[head] = {p: self.seen[head][p] for p in kept}


class SnapKV(Reference):
    prompt_only = True

    def __init__(self, budget, window=32, kernel=7, pool="max"):
        super().__init__(budget)
        self.window, self.kernel, self.pool = window, kernel, pool

    def observe(self, attention):
        self.voters = [mean_rows(members)[-self.window :] for members in attention]

    def votes(self, head, positions):
        return [sum(row.get(p, 0.0) for row in self.voters[head]) for p in positions]

    def scores(self, head, positions, values):
        """Pooled votes before the window; inside it the raw votes, which only modifiers read."""
        votes = self.votes(head, positions)
        start = len(positions) - len(self.voters[head])
        return pool(votes[:start], self.kernel, self.pool) + votes[start:]

    def forced(self, head, positions, victims):
        return set(positions[len(positions) - len(self.voters[head]) :])


class VotesAgain(SnapKV):
    """SnapKV whose newest queries vote on whatever is kept, each time that it is cut."""

    def __init__(self, budget, window=32, kernel=7, pool="max", budgets=None):
        super().__init__(budget, window, kernel, pool)
        self.asked, self.budgets = {}, budgets

    def look(self, keys):
        """See `keys[head]`, `{position: [numbers]}` of all tokens so far."""
        self.keys = keys

    def ask(self, queries, scale):
        """See `queries[head][member]`, a list of the block's queries; keep the newest."""
        self.scale = scale
        for head, members in enumerate(queries):
            for member, own in enumerate(members):
                before = self.asked.get((head, member), [])
                self.asked[head, member] = (before + own)[-self.window :]

    def observe(self, attention):
        """Leave the block's own rows alone."""

    def look_back(self, head, positions):
        """One row for each of the newest queries: what it sees of the kept tokens."""
        members = [own for (h, _), own in sorted(self.asked.items()) if h == head]
        last = positions[-1]
        rows = []
        for i, same_token in enumerate(zip(*members, strict=True)):
            seen = [p for p in positions if p <= last - (len(members[0]) - 1 - i)]
            logits = [[_dot(q, self.keys[head][p]) * self.scale for p in seen] for q in same_token]
            weights = [softmax(own) for own in logits]
            mean = [sum(column) / len(weights) for column in zip(*weights, strict=True)]
            rows.append(dict(zip(seen, mean, strict=True)))
        return rows

    def scores(self, head, positions, values):
        self.voters = {head: self.look_back(head, positions)}
        return super().scores(head, positions, values)

    def forced(self, head, positions, victims):
        return set(positions[-self.window :])


class Paced(Reference):
    """A policy that cuts a prompt at once, and then every few tokens."""

    def __init__(self, policy, steps):
        super().__init__(policy.budget)
        self.policy, self.steps, self.in_prompt = policy, steps, True
        for name in ("look", "ask"):
            if hasattr(policy, name):
                setattr(self, name, getattr(policy, name))

    def observe(self, attention):
        self.policy.observe(attention)

    def forget(self, head, kept):
        self.policy.forget(head, kept)

    def keep(self, head, positions, values):
        budgets = getattr(self.policy, "budgets", None)  # of each head; None: they have the same
        self.policy.budget = self.budget if budgets is None else budgets[head]
        if not self.in_prompt and len(positions) < self.policy.budget + self.steps:
            return list(positions)
        return self.policy.keep(head, positions, values)


class Chunked(Reference):
    """A policy of a prompt whose heads keep the same runs of neighbours."""

    prompt_only = True

    def __init__(self, policy, length):
        super().__init__(policy.budget)
        self.policy, self.length, self.chosen = policy, length, None

    def observe(self, attention):
        self.policy.observe(attention)

    def compete(self, heads):
        """See the positions and values of all heads, which hold the same tokens."""
        positions = list(heads[0][0])
        victims = len(positions) - self.budget
        if victims <= 0:
            self.chosen = positions
            return
        summed = dict.fromkeys(positions, 0.0)
        for head, (own, values) in enumerate(heads):
            assert list(own) == positions
            for p, score in zip(positions, self.policy.scores(head, own, values), strict=True):
                summed[p] += score
        forced = [p for p in positions if p in self.policy.forced(0, positions, victims)]
        self.chosen = sorted(self.best(summed, forced))

    def best(self, summed, forced):
        """The forced tokens, then run after run; what is left over goes to a run's best tokens."""
        kept, runs = list(forced), {}
        for p in summed:
            if p not in forced:
                runs.setdefault(p // self.length, []).append(p)
        mean = {run: sum(summed[p] for p in own) / len(own) for run, own in runs.items()}
        for run in sorted(runs, key=lambda run: (-mean[run], run)):
            own = sorted(runs[run], key=lambda p: (-summed[p], p))
            kept += own[: self.budget - len(kept)]
        return kept

    def keep(self, head, positions, values):
        return list(self.chosen)


class Caote(Reference):
    """Any of the above, its scores turned into the change of the output by each eviction."""

    def __init__(self, base, fast=False, norm=2):
        super().__init__(base.budget)
        self.base, self.fast, self.norm = base, fast, norm
        self.prompt_only = base.prompt_only
        for name in ("look", "ask"):
            if hasattr(base, name):
                setattr(self, name, getattr(base, name))
        if isinstance(base, Tova):
            base.head_reduce = "kv_head"

    def observe(self, attention):
        self.base.observe(attention)

    def scores(self, head, positions, values):
        vectors = [values[p] for p in positions]
        return caote_scores(
            self.base.importance(head, positions), vectors, fast=self.fast, norm=self.norm
        )

    def forced(self, head, positions, victims):
        return self.base.forced(head, positions, victims)

    def forget(self, head, kept):
        self.base.forget(head, kept)


class Told(Reference):
    """Keeps what its plan says: `plan` lists, for every block, the kept positions of every head."""

    def __init__(self, plan):
        super().__init__(0)
        self.plan, self.block = plan, -1

    def observe(self, attention):
        self.block += 1

    def keep(self, head, positions, values):
        kept = self.plan[self.block][head]
        assert set(kept) <= set(positions), "a token came back from the dead"
        return list(kept)


BASES = {
    "full": Full,
    "recency": Recency,
    "streaming": Streaming,
    "keydiff": KeyDiff,
    "knorm": Knorm,
    "lagkv": LagKV,
    "rkv": RKV,
    "scissorhands": Scissorhands,
    "h2o": H2O,
    "d2o": D2O,
    "tova": Tova,
    "roco": Roco,
    "snapkv": SnapKV,
    "votes again": VotesAgain,
}


def build(base, budget, modifier=None, **settings):
    policy = BASES[base](budget, **settings)
    if modifier == "caote":
        return Caote(policy)
    if modifier == "fastcaote":
        return Caote(policy, fast=True)
    if modifier == "every":
        return Paced(policy, 5)
    if modifier == "every caote":
        return Paced(Caote(policy), 5)
    if modifier == "chunk":
        return Chunked(policy, 20)
    return policy
