"""In the rooms above the cache, nobody assigns to a field of an object that is not its own."""

import ast
from pathlib import Path

import pytest

import kvtool

ROOMS = ("documents", "planning", "generation", "profiling")
MADE_HERE = {"settings"}  # transformers' settings of generation, a copy


def assigned(tree):
    """Every attribute that is assigned to, but for those of `self` and `cls`."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        inner = [each for target in targets if target is not None for each in ast.walk(target)]
        for target in inner if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) else []:
            if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
                yield ast.unparse(target.value)


@pytest.mark.parametrize("room", ROOMS)
def test_objects_are_told_not_written_to(room):
    for file in Path(kvtool.__file__).parent.joinpath(room).rglob("*.py"):
        found = set(assigned(ast.parse(file.read_text()))) - {"self", "cls"} - MADE_HERE
        assert not found, f"{file}: {found}"
