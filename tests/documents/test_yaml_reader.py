"""libyaml parses and PyYAML's own parser is the fall-back: one answer, and soon."""

from functools import partial

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.documents import readers
from kvtool.documents.readers import parse_yaml
from kvtool.documents.recipe import Recipe
from kvtool.documents.source import Source
from kvtool.documents.tree import DocumentError
from kvtool.documents.yaml_writer import dump_yaml
from tests.growth import assert_time_grows_with_size


def answer(text):
    """What a text is read as, every value with its place, or what is said of it."""
    try:
        return outline(parse_yaml(text, "a.yaml"))
    except DocumentError as error:
        return [str(problem) for problem in error.problems]


def outline(node):
    inside = node.value
    if isinstance(inside, dict):
        inside = {key: outline(child) for key, child in inside.items()}
    elif isinstance(inside, list):
        inside = [outline(child) for child in inside]
    return inside, type(inside), node.mark.index, node.key and node.key.index


def answers(text, monkeypatch):
    """The answers of both parsers."""
    with monkeypatch.context() as patch:
        found = answer(text)
        patch.setattr(readers, "_PARSER", yaml.Loader)
        return found, answer(text)


def test_libyaml_parses_where_it_is_there():
    assert yaml.__with_libyaml__ == (readers._PARSER is yaml.CLoader)


WORDS = st.text("ab:-?[]{},#&*!|>'\"%@ \t\n\\0.~é", max_size=30)


@settings(max_examples=50)
@given(WORDS)
def test_what_both_parsers_take_for_yaml_they_read_alike(text):
    with pytest.MonkeyPatch.context() as patch:
        here, there = answers(text, patch)
    if isinstance(here, tuple) and isinstance(there, tuple):
        assert here == there


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=30)
@given(st.dictionaries(st.text(), VALUES, min_size=1, max_size=4))
def test_both_parsers_find_every_value_at_the_same_place(data):
    with pytest.MonkeyPatch.context() as patch:
        here, there = answers(dump_yaml(data), patch)
    assert here == there


def test_half_a_surrogate_pair_and_what_is_beyond_unicode_are_refused():
    for escape in ("\\ud83d", "\\ud83d \\U00110000", "\\ud83d \\UFFFFFFFF"):
        (told,) = answer(f'a: "{escape}"\n')
        assert "half of a surrogate pair" in told or "invalid Unicode character escape" in told


def test_surrogates_in_a_text_too_long_for_the_slow_parser_are_refused_in_its_first_line():
    (told,) = answer("".join(f'k{i}: "\\ud83d\\ude00"\n' for i in range(50_000)))
    assert "a.yaml:1:" in told
    assert "invalid Unicode character escape code" in told


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "text_of",
    [
        lambda count: f"kind: recipe\neval: {{{', '.join(f'x{i}: {i}' for i in range(count))}}}\n",
        lambda count: "".join(f"x: {i}\n" for i in range(count)),
    ],
    ids=["unknown-keys", "one-key-again"],
)
@pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML's own parser takes 8 s")
def test_time_grows_with_the_mistakes_of_a_recipe_and_one_answer_tells_the_first(text_of):
    def refused(text):
        with pytest.raises(DocumentError) as caught:
            Source.parse(text, "a.yaml").validate(Recipe)
        assert len(caught.value.report().splitlines()) <= 61

    assert_time_grows_with_size(lambda count: partial(refused, text_of(count)))


def test_depth_is_counted_before_anything_is_nested():
    for begin, more, place in (("a: ", "[", "1:67"), ("", "- ", "1:129"), ("a: ", "{a: ", "1:253")):
        told = answer(begin + more * 10**5)
        assert told == [f"a.yaml:{place}: nested more than 64 levels deep"]


def test_aliases_do_not_nest_what_is_deep_already():
    inner = "[" * 40 + "x" + "]" * 40
    assert answer(f"a: &a {inner}\nb: {'[' * 20}*a{']' * 20}\n")
    told = answer(f"a: &a {inner}\nb: {'[' * 30}*a{']' * 30}\n")
    assert told == ["a.yaml:2:34: nested more than 64 levels deep"]
