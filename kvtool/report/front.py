"""Which variants no other one beats, at so many bytes or fewer."""

from __future__ import annotations

from collections.abc import Sequence


def pareto_front(points: Sequence[tuple[float, float]], *, lower_is_better: bool) -> list[int]:
    """Return the indices of the points that none of the others beats, costs ascending.

    A point is beaten by one that costs no more and scores no worse, and does better in one of both;
    of equal points, all stay.

    >>> pareto_front([(1.0, 0.2), (2.0, 0.9), (3.0, 0.5), (4.0, 1.0)], lower_is_better=False)
    [0, 1, 3]

    Args:
        points: of each, its cost and its score.
    """
    sign = -1 if lower_is_better else 1

    def beaten(cost: float, score: float) -> bool:
        return any(
            one <= cost and sign * other >= sign * score and (one, other) != (cost, score)
            for one, other in points
        )

    kept = [i for i, point in enumerate(points) if not beaten(*point)]
    return sorted(kept, key=lambda i: (points[i][0], i))
