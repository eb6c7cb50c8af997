"""Policy strings: text to policy; `str` writes them.

The form is `BASE[(key=value,..)][+MODIFIER[(key=value,..)]]..`, such as `h2o(recent=8)+caote`. A
base of one's own is named by its module, `my_package.my_module:MyScore(recent=8)+caote`.

`--allocator` puts an allocator on a policy that was read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from kvtool.errors import UsageError, quote
from kvtool.policies.allocate.head_split import HeadSplit
from kvtool.policies.allocate.table import parse_allocator
from kvtool.policies.installed import installed_base, placed
from kvtool.policies.outside import build_outside, is_outside, named_parts
from kvtool.policies.policy import Policy, compose
from kvtool.policies.spelling import (
    is_inside,
    part_name,
    read_part,
    read_settings,
    spell_settings,
    split_outside,
)
from kvtool.policies.table import BASES, MODIFIERS, offered, policy_class


def parse_policy(text: str | Policy, *, imports: bool = True) -> Policy:
    """Read a policy string.

    >>> str(parse_policy("H2O( recent = 8 )+CAOTE"))
    'h2o(recent=8)+caote'

    Args:
        text: as typed, in any case but for paths of files and modules; a `Policy` is returned as it
            is.
        imports: whether a module that it names is imported; else it must be imported already.

    Raises:
        UsageError: a name, parameter, value or combination that does not exist or makes no sense.
    """
    if isinstance(text, Policy):
        return text
    if not isinstance(text, str):
        raise UsageError(
            f"a policy is a string or a kvtool policy, got {quote(repr(text))}",
            hint="h2o+caote; full keeps everything",
        )
    if not text.strip():
        raise UsageError(f"the policy is empty; choose one of: {', '.join(BASES)}")
    base, *rest = split_outside(text, "+")
    score = _build_base(base, imports)
    return compose(score, [_build_modifier(part, score.name) for part in rest])


def listed_policies(text: object) -> list[str]:
    """Return the policies of a list such as `h2o,snapkv`; none where it is one policy."""
    parts = split_outside(text, ",") if isinstance(text, str) else []
    return [part.strip() for part in parts] if len(parts) > 1 else []


def check_policies(texts: Iterable[str]) -> None:
    """Refuse policies, alone or in lists, that no module from outside could make right.

    Raises:
        UsageError: as `parse_policy`.
    """
    for text in texts:
        for policy in listed_policies(text) or [text]:
            if policy and not is_outside(split_outside(policy, "+")[0]):
                parse_policy(policy)


def read_spelling(text: str) -> Policy:
    """Read back what `str` wrote, also of a policy whose reader was put on its score in Python.

    Raises:
        UsageError: a part that does not exist; one from a module that is not imported.
    """
    base, *rest = split_outside(text, "+")
    modifiers = [_build(part, BASES | MODIFIERS, "modifier") for part in rest]
    return compose(_build_base(base, imports=False), modifiers)


def _build_base(text: str, imports: bool) -> Any:
    name, arguments = read_part(text)
    if is_outside(name):
        return build_outside(name, arguments, imports=imports)
    if (added := installed_base(name)) is not None:
        return added.build(arguments, imports=imports)
    return _build(text, BASES, "policy")


def check_imported(choices: Sequence[Any], where: str, what: str = "a run or a plan") -> None:
    """Refuse scores from outside the package that are not imported.

    Args:
        choices: policies as a document has them, strings or mappings.
        where: they are, for the error.
        what: document names them, for the error.

    Raises:
        UsageError: the first such score, by its module or by the name that a package adds.
    """
    names = [choice.get("name") if isinstance(choice, dict) else choice for choice in choices]
    for name in (placed(each) for each in names if isinstance(each, str)):
        for module, score in named_parts(name):
            # a module that is there may import others when it is asked for a name of its own
            if score not in vars(sys.modules.get(module) or object):
                raise UsageError(
                    f"`{where}` names policy `{name}`, and what {what} names is not imported",
                    hint=f"--policy '{name}' imports it",
                )


def _build_modifier(text: str, base: str) -> Any:
    name = read_part(text)[0]
    if is_outside(name) or name.lower() in BASES:
        shown = name if is_outside(name) else name.lower()
        raise UsageError(
            f"`{shown}` is a base policy and cannot modify `{base}`",
            hint=f"modifiers: {', '.join(MODIFIERS)}",
        )
    return _build(text, MODIFIERS, "modifier")


def _build(text: str, table: dict[str, str], kind: str) -> Any:
    name, arguments = read_part(text)
    name = offered(name, table, kind)
    cls = policy_class(name)
    return cls(**read_settings(name, cls, arguments))


def with_allocator(policy: Policy, allocator: str, typed: str | None = None) -> Policy:
    """Put an allocator on a policy.

    Args:
        typed: the policy as it was typed, for errors.

    Raises:
        UsageError: no such allocator; the policy has one already, or cannot carry one.
    """
    chosen = parse_allocator(allocator)
    given = policy.heads if isinstance(chosen, HeadSplit) else policy.allocate
    if given is not None:
        raise UsageError(
            f"policy `{typed or policy}` has the allocator `{given.modifier}` already",
            hint=f"leave out --allocator {allocator}",
        )
    if isinstance(chosen, HeadSplit):
        return replace(policy, heads=chosen)
    return replace(policy, allocate=chosen)


def label_of(policy: Policy) -> str:
    """Return the policy string with the name of a score from outside in place of its module.

    The name is the score's setting `label`, where it has one that is not empty, and else its
    `name` with its settings. A name of kvtool's own stays with kvtool's.
    """
    spelled, score = str(policy), policy.score
    if is_inside(type(score)):
        return spelled
    own = getattr(score, "label", None)
    named = isinstance(own, str) and own
    short = str(own) if named else score.name + spell_settings(score)
    if short.partition("(")[0] in BASES:
        return spelled
    return short + spelled.removeprefix(part_name(score) + spell_settings(score))
