"""A base and its modifiers, put together to a policy."""

from collections.abc import Sequence
from typing import TypeVar

from kvtool.errors import UsageError
from kvtool.policies.allocate.head_split import HeadSplit
from kvtool.policies.codec.codec import Codec
from kvtool.policies.parts import Allocator, Evicted, Pace, Read, Rescore, Score, Select
from kvtool.policies.policy import Part, Policy
from kvtool.policies.scores.full import Full
from kvtool.policies.spelling import part_name

Kind = TypeVar("Kind", bound=Part)


def compose(base: Score | Read, modifiers: Sequence[Part]) -> Policy:
    """Put modifiers on a base.

    Args:
        base: a reader keeps everything.

    Raises:
        UsageError: a combination that makes no sense.
    """
    heads = [part for part in modifiers if isinstance(part, HeadSplit)]
    layers = [part for part in modifiers if isinstance(part, Allocator) and part not in heads]
    return Policy(
        Full() if isinstance(base, Read) else base,
        _only([part for part in modifiers if isinstance(part, Rescore)]),
        _only(layers),
        _only(heads),
        _only([part for part in modifiers if isinstance(part, Evicted)]),
        _only([part for part in (base, *modifiers) if isinstance(part, Read)]),
        _only([part for part in modifiers if isinstance(part, Select)]),
        _only([part for part in modifiers if isinstance(part, Pace)]),
        _only([part for part in modifiers if isinstance(part, Codec)]),
    )


def _only(parts: Sequence[Kind]) -> Kind | None:
    """Return the only modifier of its kind, None if there is none."""
    if len(parts) > 1:
        names = [part_name(part) for part in parts]
        twice = len(set(names)) < len(names)
        raise UsageError(
            f"modifier `{names[0]}` is given twice"
            if twice
            else f"modifiers `{names[0]}` and `{names[1]}` exclude each other; keep one"
        )
    return parts[0] if parts else None
