"""Values are read by the json module; places are looked up when something is wrong."""

import pytest

from kvtool.documents import readers
from kvtool.documents.readers import parse_json
from kvtool.documents.recipe import Recipe
from kvtool.documents.source import Source
from kvtool.documents.tree import DocumentError


def told(text):
    with pytest.raises(DocumentError) as caught:
        parse_json(text, "a")
    return [str(problem) for problem in caught.value.problems]


@pytest.fixture
def walks(monkeypatch):
    """How often a text is walked through for places."""
    seen, walk = [], readers._JsonComposer.document

    def count(document):
        seen.append(document.name)
        return walk(document)

    monkeypatch.setattr(readers._JsonComposer, "document", count)
    return seen


def test_no_place_is_looked_up_where_nothing_is_wrong(walks):
    Source.parse('{"kind": "recipe", "policy": "h2o", "budget": [64]}', "a").validate(Recipe)
    assert walks == []


def test_places_are_looked_up_once_for_all_mistakes(walks):
    keys = ", ".join(f'"x{i}": {i}' for i in range(40))
    with pytest.raises(DocumentError) as caught:
        Source.parse(f'{{"kind": "recipe",\n{keys}}}', "a").validate(Recipe)
    assert walks == ["a"]
    assert [problem.place for problem in caught.value.problems[:2]] == ["a:2:1", "a:2:10"]


def test_what_is_refused_is_told_at_its_place():
    for text, lines in [
        (
            '{"a": {"b": 1, "b": 2},\n"a": {"b": 3}, "c": NaN, "d": 1e999}',
            [
                "a:1:16: a: key `b` is given twice, first in line 1",
                "a:2:1: key `a` is given twice, first in line 1",
                "a:2:21: c: `NaN` is not a finite number",
                "a:2:31: d: `1e999` is not a finite number",
            ],
        ),
        ('{"a": 1, "a": 2, "b" 3}', ["a:1:22: not valid JSON: expecting `:` delimiter"]),
        ('{"x": ["\\ud83d\\ude00", "\\ud83d"]}', ["a:1:24: x.1: half of a surrogate pair"]),
        (f"[{'9' * 101}]", ["a:1:2: 0: a number of 101 digits"]),
        ("[" * 10**6, ["a:1:65: nested more than 64 levels deep"]),
        ("[" * 70 + "]" * 70, ["a:1:65: nested more than 64 levels deep"]),
        ("[1, [2}", ["a:1:7: not valid JSON: expecting `,` delimiter"]),
        ('{"a": "x\\q"}', ["a:1:9: not valid JSON: invalid \\escape"]),
        ('{"a": "x\\q' + "[" * 100, ["a:1:9: not valid JSON: invalid \\escape"]),
        ("", ["a:1:1: not valid JSON: expecting value"]),
    ]:
        found = told(text)
        assert len(found) == len(lines), found
        for line, expected in zip(found, lines, strict=True):
            assert line.encode("utf-8", "backslashreplace").decode().startswith(expected)
