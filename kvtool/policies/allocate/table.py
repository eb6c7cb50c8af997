"""Every allocator by the name that `--allocator` takes. A new one is a line here and a file."""

from __future__ import annotations

from importlib import import_module

from kvtool.policies.parts import Allocator
from kvtool.policies.spelling import (
    check_numbers,
    known_name,
    read_part,
    read_settings,
    spell_settings,
)

ALLOCATORS: dict[str, str] = {
    "uniform": "uniform:Uniform",
    "d2o": "d2o:D2O",
    "d2o-reciprocal": "d2o:D2OReciprocal",
    "d2o-exp": "d2o:D2OExp",
    "pyramid": "pyramid:Pyramid",
    "optimal": "optimal:Optimal",
    "curves": "uniform:Curves",
    "ada": "ada:Ada",
    "duo": "duo:Duo",
}


def parse_allocator(text: str) -> Allocator:
    """Read an allocator: its name, perhaps with settings.

    >>> spell_allocator(parse_allocator("d2o"))
    'd2o'

    Raises:
        UsageError: a name or a setting that does not exist.
    """
    name = known_name(text.partition("(")[0], ALLOCATORS, "allocator")
    module, _, attribute = ALLOCATORS[name].partition(":")
    cls = getattr(import_module(f"kvtool.policies.allocate.{module}"), attribute)
    settings = read_part(text)[1]
    allocator = cls(**read_settings(cls().modifier, cls, settings))
    check_numbers(allocator)
    return allocator


def spell_allocator(allocator: Allocator) -> str:
    """Return the spelling of an allocator: its name and the settings that are not the default."""
    return allocator.name + spell_settings(allocator)
