"""CriticalKV by plain loops: a sorted list for each stage, and one product after another."""


def lengths(values, heads):
    """The mean over a group of the sums of absolute numbers that each value is projected to.

    Args:
        values: a vector for each token.
        heads: of each query head of the group its columns, a row for each number that comes out.
    """
    found = []
    for value in values:
        sums = [sum(abs(dot(row, value)) for row in columns) for columns in heads]
        found.append(sum(sums) / len(sums))
    return found


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def kept(scores, lengths, budget, first=0.5, epsilon=1e-4, forced=()):
    """The positions that a head keeps; `forced` ones come first in the first stage."""
    places = range(len(scores))
    ranked = sorted(places, key=lambda j: (j not in forced, -scores[j], j))
    best = ranked[: max(int(first * budget), 1, len(forced))]
    weighed = [(scores[j] + epsilon) * lengths[j] for j in places]
    others = sorted((j for j in places if j not in best), key=lambda j: (-weighed[j], j))
    return sorted((best + others)[:budget])
