"""Lay values over a recipe: included files, `--set`, `--unset` and the values of flags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from kvtool.documents.files import expand
from kvtool.documents.readers import parse_yaml
from kvtool.documents.recipe import Recipe
from kvtool.documents.source import Source, check_version, read_file, show
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
    for option, texts in (("--unset", unsets), ("--set", sets)):
        for text in texts:
            flag = Mark(f"{option} {text}")
            found = _SET.fullmatch(f"{text}=" if option == "--unset" else text)
            parts = [part.strip() for part in found[1].split(".")] if found else []
            if found is None or not all(parts):
                raise UsageError(f"cannot read `{flag.name}`", hint=_FORM)
            keys = tuple(int(part) if part.isdecimal() else part for part in parts)
            try:
                new = None if option == "--unset" else _value(found[3], keys, flag)
                node = _edit(node, keys, 0, flag, new, append=bool(found[2]))
            except DocumentError as error:
                problems += error.problems
    if problems:
        raise DocumentError(problems)
    return replace(source, node=node)


def _value(text: str, keys: Keys, flag: Mark) -> Node:
    try:
        value = parse_yaml(text, flag.name).data
    except DocumentError as error:
        _refuse(flag, keys, error.problems[0].message)
    if isinstance(value, (dict, list)) and text.lstrip()[:1] not in ("{", "["):
        _refuse(flag, keys, "quote text that holds `: ` or begins with `- `")
    return Node.of(value, flag)


def _refuse(flag: Mark, keys: Keys, message: str) -> NoReturn:
    raise DocumentError([Problem(flag, keys, message)])


def _edit(
    node: Node, keys: Keys, at: int, flag: Mark, new: Node | None, *, append: bool = False
) -> Node:
    """Return a copy of the value at `keys[:at]` with `new` at `keys`, or without what is there."""
    if at == len(keys) and new is not None:
        if not append:
            return replace(new, key=node.key)
        if not isinstance(node.value, list | None):
            _refuse(flag, keys, "is not a list, nothing can be appended")
        mark = flag if node.value is None else node.mark
        return replace(node, value=[*(node.value or []), new], mark=mark)
    key, last = _step(node, keys, at, flag), at + 1 == len(keys)
    child = node.child(key)
    if child is None and new is None:
        hint = did_you_mean(str(key), node.value) if isinstance(node.value, dict) else None
        _refuse(flag, keys[: at + 1], "is not there" + (f"; {hint}" if hint else ""))
    if child is None:
        if not last and isinstance(keys[at + 1], int):
            _refuse(flag, keys[: at + 1], "is not there, and nor is a list")
        child = Node(None if last else {}, flag, flag)
    if last and new is None:
        return node.without_child(key)
    return node.with_child(key, _edit(child, keys, at + 1, flag, new, append=append))


def _step(node: Node, keys: Keys, at: int, flag: Mark) -> str | int:
    """Return `keys[at]` as `node` spells it, once it is known that it leads somewhere."""
    key = keys[at]
    if isinstance(node.value, dict):
        return str(key)
    if not isinstance(node.value, list):
        _refuse(flag, keys[:at], f"is neither a mapping nor a list, so it has no `{key}`")
    if not isinstance(key, int) or key >= len(node.value):
        _refuse(flag, keys[:at], f"is a list of {len(node.value)} and has no item `{key}`")
    return key


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
    place = above if above.mark.in_text else below  # a flag holds nothing but its values
    return replace(place, value=kept)


def _differs(below: Node, above: Node, key: str) -> bool:
    old, new = below.child(key), above.child(key)
    return new is not None and (old.data if old else None) != new.data


def spell_out(node: Node) -> Node:
    """Write the short forms `model: ID` and `tasks: [NAME]` as the mappings they stand for."""
    model = node.child("model")
    if model is not None and isinstance(model.value, str):
        node = node.with_child("model", _wrapped(model, "id"))
    evaluation = node.child("eval")
    tasks = evaluation.child("tasks") if evaluation else None
    if evaluation is None or tasks is None or not isinstance(tasks.value, (str, list)):
        return node
    entries = [tasks] if isinstance(tasks.value, str) else tasks.value
    entries = [_wrapped(e, "task") if isinstance(e.value, str) else e for e in entries]
    return node.with_child("eval", evaluation.with_child("tasks", replace(tasks, value=entries)))


def _wrapped(node: Node, key: str) -> Node:
    return replace(node, value={key: replace(node, key=node.mark)})


def resolve_includes(source: Source, outer: tuple[Path, ...] = ()) -> Source:
    """Lay a recipe over the files it includes, the first of which is the weakest.

    Paths are relative to the including file; short forms are spelled out.

    Raises:
        DocumentError: a file that is missing, unreadable, no recipe, or includes itself.
    """
    if source.path is not None:
        outer = (*outer, source.path.resolve())
    if not isinstance(source.node.value, dict):
        raise DocumentError([source.problem((), f"must be a mapping, got {show(source.data)}")])
    check_version(source)
    include = source.node.child("include")
    above = spell_out(source.node)
    if include is None:
        return replace(source, node=above)
    above = above.without_child("include")
    listed = isinstance(include.value, list)
    below, problems = None, []
    for i, entry in enumerate(include.value if listed else [include]):
        try:
            included = _include(source, entry, outer)
        except DocumentError as error:
            problems += error.problems
        except UsageError as error:
            keys = ("include", i) if listed else ("include",)
            problems.append(Problem(entry.mark, keys, str(error)))
        else:
            below = included if below is None else overlay(below, included)
    if problems:
        raise DocumentError(problems)
    return replace(source, node=above if below is None else overlay(below, above))


def _include(source: Source, entry: Node, outer: tuple[Path, ...]) -> Node:
    if not isinstance(entry.value, str) or not entry.value:
        raise UsageError(f"must be the path of a file, got {show(entry.data)}")
    path = (source.path.parent if source.path else Path()) / expand(entry.value)
    if path.resolve() in outer:
        raise UsageError(f"`{path}` includes itself")
    included = read_file(path, option="include", kind="recipe")
    values, message = included.node.value, None
    keys: Keys = ()
    if included.kind not in (None, "recipe"):
        keys, message = ("kind",), f"an included file is a recipe, got {show(included.kind)}"
    elif not isinstance(values, dict):
        message = f"must be a mapping, got {'a list' if isinstance(values, list) else 'text'}"
    elif included.kind is None and values.keys() - {*Recipe.model_fields, "include"}:
        message = "is no recipe: it has keys of its own, and no line `kind: recipe`"
    if message:
        raise DocumentError([included.problem(keys, message)])
    return resolve_includes(included, outer).node
