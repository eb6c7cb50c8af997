"""Which tokens stay: the only choice all policies share, by sorting."""


def choose_kept(scores, count, forced=()):
    """Indices of the `count` highest scores, ascending; forced ones first, ties to the lower."""
    order = sorted(range(len(scores)), key=lambda j: (j not in forced, -scores[j], j))
    return sorted(order[:count])


def pool(votes, kernel, kind):
    """Each vote replaced by the max or mean of its `kernel` neighbours; zeros beyond the border
    count in the mean, nothing beyond the border counts in the max."""
    pooled = []
    for j in range(len(votes)):
        around = range(j - kernel // 2, j + kernel // 2 + 1)
        inside = [votes[i] for i in around if 0 <= i < len(votes)]
        pooled.append(max(inside) if kind == "max" else sum(inside) / kernel)
    return pooled
