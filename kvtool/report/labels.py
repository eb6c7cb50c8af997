"""Show variants under the labels of their policies, in all that a results document holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvtool.documents.results import ResultsDocument

_NAMES = ("name", "variant", "against", "policy", "than")  # keys of a document that name a variant


def labels(document: ResultsDocument) -> dict[str, str]:
    """Return variants and policies that have labels; two of one label keep their full names."""
    shown = {each.name: each.shown for each in document.variants}
    often = Counter(shown.values())
    found: dict[str, str] = {}
    for each in document.variants:
        if each.label is not None and often[each.shown] == 1:
            found |= {each.name: each.shown, each.policy: each.label}
    return found


def labelled(document: ResultsDocument) -> ResultsDocument:
    """Return the document with labels in place of policies of other modules."""
    named = labels(document)
    if not named:
        return document
    parts: dict[str, Any] = {
        name: _renamed(getattr(document, name), named)
        for name in ("variants", "results", "averages", "gates", "differences", "verdict")
    }
    if document.claim is not None:
        parts["claim_verdict"] = _renamed(document.claim_verdict, named)
    return document.model_copy(update=parts)


def _renamed(part: Any, named: Mapping[str, str]) -> Any:
    """Return a section, or a list of them, under the labels."""
    if isinstance(part, list):
        return [_renamed(each, named) for each in part]
    if isinstance(part, str):
        return named.get(part, part)
    fields = getattr(type(part), "model_fields", None)
    if fields is None:
        return part
    names = [name for name in _NAMES if name in fields]
    nested = [name for name in ("variants", "choices", "rows", "undecided") if name in fields]
    return part.model_copy(
        update={name: _renamed(getattr(part, name), named) for name in (*names, *nested)}
    )
