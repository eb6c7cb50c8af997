"""Name policies as tables show them: a score from outside by its own name, without its module."""

from __future__ import annotations

from kvtool.policies.policy import Policy
from kvtool.policies.spelling import is_inside, part_name, spell_settings
from kvtool.policies.table import BASES


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
