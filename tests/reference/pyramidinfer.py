"""PyramidInfer's choice in one layer, written out: votes of the recent rows, inside a nest."""

from .policies import Reference


class PyramidInfer(Reference):
    """One layer; `nest` is a list of what the layers above keep, to which this one adds its own.

    Args:
        budgets: tokens of all layers; this one's place is the length of the nest.
    """

    prompt_only = True

    def __init__(self, budgets, nest, recent_ratio=0.2, sinks=4):
        super().__init__(budgets[len(nest)])
        self.recent = int(recent_ratio * budgets[0])
        self.above = nest[-1] if nest else None
        self.own = set()
        nest.append(self.own)
        self.sinks = sinks

    def observe(self, attention):
        voters = max(self.recent, 1)
        step = 0.2 / (voters - 1) if voters > 1 else 0.0
        self.votes, heads = {}, 0
        for members in attention:
            for rows in members:
                heads += 1
                last = rows[-voters:]
                for age, row in enumerate(reversed(last)):
                    weight = 1.2 - step * age if voters > 1 else 1.0
                    for position, share in row.items():
                        self.votes[position] = self.votes.get(position, 0.0) + weight * share
        self.votes = {p: vote / heads / voters for p, vote in self.votes.items()}

    def keep(self, head, positions, values):
        if len(positions) <= self.budget:
            kept = list(positions)
        else:
            newest = set(positions[len(positions) - self.recent - 1 :])
            forced = {p for p in positions if p < self.sinks or p in newest}
            free = [p for p in positions if p not in forced]
            if self.above is not None:
                assert forced <= self.above
                free = [p for p in free if p in self.above]
            free.sort(key=lambda p: (-self.votes[p], p))
            kept = sorted(forced | set(free[: self.budget - len(forced)]))
        self.own.clear()
        self.own.update(kept)
        return kept
