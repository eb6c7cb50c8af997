"""Search for the largest number that fits: the one search behind every budget that is computed."""

from __future__ import annotations

from collections.abc import Callable

from kvtool.errors import UsageError


def largest_that_fits(
    cost: Callable[[int], float], limit: float, least: int, most: int, *, steady: bool = False
) -> int | None:
    """Return the largest number whose cost is within a limit; None: not even the least.

    Found by halving: where the cost falls in between, it is one such that the next does not fit.

    Args:
        cost: grows with the number.
        steady: whether it grows along a line, as bytes do. The next number is then where the line
            would meet the limit, which takes few calls.
    """
    high = cost(most)
    if high <= limit:
        return most
    low = cost(least)
    if low > limit:
        return None
    while most - least > 1:
        tried = [(least + most) // 2]
        if steady:
            line = least + int((limit - low) * (most - least) / max(1, high - low))
            line = min(max(line, least + 1), most - 1)
            tried = [line, line + 1, *tried]
        for each in tried:
            if least < each < most:
                value = cost(each)
                if value <= limit:
                    least, low = each, value
                else:
                    most, high = each, value
    return least


def least_allowed(attempt: Callable[[int], object], least: int, most: int) -> int:
    """Return the smallest number that is not refused with a `UsageError`, `most` if all are."""

    def allowed(number: int) -> bool:
        try:
            attempt(number)
        except UsageError:
            return False
        return True

    refused = largest_that_fits(allowed, False, least, most)
    return least if refused is None else min(refused + 1, most)
