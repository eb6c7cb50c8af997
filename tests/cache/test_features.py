"""Steps and hooks of the cache run features through their hooks, and name none of them."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import kvtool
from kvtool.cache.features.table import FEATURES, OF_CACHES
from kvtool.cache.features.trace import Trace
from kvtool.cache.slots.part import (
    HOOKS,
    REFUSALS,
    AttendsTokens,
    CutsByHead,
    CutSchedule,
    CutsLater,
)

CACHE = Path(kvtool.__file__).parent / "cache"
FILES = [file for room in ("steps", "hooks") for file in sorted((CACHE / room).glob("*.py"))]
WORDS = re.compile(
    r"calidrop|\bcam\b|d2o|kvzip|\brkv\b|sirllm|pyramid|positions=cache|surprisal|repetition|repeats\b",
    re.IGNORECASE,
)


PARTS = [*FEATURES, *OF_CACHES, Trace]
TEXTS = {file: file.read_text() for file in CACHE.rglob("*.py")}


@cache
def classes() -> set[str]:
    """Classes that features define for others to see."""
    trees = [ast.parse(text) for file, text in TEXTS.items() if file.parent.name == "features"]
    found = {node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    return {name for name in found if not name.startswith("_")}


def identifiers(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            name = getattr(node, field, None)
            yield from name.split(".") if isinstance(name, str) else ()


def named(text: str) -> set[str]:
    """Return what a file names of features: their package, classes, parts and words."""
    tree = ast.parse(text)
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    known = set(identifiers(tree)) & (classes() | {"features"})
    known |= strings & {part.name for part in PARTS if part is not CutSchedule}
    return known | {word.lower() for word in WORDS.findall(text)}


def test_steps_and_hooks_name_no_feature():
    found = {f"{file.parent.name}/{file.name}": named(TEXTS[file]) for file in FILES}
    assert {file: names for file, names in found.items() if names} == {}
    assert named(TEXTS[CACHE / "features" / "trace.py"])  # which does


def test_every_hook_is_defined_and_run():
    defined = {hook for feature in [*FEATURES, Trace] for hook in feature.hooks}
    run = {hook for hook in HOOKS for text in TEXTS.values() if f'parts.at["{hook}"]' in text}
    assert set(HOOKS) - defined == set(HOOKS) - run == set()
    assert len(HOOKS) <= 18  # what one feature alone does is done in the layer's place


def test_something_is_done_in_place_of_a_layer_by_one_feature():
    for role in (AttendsTokens, CutsByHead, CutsLater):
        assert len([feature for feature in FEATURES if issubclass(feature, role)]) == 1


def test_features_refuse_what_somebody_asks_for():
    unknown = {part.name: part.refusals.keys() - REFUSALS.keys() for part in PARTS}
    assert {name: keys for name, keys in unknown.items() if keys} == {}
