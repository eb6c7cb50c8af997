"""The shape of the code: no circles, small files and classes, no fields set from outside."""

import ast
import sys
from collections.abc import Container, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from radon.complexity import cc_visit_ast

import kvtool

PACKAGE = Path(kvtool.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TABLES = {"models/reference/facts.py", "models/reference/rows.py"}  # of data, of any length
ATTRIBUTES = 15
COMPLEXITY = 20  # independent ways through a function
ABOVE = ("evaluation", "calls", "cli", "report")
TIDY = [file for file in FILES if file.relative_to(PACKAGE).parts[0] in ABOVE]


def module(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    )


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


MODULES = {module(file) for file in FILES}


def imports(file: Path) -> Iterator[str]:
    """Modules of the package that a file imports, anywhere and for whatever reason."""
    for node in ast.walk(parsed(file)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [
                name if (name := f"{node.module}.{alias.name}") in MODULES else str(node.module)
                for alias in node.names
            ]
        yield from (name for name in names if name in MODULES and name != module(file))


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules each of which leads to all others (Tarjan's strongly connected sets)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def test_a_circle_is_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert circles(graph) == [["b", "c"]]


def test_no_files_import_each_other():
    """Imports for type checkers and inside functions count as well."""
    assert circles({module(file): set(imports(file)) for file in FILES}) == []


Import = ast.Import | ast.ImportFrom


def at_head(body: Iterable[ast.stmt]) -> Iterator[Import]:
    """Imports that run when a module is imported."""
    for node in body:
        if isinstance(node, Import):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from at_head(node.orelse)
        elif not isinstance(node, ast.FunctionDef):
            for field in ("body", "orelse", "finalbody"):
                yield from at_head(getattr(node, field, ()))


def in_functions(tree: ast.Module) -> set[Import]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {each for node in functions for each in ast.walk(node) if isinstance(each, Import)}


def sources(node: Import, modules: Container[str]) -> list[str]:
    """Modules that an import names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    whole = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if name in modules else str(node.module) for name in whole]


ENTRIES = {  # what functions may import late, whatever it brings: not every command gets there
    "kvtool.cli.main": ("kvtool.cli.",),
    "kvtool.cli.": ("kvtool.calls.",),
    "kvtool.calls.": tuple(
        f"kvtool.{room}." for room in ("planning", "cache", "models", "generation", "evaluation")
    ),
}


def enters(name: str, entered: str) -> bool:
    """Tell whether an import inside a function of a module leads from one side to the next."""
    return any(name.startswith(side) and entered.startswith(into) for side, into in ENTRIES.items())


def needless(trees: dict[str, ast.Module]) -> list[str]:
    """Imports inside functions that bring no package beside those that the head has brought."""
    heads = {
        name: {each for node in at_head(tree.body) for each in sources(node, trees)}
        for name, tree in trees.items()
    }

    def packages(names: Iterable[str]) -> set[str]:
        pending, met = list(names), set()
        while pending:
            if (name := pending.pop()) not in met:
                met.add(name)
                pending += heads.get(name, ())
        return {name.split(".")[0] for name in met - heads.keys()} - sys.stdlib_module_names

    return [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, tree in trees.items()
        for node in in_functions(tree)
        if packages(sources(node, trees)) <= packages([name])
        and not all(enters(name, each) for each in sources(node, trees))
    ]


def test_a_needless_import_is_found():
    texts = {
        "a": "import torch",
        "b": "import a\ndef run():\n    import torch\n    import triton",
        "c": "def run():\n    import a\n    import os",
        "kvtool.sizes": "",
        "kvtool.calls.evaluate": "",
        "kvtool.cli.eval": "def run():\n    import kvtool.calls.evaluate\n    import kvtool.sizes",
    }
    assert needless({name: ast.parse(text) for name, text in texts.items()}) == [
        "b:3: import torch",
        "c:3: import os",
        "kvtool.cli.eval:3: import kvtool.sizes",
    ]


def test_imports_inside_functions_wait_for_a_package():
    """So that commands start without torch, and run without what is optional."""
    found = needless({module(file): parsed(file) for file in FILES})
    # importlib.metadata, which most commands do without
    slow = ("kvtool.transformers_versions:", "kvtool.policies.installed:")
    assert [each for each in found if not each.startswith(slow)] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_files_are_short(file):
    if str(file.relative_to(PACKAGE)) not in TABLES:
        assert len(file.read_text().splitlines()) <= 500


def test_functions_have_few_branches():
    """By cyclomatic complexity, what is nested in a function included."""
    large = {
        f"{file.relative_to(PACKAGE)}: {block.fullname}": block.complexity
        for file in FILES
        for block in cc_visit_ast(parsed(file))
        if block.letter != "C" and block.complexity > COMPLEXITY
    }
    assert large == {}


def own_attributes(node: ast.ClassDef) -> set[str]:
    """Fields of a class: annotated in its body, or set on `self`."""
    body = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    fields = {each.target.id for each in body if isinstance(each.target, ast.Name)}
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            fields |= {each.attr} if ast.unparse(each.value) == "self" else set()
    return fields - {"__dict__"}


Name = tuple[str, str]  # of a class: its module, and what it is called there


def classes(trees: dict[str, ast.Module]) -> tuple[dict[Name, ast.ClassDef], dict[Name, Name]]:
    """Classes by name, and where each name that a module imports comes from."""
    found: dict[Name, ast.ClassDef] = {}
    imported: dict[Name, Name] = {}
    for own, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[own, node.name] = node
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    imported[own, alias.asname or alias.name] = str(node.module), alias.name
    return found, imported


def attributes(name: Name, found: dict[Name, ast.ClassDef], imported: dict[Name, Name]) -> set[str]:
    """Fields of a class and of all its bases in the package."""
    fields = own_attributes(found[name])
    for node in found[name].bases:
        base = name[0], ast.unparse(node).split("[")[0]
        base = base if base in found else imported.get(base, base)
        if base in found and base != name:
            fields |= attributes(base, found, imported)
    return fields


def test_attributes_of_bases_count():
    texts = {"a": "class A:\n    x: int", "b": "from a import A as C\nclass B(C):\n    y: int"}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    assert attributes(("b", "B"), *classes(trees)) == {"x", "y"}


def test_classes_have_few_attributes():
    """Inherited ones included; all but the settings of commands and the schemas of documents."""
    found, imported = classes({module(file): parsed(file) for file in FILES})
    large = {
        f"{where}: {name}": len(fields)
        for where, name in found
        if len(fields := attributes((where, name), found, imported)) > ATTRIBUTES
        and not where.startswith(("kvtool.cli.", "kvtool.documents."))
        and not (where.startswith("kvtool.calls.") and name.endswith("Settings"))
    }
    assert large == {}


def commands() -> Iterator[ast.FunctionDef]:
    """The functions that `kvtool` runs, which take options and a terminal and return nothing."""
    for file in sorted((PACKAGE / "cli").glob("*.py")):
        for node in parsed(file).body:
            public = isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
            if public and [each.arg for each in node.args.args] == ["options", "terminal"]:
                yield node


def test_commands_parse_call_and_print():
    found = {node.name: node for node in commands()}
    names = {"generate", "compress", "profile", "plan_budget", "evaluate", "policies"}
    assert names <= found.keys()
    for name in names:
        body = found[name].body[1:]  # below the docstring
        assert body[-1].end_lineno - body[0].lineno < 15, f"{name} does more than print"


OWN = {
    "self",
    "cls",
    "_LOCAL",  # notes of a thread
    "typed",  # a command's signature, for typer
    "settings",  # transformers' settings of generation, a copy
    "output",  # what a model returns to its caller
    "model.config",  # whose attention `attach` exchanges
}


@pytest.mark.parametrize(
    "room", sorted({file.relative_to(PACKAGE).parts[0] for file in FILES} - {"models"})
)
def test_nobody_assigns_to_the_fields_of_another_object(room):
    """Objects change through their methods; only models of libraries are set up from outside."""
    for file in FILES:
        if file.relative_to(PACKAGE).parts[0] != room:
            continue
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                owner = ast.unparse(node.value)
                assert owner in OWN, f"{file}:{node.lineno} assigns to {owner}.{node.attr}"


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


@pytest.mark.parametrize("file", TIDY, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_the_first_line_about_a_function_begins_with_a_verb(file):
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
            marks = [ast.unparse(mark) for mark in node.decorator_list]
            if not any("property" in mark for mark in marks):  # a noun, as an attribute has
                word = text.split()[0]
                assert word not in NO_VERB, f"{node.name}: {text}"
