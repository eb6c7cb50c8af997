"""The code and the files that a policy depends on, as a hash: what its spelling does not say."""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from kvtool.documents.files import digest, expand
from kvtool.policies.policy import Policy
from kvtool.policies.spelling import is_inside

_INSTALLED = ("site-packages", "dist-packages")


def source_hash(policy: Policy) -> str:
    """Return the sha256 of what decides beside the spelling of a policy.

    That is, for each class from outside the package, the text of its module and of all modules in
    the same folder (of its package, where it is installed) which that one imports, and the code
    that is loaded, which may be older than the text. It also covers the content of files that
    settings name. Modules of kvtool are left out: `package_hash` covers them.
    """
    parts = [getattr(policy, each.name) for each in fields(policy)]
    lines: set[str] = set()
    for part in (part for part in parts if part is not None):
        lines.update(_files_of(part))
        lines.update(class_sources(type(part)))
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def class_sources(cls: type) -> list[str]:
    """Return lines with hashes of the code of a class from outside the package; else none."""
    if is_inside(cls):
        return []
    own = [each for each in cls.__mro__ if each.__module__.partition(".")[0] not in _LIBRARIES]
    return sorted({line for each in own for line in _sources_of(each)})


_LIBRARIES = frozenset({"builtins", "abc", "typing", "kvtool", "pydantic"})


def _files_of(part: Any) -> Iterator[str]:
    """A line for each setting that names a file: its content counts, not its name."""
    for each in fields(part) if is_dataclass(part) else ():
        value = getattr(part, each.name)
        if isinstance(value, (str, Path)) and str(value):
            try:
                path = expand(str(value))
                if path.is_file():
                    yield f"file {each.name} {digest(path)}"
            except (OSError, ValueError):  # no name of a file
                continue


def _sources_of(cls: type) -> Iterator[str]:
    yield f"class {cls.__module__}.{cls.__qualname__} {_hash_class(cls)}"
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if not file or not Path(file).is_file():  # typed at a prompt: the code is all there is
        return
    path = Path(file)
    depth = cls.__module__.count(".") + (path.name == "__init__.py")
    root = path.resolve().parents[depth] if depth < len(path.resolve().parents) else path.parent
    top = cls.__module__.partition(".")[0]
    pending, seen = [(cls.__module__, path.resolve())], set()
    while pending:
        name, path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        yield f"module {name} {digest(path)}"
        for imported in _imported(name, path):
            start = imported.partition(".")[0]
            if start not in _LIBRARIES and (root.name not in _INSTALLED or start == top):
                pending += _found(root, imported)


def _found(root: Path, name: str) -> Iterator[tuple[str, Path]]:
    """The files of a module, and of the packages that it is in, as far as a folder has them."""
    place = root
    parts = name.split(".")
    for i, part in enumerate(parts):
        here = ".".join(parts[: i + 1])
        for path in (place / f"{part}.py", place / part / "__init__.py"):
            if path.is_file():
                yield here, path.resolve()
        place /= part


def _imported(name: str, path: Path) -> Iterator[str]:
    """Names that a module imports anywhere, each also as a module below the one it comes from."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*above, *([node.module] if node.module else [])])
            if start:
                yield start
            for alias in node.names:
                yield f"{start}.{alias.name}" if start else alias.name


def _hash_class(cls: type) -> str:
    """Hash the functions of a class as they are loaded."""
    lines = []
    for name, value in sorted(vars(cls).items()):
        inner = value.fget if isinstance(value, property) else value
        inner = inner.func if isinstance(inner, cached_property) else inner
        inner = inner.__func__ if isinstance(inner, (staticmethod, classmethod)) else inner
        if isinstance(inner, FunctionType):
            lines.append(f"{name} {_spell_code(inner.__code__)} {_plain(inner.__defaults__)}")
        else:
            lines.append(f"{name} {_plain(inner)}")
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def _spell_code(code: CodeType) -> str:
    consts = [_plain(each) for each in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {consts}"


def _plain(value: Any) -> str:
    """Spell a constant alike in every process; all else by its type."""
    if isinstance(value, CodeType):
        return _spell_code(value)
    if isinstance(value, (frozenset, set)):
        return f"{{{sorted(map(_plain, value))}}}"
    if isinstance(value, (tuple, list)):
        return f"({[_plain(each) for each in value]})"
    simple = isinstance(value, (str, bytes, int, float, complex, type(None), type(...)))
    return repr(value) if simple else type(value).__name__
