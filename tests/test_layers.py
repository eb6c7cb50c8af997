"""The shape of the package: which subpackage imports which, and what stays out of each."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtool

PACKAGE = Path(kvtool.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = (  # a subpackage imports itself and those before it
    "version",
    "errors",
    "sizes",
    "identity",
    "processes",
    "extras",
    "package_data",
    "garbage",
    "plain_config",
    "transformers_versions",
    "model_shape",
    "weights_hash",
    "documents",
    "watcher",
    "maths",
    "kernels",
    "policies",
    "planning",
    "cache",
    "models",
    "generation",
    "profiling",
    "evaluation",
    "report",
    "engines",
    "calls",
    "cli",
    "__main__",
)
ONLY = {  # third-party packages of the subpackages at the bottom
    "version": set(),
    "errors": set(),
    "sizes": set(),
    "identity": set(),
    "extras": set(),
    "package_data": set(),
    "processes": {"torch"},
    "plain_config": set(),
    "transformers_versions": {"transformers"},
    "model_shape": {"torch"},
    "weights_hash": {"torch"},
    "documents": {"filelock", "pydantic", "pydantic_core", "yaml"},
    "watcher": set(),
    "maths": {"torch"},
    "kernels": {"torch", "triton"},
    "policies": {"torch"},
    "planning": set(),
}


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(file: Path) -> Iterator[str]:
    """Dotted names that a file imports: at its head, inside functions or for type checkers."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_for_type_checkers_and_inside_functions_count(tmp_path):
    file = tmp_path / "module.py"
    file.write_text("if TYPE_CHECKING:\n    import a.b\ndef run():\n    from c import d\n")
    assert sorted(imports(file)) == ["a.b", "c.d"]


def test_files_are_found():
    assert len(FILES) > 20
    assert {room_of(file) for file in FILES} - {"__init__"} == set(ROOMS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_down(file):
    room = room_of(file)
    if room == "__init__":
        return
    for name in imports(file):
        parts = name.split(".")
        if parts[0] == "kvtool" and len(parts) > 1 and parts[1] in ROOMS:
            assert ROOMS.index(parts[1]) <= ROOMS.index(room), f"{room} imports {name}"
        elif parts[0] != "kvtool" and parts[0] not in sys.stdlib_module_names:
            assert parts[0] in ONLY.get(room, {parts[0]}), f"{room} imports {name}"
            assert parts[0] != "typer" or room == "cli", f"{room} imports {name}"
            assert parts[0] != "rich" or room in ("cli", "report"), f"{room} imports {name}"
            assert parts[0] != "click", "typer brings its own click; a clean install has no other"
