"""The shape of the code: which package imports which, small classes, no fields set from outside.

Ruff and mypy check the rest. Each rule is one loop over all files, and names all that break it.
"""

import ast
import sys
from collections.abc import Container, Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import kvtool

PACKAGE = Path(kvtool.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TABLES = {"models/reference/facts.py", "models/reference/rows.py"}  # of data, of any length
ATTRIBUTES = 15
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


Import = ast.Import | ast.ImportFrom


def sources(node: Import, modules: Container[str]) -> list[str]:
    """Modules that an import names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    whole = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if name in modules else str(node.module) for name in whole]


def imports(file: Path) -> set[str]:
    """Modules of the package that a file imports, anywhere and for whatever reason."""
    nodes = [node for node in ast.walk(parsed(file)) if isinstance(node, Import)]
    return {name for node in nodes for name in sources(node, MODULES)} & MODULES - {module(file)}


def test_no_files_import_each_other():
    """Imports for type checkers and inside functions count as well."""
    TopologicalSorter({module(file): imports(file) for file in FILES}).prepare()


ROOMS = (  # a subpackage imports itself and those before it
    *("version", "errors", "sizes", "identity", "processes", "extras", "package_data", "garbage"),
    "lazy_torch",
    *("plain_config", "transformers_versions", "model_shape", "weights_hash", "documents"),
    *("watcher", "maths", "kernels", "policies", "planning", "cache", "models", "generation"),
    *("profiling", "evaluation", "report", "engines", "calls", "cli", "__main__"),
)
BARE = ("version", "errors", "sizes", "identity", "extras", "package_data", "watcher", "planning")
ONLY = {room: set[str]() for room in (*BARE, "plain_config")} | {  # third-party packages
    "processes": {"torch"},
    "lazy_torch": {"torch"},
    "transformers_versions": {"transformers"},
    "model_shape": {"torch"},
    "weights_hash": {"torch"},
    "documents": {"filelock", "pydantic", "pydantic_core", "yaml"},
    "maths": {"torch"},
    "kernels": {"torch", "triton"},
    "policies": {"torch"},
}
ABOVE_ALL = {"typer": ("cli",), "rich": ("cli", "report"), "click": ()}  # who may import them


def misplaced(room: str, tree: ast.Module) -> list[str]:
    """Imports that a subpackage may not have: at the head, inside functions or for types."""
    found = []
    for node in (each for each in ast.walk(tree) if isinstance(each, Import)):
        if isinstance(node, ast.ImportFrom) and node.level:
            found.append(f"from {'.' * node.level}{node.module or ''}")
            continue
        for name in sources(node, MODULES):
            top, *rest = name.split(".")
            if top == "kvtool" and rest and rest[0] in ROOMS:
                fine = ROOMS.index(rest[0]) <= ROOMS.index(room)
            elif top == "kvtool" or top in sys.stdlib_module_names:
                fine = True
            else:
                fine = top in ONLY.get(room, {top}) and room in ABOVE_ALL.get(top, (room,))
            found += [] if fine else [name]
    return found


def test_a_misplaced_import_is_found():
    text = "if TYPE_CHECKING:\n    import kvtool.cli.main\ndef run():\n    from rich import box"
    assert misplaced("cache", ast.parse(text)) == ["kvtool.cli.main", "rich"]
    text = "import torch, numpy, click, os\nfrom . import a\nfrom kvtool import maths, cache"
    assert misplaced("policies", ast.parse(text)) == ["numpy", "click", "from .", "kvtool.cache"]


def test_imports_point_down():
    rooms = {file: file.relative_to(PACKAGE).parts[0].removesuffix(".py") for file in FILES}
    assert set(rooms.values()) - {"__init__"} == set(ROOMS)
    inside = {file: room for file, room in rooms.items() if room != "__init__"}
    found = {str(file): misplaced(room, parsed(file)) for file, room in inside.items()}
    assert {file: names for file, names in found.items() if names} == {}


CACHE = ("tensor_files", "slots", "steps", "features", "whole", "hooks", "entry", "files")


def test_folders_of_the_cache_import_those_before_them():
    found = []
    for file in (PACKAGE / "cache").rglob("*/*.py"):
        for name in imports(file):
            own, *rest = file.parent.name, *name.split(".")[1:]
            if rest[0] == "cache" and CACHE.index(rest[1]) > CACHE.index(own):
                found.append(f"{module(file)}: {name}")
    assert found == []
    assert {each.stem for each in (PACKAGE / "cache").glob("*.py")} == {"__init__"}


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


def test_files_are_short():
    lines = {str(file.relative_to(PACKAGE)): file.read_text().count("\n") for file in FILES}
    assert {file for file, count in lines.items() if count > 500} <= TABLES


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
    """Inherited ones included; all but the settings of commands and of tasks, and documents."""
    found, imported = classes({module(file): parsed(file) for file in FILES})
    large = {
        f"{where}: {name}": len(fields)
        for where, name in found
        if len(fields := attributes((where, name), found, imported)) > ATTRIBUTES
        and not where.startswith(("kvtool.cli.", "kvtool.documents.", "kvtool.evaluation.tasks."))
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


def test_nobody_assigns_to_the_fields_of_another_object():
    """Objects change through their methods; only models of libraries are set up from outside."""
    found = [
        f"{file}:{node.lineno} assigns to {ast.unparse(node)}"
        for file in FILES
        if file.relative_to(PACKAGE).parts[0] != "models"
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
        if ast.unparse(node.value) not in OWN
    ]
    assert found == []


NO_VERB = {
    *("A", "An", "The", "How", "What", "Whether", "Which", "Where", "As", "One", "Its", "Whose")
}


def test_the_first_line_about_a_function_begins_with_a_verb():
    nodes = [(file, node) for file in TIDY for node in ast.walk(parsed(file))]
    found = [
        f"{file}:{node.lineno}: {text.splitlines()[0]}"
        for file, node in nodes
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node))
        # a property is a noun, as an attribute is
        if not any("property" in ast.unparse(mark) for mark in node.decorator_list)
        if text.split()[0] in NO_VERB
    ]
    assert found == []
