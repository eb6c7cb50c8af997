"""YAML as people read it: numbers in lines, with their units; our reader gives back what was."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.documents.plan import PlanDocument
from kvtool.documents.source import Source
from kvtool.documents.yaml_writer import dump_yaml
from tests.documents.test_plan import PLAN
from tests.documents.test_plan import read as read_plan


def read(text: str):
    return Source.parse(text, "a.yaml").data


def test_numbers_stand_in_lines_and_other_lists_one_below_another():
    data = {"tokens": [205, None, 0.5], "names": ["a", "b"], "flags": [True, False], "none": []}
    assert dump_yaml(data | {"grid": [[1, 2], None], "mixed": [1, "a"], "gaps": [None]}) == (
        "tokens: [205, null, 0.5]\n"
        "names:\n- a\n- b\n"
        "flags:\n- true\n- false\n"
        "none: []\n"
        "grid:\n- [1, 2]\n- null\n"
        "mixed:\n- 1\n- a\n"
        "gaps:\n- null\n"
    )


def test_long_lists_wrap_before_the_hundredth_letter():
    for count in (15, 16, 17, 126):
        values = [0.1 + i / 7 for i in range(count)]
        data = {"outer": {"inner": {"values": values, "tokens": list(range(count))}}}
        text = dump_yaml(data, {("outer", "inner", "values"): "shares, per layer"})
        assert read(text) == data
        lines = text.splitlines()
        assert max(map(len, lines)) <= 100
        inside = [line for line in lines if line.endswith(",")]
        assert min(map(len, inside)) > 70  # as full as the next number allows
        assert lines.count("    # shares, per layer") == 1


UNITS = {("layers", "tokens"): "per layer", ("grid",): "a list per layer", ("far", "away"): "x"}


def test_units_are_comments():
    data = {"layers": {"tokens": [5, 6], "name": "a"}, "grid": [[1], [2]], "seed": 0}
    text = dump_yaml(data, UNITS)
    assert text == (
        "layers:\n  tokens: [5, 6]  # per layer\n  name: a\n"
        "grid:  # a list per layer\n- [1]\n- [2]\n"
        "seed: 0\n"
    )
    assert read(text) == data
    assert dump_yaml({"layers": {}, "grid": None}, UNITS) == (
        "layers: {}\ngrid: null  # a list per layer\n"
    )


TEXTS = st.text("ab:-?[]{},#&*!|>'\"%@ \t\n\\0.~é", max_size=150)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | TEXTS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=30)
@given(VALUES, VALUES, st.lists(st.none() | st.floats(-1, 1), max_size=40))
def test_what_is_written_with_units_reads_back(tokens, name, grid):
    data = {"layers": {"tokens": tokens, "name": name}, "grid": grid, "far": {"away": tokens}}
    assert read(dump_yaml(data, UNITS)) == data


def test_a_plan_of_many_layers_reads_back():
    few = read_plan(PLAN).to_data()
    kinds = ["full_attention"] * 125 + ["sliding_attention"]
    model = few["model"] | {"layers": 126, "layer_types": kinds}
    shares = [i / 1000 + 1 / 1024 for i in range(125)]
    layers = {"tokens": [max(8, round(1000 * share)) for share in shares] + [63]}
    many = PlanDocument(model=model, target=few["target"], layers=layers)
    text = many.to_yaml()
    assert "  # per layer and KV head\n  tokens: [8, 8, " in text
    assert max(map(len, text.splitlines())) <= 100
    assert read_plan(text) == many
    assert read_plan(PLAN).to_yaml().count("tokens: [250, 63, 150]  # per layer and KV head\n") == 1
