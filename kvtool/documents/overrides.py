"""Settings from the command line laid over a document: `--set`, `--unset`, and values of flags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from kvtool.documents.readers import parse_yaml
from kvtool.documents.source import Source
from kvtool.documents.tree import DocumentError, Keys, Mark, Node, Problem
from kvtool.errors import UsageError, did_you_mean

_FORM = "the form is a.b=VALUE, a.0.b=VALUE or a.b+=VALUE"
_SET = re.compile(r"([^=+]+)(\+?)=(.*)", re.DOTALL)


def apply_sets(source: Source, sets: Sequence[str], unsets: Sequence[str] = ()) -> Source:
    """Return the document without `unsets` and then with `sets`, in the order given.

    Args:
        sets: `a.b=VALUE`, `a.0.b=VALUE` for an item of a list, `a.b+=VALUE` to append. VALUE is a
            YAML scalar, `[list]` or `{mapping}`.
        unsets: `a.b`.

    Raises:
        UsageError: not of this form.
        DocumentError: the way leads through a value that is no mapping or list; every mistake.
    """
    node, problems = source.node, []
    for text in unsets:
        flag = Mark(f"--unset {text}")
        try:
            node = _unset(node, _split(text, flag), 0, flag)
        except DocumentError as error:
            problems += error.problems
    for text in sets:
        flag = Mark(f"--set {text}")
        try:
            node = _set(node, text, flag)
        except DocumentError as error:
            problems += error.problems
    if problems:
        raise DocumentError(problems)
    return replace(source, node=node)


def overlay(below: Node, above: Node, keys: Keys = ()) -> Node:
    """Merge mappings key by key; scalars, lists and whatever names something else replace.

    A mapping with another `name` is another thing, which takes none of the old one's settings; a
    budget in other units is another budget; another model (`id`) has other revisions.
    """
    if not isinstance(below.value, dict) or not isinstance(above.value, dict):
        return above
    if keys == ("budget",) or (keys and _differs(below, above, "name")):
        return above
    kept = dict(below.value)
    if _differs(below, above, "id"):
        kept.pop("revision", None)
    for key, node in above.value.items():
        kept[key] = overlay(kept[key], node, (*keys, key)) if key in kept else node
    place = below if above.mark.index is None else above  # a flag holds nothing but its values
    return replace(place, value=kept)


def _differs(below: Node, above: Node, key: str) -> bool:
    new = above.child(key)
    old = below.child(key)
    return new is not None and (old.data if old else None) != new.data


def _split(text: str, flag: Mark) -> Keys:
    parts = [part.strip() for part in text.split(".")]
    if not all(parts):
        raise UsageError(f"cannot read `{flag.name}`", hint=_FORM)
    return tuple(int(part) if part.isdecimal() else part for part in parts)


def _set(node: Node, text: str, flag: Mark) -> Node:
    found = _SET.fullmatch(text)
    if found is None:
        raise UsageError(f"cannot read `{flag.name}`", hint=_FORM)
    keys = _split(found[1], flag)
    return _put(node, keys, 0, _value(found[3], keys, flag), append=bool(found[2]), flag=flag)


def _value(text: str, keys: Keys, flag: Mark) -> Node:
    try:
        value = parse_yaml(text, flag.name).data
    except DocumentError as error:
        message = error.problems[0].message
        raise DocumentError([Problem(flag, keys, message)]) from None
    if isinstance(value, (dict, list)) and text.lstrip()[:1] not in ("{", "["):
        message = "quote text that holds `: ` or begins with `- `"
        raise DocumentError([Problem(flag, keys, message)])
    return Node.of(value, flag)


def _put(node: Node, keys: Keys, at: int, new: Node, *, append: bool, flag: Mark) -> Node:
    """Return a copy of `node`, which stands at `keys[:at]`, with `new` at `keys`."""
    if at == len(keys):
        if not append:
            return replace(new, key=node.key)
        if node.value is None:
            node = replace(node, value=[], mark=flag)
        if not isinstance(node.value, list):
            raise DocumentError([Problem(flag, keys, "is not a list, nothing can be appended")])
        return node.with_child(len(node.value), new)
    key = _step(node, keys, at, flag)
    child = node.child(key)
    if child is None:
        following = keys[at + 1] if at + 1 < len(keys) else None
        if isinstance(following, int):
            raise DocumentError([Problem(flag, keys[: at + 1], "is not there, and nor is a list")])
        child = Node({} if following is not None else None, flag, flag)
    return node.with_child(key, _put(child, keys, at + 1, new, append=append, flag=flag))


def _unset(node: Node, keys: Keys, at: int, flag: Mark) -> Node:
    key = _step(node, keys, at, flag)
    child = node.child(key)
    if child is None:
        hint = did_you_mean(str(key), node.value) if isinstance(node.value, dict) else None
        message = "is not there" + (f"; {hint}" if hint else "")
        raise DocumentError([Problem(flag, keys[: at + 1], message)])
    if at + 1 == len(keys):
        return node.without_child(key)
    return node.with_child(key, _unset(child, keys, at + 1, flag))


def _step(node: Node, keys: Keys, at: int, flag: Mark) -> str | int:
    """Return `keys[at]` as `node` spells it, once it is known that it leads somewhere."""
    key, way = keys[at], keys[:at]
    if isinstance(node.value, dict):
        return str(key)
    if not isinstance(node.value, list):
        message = f"is neither a mapping nor a list, so it has no `{key}`"
    elif not isinstance(key, int):
        message = f"is a list; `{key}` is not an index"
    elif key >= len(node.value):
        message = f"has no item {key}, only {len(node.value)}; append with `+=`"
    else:
        return key
    raise DocumentError([Problem(flag, way, message)])
