"""JSON with lists of numbers on one line says what plain JSON says."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.documents.document import dump_json

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=30)
@given(VALUES)
def test_it_reads_back(value):
    assert json.loads(dump_json(value)) == json.loads(json.dumps(value))


def test_numbers_share_a_line_and_everything_else_has_its_own():
    text = dump_json({"a": [1, 2.5, None], "b": ["x", "[ 1,\n 2 ]"], "c": [], "d": {}, "e": [[1]]})
    assert text.splitlines() == [
        "{",
        '  "a": [1, 2.5, null],',
        '  "b": [',
        '    "x",',
        r'    "[ 1,\n 2 ]"',
        "  ],",
        '  "c": [],',
        '  "d": {},',
        '  "e": [',
        "    [1]",
        "  ]",
        "}",
    ]
