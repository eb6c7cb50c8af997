"""Compare the memory that a plan was made for with what is free where it runs."""

from __future__ import annotations

from kvtool.documents.plan import PlanDocument
from kvtool.errors import UsageError
from kvtool.sizes import bytes_in_words

_ALWAYS_TAKEN = 0.1  # of a device: its libraries and its screen, which no plan counts


def check_free(plan: PlanDocument, place: str, free: int | None, *, strict: bool) -> str | None:
    """Say that a plan was made for more memory than is free; None where it was not.

    A tenth of the plan's memory may be taken already, as it is on every device.

    Args:
        place: the device, in words.
        free: its bytes; None where the system does not say.
        strict: whether to refuse in place of a warning.

    Raises:
        UsageError: that is so, and `strict`.
    """
    device = plan.device
    if device is None or free is None or free >= device.memory * (1 - _ALWAYS_TAKEN):
        return None
    told = (
        f"the plan is for a memory of {bytes_in_words(device.memory)}, and "
        f"{bytes_in_words(free)} are free on {place}"
    )
    if strict:
        raise UsageError(told, hint="make the plan anew: kvtool plan-budget --memory SIZE")
    return f"warning: {told}"
