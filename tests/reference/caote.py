"""CAOTE: how far the output moves when one token goes and the rest is renormalised."""

import math

ALMOST_ALL = 1e-6  # where a token has all but this of the attention, it is never evicted


def share(scores):
    """Scores as weights that sum to one: shifted if any is negative, uniform if all are zero."""
    low = min(scores)
    if low < 0:
        scores = [s - low for s in scores]
    total = sum(scores)
    if total == 0:
        return [1 / len(scores)] * len(scores)
    return [s / total for s in scores]


def caote_scores(scores, values, fast=False, norm=2):
    """a_j / (1 - a_j) * ||o - v_j|| for each token; o = sum a_i v_i, or mean v_i if fast."""
    weights = share(scores)
    count, width = len(values), len(values[0])
    centre = [0.0] * width
    for weight, value in zip(weights, values, strict=True):
        for d in range(width):
            centre[d] += value[d] / count if fast else weight * value[d]
    result = []
    for weight, value in zip(weights, values, strict=True):
        if 1 - weight < ALMOST_ALL:
            result.append(math.inf)
            continue
        powers = sum(abs(centre[d] - value[d]) ** norm for d in range(width))
        result.append(weight / (1 - weight) * powers ** (1 / norm))
    return result
