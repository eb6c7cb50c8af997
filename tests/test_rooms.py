"""How the rooms on top are kept: no circle of files, small files, nobody writes into others."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtool

PACKAGE = Path(kvtool.__file__).parent
TIDY = ("evaluation", "cli", "report")
FILES = sorted(file for room in TIDY for file in (PACKAGE / room).rglob("*.py"))
LONGEST, MOST_ATTRIBUTES = 300, 15


def module_of(file: Path) -> str:
    dotted = ".".join(("kvtool", *file.relative_to(PACKAGE).with_suffix("").parts))
    return dotted.removesuffix(".__init__")


def imported(file: Path, known: set[str]) -> Iterator[str]:
    """Files that a file imports anywhere, for type checkers only and inside functions as well."""
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            found = name if name in known else name.rpartition(".")[0]
            if found in known and found != module_of(file):
                yield found


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """A way from a file back to itself, empty where there is none."""
    done: set[str] = set()

    def walk(here: str, way: list[str]) -> list[str]:
        if here in way:
            return [*way[way.index(here) :], here]
        if here in done:
            return []
        for there in sorted(arrows[here]):
            if found := walk(there, [*way, here]):
                return found
        done.add(here)
        return []

    return next((found for file in arrows if (found := walk(file, []))), [])


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_circle_of_files():
    known = {module_of(file) for file in FILES}
    arrows = {module_of(file): set(imported(file, known)) for file in FILES}
    assert sum(map(len, arrows.values())) > 300
    assert circle(arrows) == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_file_is_short_and_writes_only_to_its_own_objects(file):
    text = file.read_text()
    assert text.count("\n") <= LONGEST
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            written = ast.unparse(node)
            own = written.startswith(("self.", "typed."))  # a command's signature, for typer
            assert own, f"{file}:{node.lineno} assigns to {written}"


def attributes(node: ast.ClassDef) -> set[str]:
    fields = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each.annotation)
    }
    return fields | {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and ast.unparse(each.value) == "self"
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_class_has_few_attributes(file):
    if file.stem.endswith("options"):  # one field per flag
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef):
            assert len(attributes(node)) <= MOST_ATTRIBUTES, f"{file}: {node.name}"


NO_VERB = {
    "A",
    "An",
    "The",
    "How",
    "What",
    "Whether",
    "Which",
    "Where",
    "As",
    "One",
    "Its",
    "Whose",
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_the_first_line_about_a_function_begins_with_a_verb(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
            marks = [ast.unparse(mark) for mark in node.decorator_list]
            if not any("property" in mark for mark in marks):  # a noun, as an attribute has
                word = text.split()[0]
                assert word not in NO_VERB, f"{node.name}: {text}"
