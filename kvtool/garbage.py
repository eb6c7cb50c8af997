"""Collect cyclic garbage seldom while a command starts, which makes many objects and drops few.

Python looks for such garbage whenever 700 objects were added, again and again while modules are
imported and a model is loaded.
"""

from __future__ import annotations

import gc

_USUALLY = gc.get_threshold()
_SELDOM = 500_000  # objects added since the last time


def collect_seldom() -> None:
    """Let a command begin; whoever uses kvtool as a library keeps what it has set."""
    gc.set_threshold(_SELDOM, *_USUALLY[1:])


def collect_as_usual() -> None:
    """End what `collect_seldom` began, if it did."""
    if gc.get_threshold()[0] == _SELDOM:
        gc.set_threshold(*_USUALLY)
