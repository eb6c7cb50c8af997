"""Read recipes as they are typed: included files, short forms, flags over the file.

`--set`, `--unset` and the values of flags override what a document says; policies are checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from kvtool.documents.files import expand
from kvtool.documents.readers import parse_yaml
from kvtool.documents.recipe import PolicyChoice, PolicyMapping, Recipe
from kvtool.documents.source import Source, check_version, read_named, show
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
    """Return a copy of `node`, the value at `keys[:at]`, with `new` at `keys`."""
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


Policy = TypeVar("Policy")
Check = Callable[[Recipe, Source], list[Problem]]


def read_recipe(
    source: Source,
    flags: Sequence[tuple[str, dict[str, Any]]] = (),
    sets: Sequence[str] = (),
    unsets: Sequence[str] = (),
    check: Check | None = None,
) -> tuple[Recipe, Source]:
    """Return the recipe, and the document that all of it is from.

    Args:
        source: a document of kind `recipe`.
        flags: what flags set, weakest first: the flag as typed, and values nested as in a recipe.
        sets: `--set` flags, stronger than the others.
        unsets: `--unset` flags.
        check: finds mistakes that the shape of a recipe does not show. Of a recipe that has other
            mistakes it is given the sound parts.

    Raises:
        DocumentError: every mistake, each with its file and position, or its flag.
    """
    node = resolve_includes(source).node
    for origin, values in flags:
        node = overlay(node, spell_out(Node.of(values, Mark(origin))))
    source = apply_sets(replace(source, node=node), sets, unsets)
    source = replace(source, node=spell_out(source.node))
    recipe, problems, sound = _validate(source)
    if check is not None and sound is not None:
        problems += check(recipe, sound)
    if problems:
        raise DocumentError(
            sorted(problems, key=lambda problem: (problem.mark.name, problem.mark.index or 0))
        )
    return recipe, source


def _validate(source: Source) -> tuple[Recipe, list[Problem], Source | None]:
    """Return the recipe, or what is left of it without the keys that hold mistakes, and those."""
    try:
        return source.validate(Recipe), [], source
    except DocumentError as error:
        problems = error.problems
    wrong = {problem.keys[: 2 if problem.keys[:1] == ("eval",) else 1] for problem in problems}
    sound = replace(source, node=_without(source.node, wrong))
    try:
        return sound.validate(Recipe), problems, sound
    except DocumentError:
        return Recipe(), problems, None


def _without(node: Node, wrong: set[Keys]) -> Node:
    """Return a mapping without keys, and without keys of its mappings, all in one go."""
    whole: set[str | int] = set()
    within: dict[str | int, set[str | int]] = {}
    for keys in wrong:
        inner = node.child(keys[0]) if len(keys) > 1 else None
        if inner is not None and isinstance(inner.value, dict) and keys[1] in inner.value:
            within.setdefault(keys[0], set()).add(keys[1])
        else:
            whole.update(keys[:1])
    for key, names in within.items():
        inner = node.value[key]
        kept = {name: child for name, child in inner.value.items() if name not in names}
        node = node.with_child(key, replace(inner, value=kept))
    if not whole:
        return node
    return replace(node, value={key: n for key, n in node.value.items() if key not in whole})


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
    node = spell_out(source.node)
    if include is None:
        return replace(source, node=node)
    listed = isinstance(include.value, list)
    below, problems = None, []
    for i, entry in enumerate(include.value if listed else [include]):
        keys = ("include", i) if listed else ("include",)
        try:
            included = _include(source, entry, outer)
        except DocumentError as error:
            problems += error.problems
        except UsageError as error:
            problems.append(Problem(entry.mark, keys, str(error).removeprefix("include: ")))
        else:
            below = included if below is None else overlay(below, included)
    if problems:
        raise DocumentError(problems)
    above = node.without_child("include")
    return replace(source, node=above if below is None else overlay(below, above))


def _include(source: Source, entry: Node, outer: tuple[Path, ...]) -> Node:
    if not isinstance(entry.value, str) or not entry.value:
        raise UsageError(f"must be the path of a file, got {show(entry.data)}")
    path = (source.path.parent if source.path else Path()) / expand(entry.value)
    if path.resolve() in outer:
        raise UsageError(f"`{path}` includes itself")
    included = read_named(path, option="include", kind="recipe")
    if included.kind not in (None, "recipe"):
        message = f"an included file is a recipe, got {show(included.kind)}"
        raise DocumentError([included.problem(("kind",), message)])
    values = included.node.value
    if not isinstance(values, (dict, list)):
        raise DocumentError([included.problem((), "must be a mapping, got something else")])
    known = {*Recipe.model_fields, "include"}
    if included.kind is None and isinstance(values, dict) and values.keys() - known:
        message = "is no recipe: it has keys of its own, and no line `kind: recipe`"
        raise DocumentError([included.problem((), message)])
    return resolve_includes(included, outer).node


def parse_policies(recipe: Recipe, source: Source, parse: Callable[[str], Policy]) -> list[Policy]:
    """Parse every policy with its modifiers.

    Args:
        parse: reads a policy string, `UsageError` if it cannot.

    Raises:
        DocumentError: every policy, modifier or parameter that cannot be read, at its place.
    """
    parsed: list[Policy] = []
    problems: dict[tuple[Keys, str], Problem] = {}
    for i, text in enumerate(recipe.policies()):
        try:
            parsed.append(parse(text))
        except UsageError as error:
            found = _problems_of_policy(recipe, source, i, parse)
            for problem in found or [source.problem(("modifiers",), str(error))]:
                problems[problem.keys, problem.message] = problem
    if problems:
        raise DocumentError(list(problems.values()))
    return parsed


def _problems_of_policy(
    recipe: Recipe, source: Source, i: int, parse: Callable[[str], Any]
) -> list[Problem]:
    """Find why a policy cannot be read: itself, or one of its modifiers on it."""
    choice = (recipe.policy or [])[i]
    if _check(str(choice), parse):
        return _explain(source, _way(source, "policy", i), choice, "", parse)
    found = []
    for j, modifier in enumerate(recipe.modifiers):
        if _check(f"{choice}+{modifier}", parse):
            way = _way(source, "modifiers", j)
            found += _explain(source, way, modifier, f"{choice}+", parse)
    return found


def _way(source: Source, key: str, i: int) -> Keys:
    node = source.node.child(key)
    return (key, i) if node is not None and isinstance(node.value, list) else (key,)


def _explain(
    source: Source, way: Keys, choice: PolicyChoice, before: str, parse: Callable[[str], Any]
) -> list[Problem]:
    """Find the name or the parameters for which a policy or modifier cannot be read."""
    whole = _check(f"{before}{choice}", parse) or ""
    if not isinstance(choice, PolicyMapping):
        return [source.problem(way, whole)]
    error = _check(f"{before}{choice.name}", parse)
    if error:
        return [source.problem((*way, "name"), error)]
    wrong = []
    for key, value in choice.parameters.items():
        error = _check(f"{before}{PolicyMapping(name=choice.name, **{key: value})}", parse)
        if error:
            wrong.append(source.problem((*way, key), error, at_key=True))
    return wrong or [source.problem(way, whole)]


def _check(text: str, parse: Callable[[str], Any]) -> str | None:
    """Return why a policy string cannot be read, None if it can."""
    try:
        parse(text)
    except UsageError as error:
        return str(error)
    return None
