import io
import json
import sys
from types import SimpleNamespace
from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from kvtool.documents.source import DocumentError, Source, check_kind, read_source
from kvtool.documents.yaml_writer import dump_yaml
from kvtool.errors import UsageError


def problems(text):
    with pytest.raises(DocumentError) as caught:
        Source.parse(text, "a.yaml")
    return list(map(str, caught.value.problems))


# ---- values


SCALARS = {  # by the core schema of YAML 1.2
    "on": "on",
    "true": True,
    "False": False,
    "tRUE": "tRUE",
    "3:1": "3:1",
    "block:128": "block:128",
    "1e-5": 1e-5,
    "1E5": 1e5,
    ".5": 0.5,
    "-3.": -3.0,
    "2026-11-21T02:00:00Z": "2026-11-21T02:00:00Z",
    "010": 10,
    "0o10": 8,
    "0x1F": 31,
    "0b11": "0b11",
    "1_000": "1_000",
    "+7": 7,
    "~": None,
    "": None,
    "'null'": "null",
    '"8"': "8",
    "20%": "20%",
    "=": "=",
    "|\n    10\n": "10\n",
    "[1K, 4K]": ["1K", "4K"],
    "{a: [1, {b: ~}]}": {"a": [1, {"b": None}]},
    r'"\ud83d\ude00"': "😀",
}


def test_scalars_follow_the_core_schema_of_yaml_1_2():
    read = {typed: Source.parse(f"v: {typed}\n", "a.yaml").data["v"] for typed in SCALARS}
    assert {typed: repr(value) for typed, value in read.items()} == {
        typed: repr(value) for typed, value in SCALARS.items()
    }


def test_a_key_such_as_on_is_text():
    assert Source.parse("on: 1\nno: 2\n", "a.yaml").data == {"on": 1, "no": 2}
    assert Source.parse("'<<': 1\n'3': 2\n", "a.yaml").data == {"<<": 1, "3": 2}


KEYS = st.text(max_size=50)  # a place is found behind keys of up to 1024 characters as written
DATA = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["1e-5", "0o10", "010", "on", "3:1", "1.", ".inf", "<<", "=", "2026-11-21"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=30)
@given(st.dictionaries(st.text(), DATA, min_size=1, max_size=4), st.sampled_from([None, 1, "\t"]))
def test_json_is_read_as_the_json_module_reads_it(data, indent):
    for ascii_only in (True, False):
        text = json.dumps(data, indent=indent, ensure_ascii=ascii_only)
        assert Source.parse(text, "a.json").data == data


@settings(max_examples=30)
@given(st.dictionaries(st.text(), DATA, min_size=1, max_size=4))
def test_what_is_written_as_yaml_is_read_as_it_was(data):
    read = Source.parse("---\n" + dump_yaml(data), "a.yaml").data
    assert read == data
    assert json.dumps(read) == json.dumps(data), "1 and True and 1.0 are told apart"


@settings(max_examples=30)
@given(st.dictionaries(st.text("abc", min_size=1), DATA, min_size=1, max_size=4))
def test_every_json_value_is_found_at_its_place(data):
    text = json.dumps(data, indent=1)
    pending = [((), Source.parse(text, "a.json").node)]
    while pending:
        keys, node = pending.pop()
        value, _ = json.JSONDecoder().raw_decode(text, node.mark.index)
        assert value == node.data
        if isinstance(node.value, dict):
            for key, child in node.value.items():
                assert json.JSONDecoder().raw_decode(text, child.key.index)[0] == key
                pending.append(((*keys, key), child))
        elif isinstance(node.value, list):
            pending += [((*keys, i), child) for i, child in enumerate(node.value)]


# ---- texts that are refused


def test_a_text_that_is_refused_names_the_place():
    for text, told in [
        ("a: 1\nb: [1, 2\nc: 3\n", "a.yaml:3:2: not valid YAML: while parsing a flow sequence"),
        ("a:\n\tb: 1\n", "a.yaml:2:1: not valid YAML: while scanning for the next token"),
        ("a: b: c\n", "a.yaml:1:5: not valid YAML: mapping values are not allowed in this context"),
        ("a: 1\nb: \x07\n", "a.yaml:2:4: the character '\\x07' has no place in YAML"),
        ("a: 1\nb:\n  c: 2\n  c: 3\n", "a.yaml:4:3: b: key `c` is given twice, first in line 3"),
        ("a: !!python/name:os.system x\n", "a.yaml:1:4: tags are not read, got `tag:yaml.org"),
        ("!x {a: 1}\n", "a.yaml:1:1: tags are not read, got `!x`"),
        ("a:\n  1: x\n", "a.yaml:2:3: a: a key must be text, got `1`; quote it"),
        ("true: x\n", "a.yaml:1:1: a key must be text, got `true`; quote it"),
        ("? [a]\n: x\n", "a.yaml:1:3: a key must be text"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", "a.yaml:3:3: c: merge keys (`<<`) are not read"),
        ("a: 1\n---\nb: 2\n", "a.yaml:2:1: a second document begins here; a file holds one"),
        ("a: [1, .inf]\n", "a.yaml:1:8: a.1: `.inf` is not a finite number"),
        ("a: .NaN\n", "a.yaml:1:4: a: `.NaN` is not a finite number"),
        ("a: 1e999\n", "a.yaml:1:4: a: `1e999` is not a finite number"),
        ("a: " + "9" * 5000, "a.yaml:1:4: a: a number of 5000 digits"),
        ('a: "\\ud800"\n', "a.yaml:1:4: a: half of a surrogate pair"),
        ("a: *x\n", "a.yaml:1:4: not valid YAML: found undefined alias"),
        ("a: " + "[" * 5000, "a.yaml:1:67: nested more than 64 levels deep"),
        ("- " * 5000 + "x", "a.yaml:1:129: nested more than 64 levels deep"),
        ('{"a": 1,\n "b": [1,\n ]}', "a.yaml:3:2: not valid JSON: expecting value"),
        ('{"a": 1,}', "a.yaml:1:"),
        ("{a: 1}", "a.yaml:1:2: not valid JSON: expecting property name enclosed in double quotes"),
        ('{"a": 1 "b": 2}', "a.yaml:1:9: not valid JSON: expecting `,` delimiter"),
        ("[1 2]", "a.yaml:1:4: not valid JSON: expecting `,` delimiter"),
        ('{"a": "x', "a.yaml:1:7: not valid JSON: unterminated string starting"),
        ('{"a": "\t"}', "a.yaml:1:8: not valid JSON: invalid control character"),
        ('{"a": 1} x', "a.yaml:1:10: not valid JSON: extra data"),
        ('{"a": -1e999}', "a.yaml:1:7: a: `-1e999` is not a finite number"),
        ('{"a": "\\ud800"}', "a.yaml:1:7: a: half of a surrogate pair"),
    ]:
        (found,) = problems(text)
        assert found.startswith(told)


def bomb(levels, width):
    lines = [f"a0: &a0 [{', '.join(['x'] * width)}]"]
    for i in range(1, levels):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]")
    return "\n".join(lines)


def test_aliases_that_stand_for_many_values_are_refused_before_they_are_followed():
    """The first stands for 10^30 values, which nothing could follow."""
    for levels, width, place in ((30, 10, "3:50"), (4, 9, "4:10"), (2, 40, "2:130")):
        (told,) = problems(bomb(levels, width))
        assert told == f"a.yaml:{place}: aliases stand for more than 1000 values; write them out"


def test_an_alias_inside_what_it_stands_for_is_refused():
    for text in ("a: &x [*x]\n", "a: &x {b: [*x]}\n"):
        (told,) = problems(text)
        assert told.endswith(": an alias inside what it stands for")


def test_aliases_are_read():
    assert Source.parse("a: &x [1]\nb: *x\n", "a.yaml").data == {"a": [1], "b": [1]}


def test_several_mistakes_are_told_at_once_in_the_order_of_the_text():
    found = problems("a: 1\na: 2\nb: .inf\n3: x\nc: !t 1\n")
    assert [told.split(": ")[0] for told in found] == [
        "a.yaml:2:1",
        "a.yaml:3:4",
        "a.yaml:4:1",
        "a.yaml:5:4",
    ]


def test_every_repetition_of_a_key_names_the_first():
    for text in ("a: 1\na: 2\na: 3\n", '{"a": 1,\n"a": 2,\n"a": 3}'):
        said = [told.partition(": key ")[2] for told in problems(text)]
        assert said == ["`a` is given twice, first in line 1"] * 2


# ---- files and stdin


def feed(monkeypatch, data, *, terminal=False):
    stdin = SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: terminal)
    monkeypatch.setattr(sys, "stdin", stdin)


def test_reads_a_file_and_stdin(tmp_path, monkeypatch):
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: \xc3\xa4\n")
    source = read_source(str(path), option="RECIPE")
    assert (source.data, source.name) == ({"a": "ä"}, str(path))
    path.write_bytes(b'\xef\xbb\xbf{"a": "\\/",\t"b"\n: 1}')
    assert read_source(str(path), option="RECIPE").data == {"a": "/", "b": 1}
    feed(monkeypatch, b'{"a": 1}')
    source = read_source("-", option="RECIPE")
    assert (source.data, source.name) == ({"a": 1}, "<stdin>")
    feed(monkeypatch, b"a: [1\n")
    with pytest.raises(DocumentError, match=r"^<stdin>:2:1: not valid YAML"):
        read_source("-", option="RECIPE")


def test_stdin_that_holds_nothing_is_refused(monkeypatch):
    feed(monkeypatch, b"  \n")
    with pytest.raises(UsageError, match=r"^`<stdin>` is empty"):
        read_source("-", option="RECIPE")
    feed(monkeypatch, b"", terminal=True)
    with pytest.raises(UsageError, match=r"^RECIPE: `-` reads stdin, which is a terminal(;|$)"):
        read_source("-", option="RECIPE")


def test_files_that_are_no_documents_are_refused(tmp_path):
    path = tmp_path / "a.yaml"

    def refused(match):
        with pytest.raises(UsageError, match=match):
            read_source(str(path), option="RECIPE")

    refused(r"^cannot read RECIPE `.*a\.yaml`: No such file")
    path.write_bytes(b"a: \xe4\n")
    refused(r"^RECIPE `.*a\.yaml` is not UTF-8: byte 0xe4 at offset 3; convert it, .* iconv")
    path.write_text("# nothing\n")
    refused(r"^`.*a\.yaml` is empty$")
    path.write_bytes(b"#" * (4 * 2**20) + b"\n")
    refused(r"^RECIPE `.*a\.yaml` is larger than 4 MiB")
    path = tmp_path
    refused(r"^cannot read RECIPE `.*`: Is a directory$")


# ---- validation


class Layer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    window: int = Field(ge=1)
    pooling: Literal["avg", "max"] = "avg"


class Twig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    policy: Layer
    others: list[Layer] = []
    size: int | list[int] = 0
    rate: float = 0.5
    wide: Layer | str = ""
    lone: Annotated[list[Layer], BeforeValidator(lambda value: [value])] = []

    @field_validator("rate")
    @classmethod
    def _rate(cls, value):
        if value > 1:
            raise UsageError(f"rate {value} is above 1", hint="use 0.5")
        return value


BAD = """\
size: x
others:
- {window: 3}
-   window: 0
    polling: max

policy:
    windw: 32
    pooling: mx
rate: 2
wide: {windo: 3}
"""


def mistakes(source, *arguments, **options):
    with pytest.raises(DocumentError) as caught:
        source.validate(*arguments, **options)
    return caught.value


def test_every_mistake_is_told_at_its_place_and_reported_with_a_caret():
    error = mistakes(Source.parse(BAD, "bad.yaml"), Twig)
    assert list(map(str, error.problems)) == [
        "bad.yaml:1:7: size: must be a whole number or a list, got `x`",
        "bad.yaml:4:13: others.1.window: must be at least 1, got `0`",
        "bad.yaml:5:5: others.1.polling: unknown key `polling`; did you mean `pooling`?",
        "bad.yaml:7:1: policy.window: is required",
        "bad.yaml:8:5: policy.windw: unknown key `windw`; did you mean `window`?",
        "bad.yaml:9:14: policy.pooling: must be `avg` or `max`, got `mx`",
        "bad.yaml:10:7: rate: rate 2.0 is above 1; use 0.5",
        "bad.yaml:11:1: wide.window: is required",
        "bad.yaml:11:8: wide.windo: unknown key `windo`; did you mean `window`?",
    ]
    assert str(error) == f"{error.problems[0]} (and 8 more)"
    assert error.exit_code == 2
    lines = error.report().splitlines()  # shows each line with a caret
    assert lines[12:18] == [
        "bad.yaml:8:5: policy.windw: unknown key `windw`; did you mean `window`?",
        "    windw: 32",
        "    ^",
        "bad.yaml:9:14: policy.pooling: must be `avg` or `max`, got `mx`",
        "    pooling: mx",
        "             ^",
    ]


def test_json_mistakes_are_told_at_their_places():
    text = '{"policy": {"windw": 32,\n\t"window": "x"},\r\n "others": [{}]}'
    error = mistakes(Source.parse(text, "bad.json"), Twig)
    assert list(map(str, error.problems)) == [
        "bad.json:1:13: policy.windw: unknown key `windw`; did you mean `window`?",
        "bad.json:2:12: policy.window: must be a whole number, got `x`",
        "bad.json:3:13: others.0.window: is required",
    ]
    assert error.problems[1].mark.excerpt == '    "window": "x"},\n              ^'
    assert isinstance(error, UsageError)  # which is what a caller catches


def test_a_long_line_is_shown_in_part():
    text = json.dumps({"others": [{"window": i} for i in range(1, 1000)] + [{"window": "x"}]})
    error = mistakes(Source.parse(text, "bad.json"), Twig)
    line, caret = error.problems[1].mark.excerpt.splitlines()
    assert len(line) < 130
    assert line[caret.index("^") :] == '"x"}]}'


def test_a_part_is_validated_where_it_stands():
    text = "tasks:\n- task: niah\n  window: 5\n- task: ppl\n  window: [1]\n"
    source = Source.parse(text, "a.yaml")

    class Named(Layer):
        name: str

    layer = source.validate(Named, ("tasks", 0), without=("task",), given={"name": "niah"})
    assert layer == Named(window=5, name="niah")
    error = mistakes(source, Named, ("tasks", 1), without=("task",), given={"name": "ppl"})
    assert list(map(str, error.problems)) == [
        "a.yaml:5:11: tasks.1.window: must be a whole number, got a list"
    ]
    given = {"name": "niah", "window": "x"}
    error = mistakes(source, Named, ("tasks", 0), without=("task",), given=given)
    assert str(error) == "--window x: must be a whole number, got `x`"
    error = mistakes(source, Layer, ("task",))
    assert str(error) == "a.yaml:1:1: task: is required"


def test_one_value_may_stand_for_a_list_of_one():
    source = Source.parse("policy: {window: 1}\nlone: {window: 2, polling: avg}\n", "a.yaml")
    assert list(map(str, mistakes(source, Twig).problems)) == [
        "a.yaml:2:19: lone.polling: unknown key `polling`; did you mean `pooling`?"
    ]


def test_what_is_not_there_is_not_found():
    source = Source.parse("a: [{b: 1}]\n", "a.yaml")
    assert source.find(("a", 0, "b")).data == 1
    for keys in (("b",), ("a", 1), ("a", -1), ("a", "0"), ("a", 0, "c"), ("a", 0, "b", 0)):
        assert source.find(keys) is None


def test_others_add_problems_at_places():
    source = Source.parse("eval:\n  tasks: [niah, rulr]\n", "a.yaml")
    problem = source.problem(("eval", "tasks", 1), "no task `rulr`")
    assert str(problem) == "a.yaml:2:17: eval.tasks.1: no task `rulr`"
    assert (problem.place, problem.path) == ("a.yaml:2:17", "eval.tasks.1")
    assert source.problem(("eval", "limit"), "").place == "a.yaml:2:3"


def test_lines_end_as_on_any_system():
    for end in ("\n", "\r\n", "\r"):
        source = Source.parse(end.join(["# a", "", "a: 1", "# x", "b: 2", ""]), "a.yaml")
        problem = source.problem(("b",), "wrong")
        assert (problem.place, problem.mark.excerpt) == ("a.yaml:5:4", "    b: 2\n       ^")


# ---- kinds


def kind_error(text, *takes):
    with pytest.raises(DocumentError) as caught:
        check_kind(Source.parse(text, "a.yaml"), takes=takes, command="kvtool eval")
    return caught.value.message, caught.value.hint


def test_kinds_that_a_command_takes_pass():
    for text in ("kind: plan\nschema_version: 1\n", "kind: recipe\n"):
        check_kind(Source.parse(text, "a.yaml"), takes=("recipe", "plan"), command="kvtool eval")


def test_other_kinds_are_refused_in_one_line():
    for text, told, hint in [
        (
            "policy: h2o\n",
            "a.yaml:1:1: kind: kvtool eval takes kind `recipe` or `plan`, got none",
            "add the line `kind: recipe`",
        ),
        (
            "a: 1\nkind: profile\n",
            "a.yaml:2:7: kind: kvtool eval takes kind `recipe` or `plan`, got `profile`",
            "kvtool plan-budget a.yaml",
        ),
        (
            "kind: recipee\n",
            "a.yaml:1:7: kind: kvtool eval takes kind `recipe` or `plan`, got `recipee`",
            "did you mean `recipe`?",
        ),
        ("- 1\n", "a.yaml:1:1: kind: kvtool eval takes kind `recipe` or `plan`, got a list", None),
        (
            "kind: plan\nschema_version: 2\n",
            "a.yaml:2:17: schema_version: this kvtool reads 1, got `2`",
            "upgrade kvtool",
        ),
        (
            "kind: plan\nschema_version: '1'\n",
            "a.yaml:2:17: schema_version: this kvtool reads 1, got `1`",
            None,
        ),
    ]:
        assert kind_error(text, "recipe", "plan") == (told, hint)


# ---- large documents and many mistakes


class Small(BaseModel):
    model_config = ConfigDict(extra="forbid")

    sinks: int = 0


def mistakes_of(text):
    with pytest.raises(DocumentError) as caught:
        Source.parse(text, "a").validate(Small)
    return caught.value


def test_twenty_mistakes_are_told_and_the_number_of_the_rest():
    error = mistakes_of("".join(f"k{i}: 1\n" for i in range(57)))
    assert len(error.problems) == 57
    lines = error.report().splitlines()
    assert lines[0] == "a:1:1: k0: unknown key `k0`; keys here: sinks"
    assert lines[57].startswith("a:20:1: k19: ")
    assert lines[60:] == ["and 37 more"]
    assert len(mistakes_of("k: 1\nl: 1\n").report().splitlines()) == 6


def test_long_keys_and_values_are_cut_in_messages():
    error = mistakes_of(f'{{"{"x" * 9000}": 1, "sinks": {"9" * 90}.5}}')
    assert max(map(len, error.report().splitlines())) < 600


def test_keys_that_hold_line_ends_are_told_in_one_line():
    error = mistakes_of('{"a\\r\\nb\\u2028c": {"d\\ne": 1}}')
    assert error.report().splitlines()[0] == "a:1:2: a b c: unknown key `a b c`; keys here: sinks"
    assert len(error.report().splitlines()) == 3
