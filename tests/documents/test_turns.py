import io
import json
import sys

import pytest

from kvtool.documents.problems import DocumentError
from kvtool.documents.turns import UserTurn, read_turns
from kvtool.errors import UsageError

SAID = [UserTurn("How?"), UserTurn(" Why?")]


def write(tmp_path, text, name="turns.jsonl"):
    path = tmp_path / name
    path.write_bytes(text.encode())
    return str(path)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["turns.txt", "turns", "turns.md"])
def test_text_is_a_turn_a_line(tmp_path, name, end):
    text = end.join(["How?", "", "  ", " Why?", ""])
    assert read_turns(write(tmp_path, text, name)) == SAID


@pytest.mark.parametrize("name", ["turns.jsonl", "turns", "TURNS.JSONL"])
@pytest.mark.parametrize("first", ['"How?"', '{"user": "How?"}'])
def test_json_lines_hold_strings_or_objects(tmp_path, name, first):
    text = f'\n{first}\n\n{{"user": " Why?"}}\n{{"prompt": "As\\nis"}}'
    turns = read_turns(write(tmp_path, text, name))
    assert turns == [*SAID, UserTurn("As\nis", verbatim=True)]


def test_json_may_hold_other_line_ends(tmp_path):
    turn = "one\u2028two\x85three\x0bfour"
    text = json.dumps(turn, ensure_ascii=False) + "\n"
    assert read_turns(write(tmp_path, text)) == [UserTurn(turn)]


@pytest.mark.parametrize("text", ["[1] is a note\n", '"Who?" he said\n', "42\n", "null\n"])
def test_text_that_only_looks_like_json_is_text(tmp_path, text):
    assert read_turns(write(tmp_path, text, "turns")) == [UserTurn(text.strip())]


def test_a_name_decides_against_the_first_line(tmp_path):
    assert read_turns(write(tmp_path, '"How?"', "a.txt")) == [UserTurn('"How?"')]
    with pytest.raises(DocumentError, match="is not JSON"):
        read_turns(write(tmp_path, "How?", "a.jsonl"))


@pytest.mark.parametrize(("text", "turns"), [("How?\n Why?\n", SAID), ('"How?"\n" Why?"', SAID)])
def test_stdin(monkeypatch, text, turns):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert read_turns("-") == turns


def test_every_bad_line_is_told_with_its_place(tmp_path):
    bad = [
        '{"user": "How?"}',
        '{"user": "How?"',
        "",
        '{"usr": "How?"}',
        "{}",
        '{"user": "a", "prompt": "b"}',
        '{"user": 3}',
        "[1]",
        '" "',
        "null",
    ]
    path = write(tmp_path, "\n".join(bad))
    with pytest.raises(DocumentError) as caught:
        read_turns(path)
    assert [str(problem).removeprefix(path) for problem in caught.value.problems] == [
        ":2:16: is not JSON: expecting ',' delimiter",
        ":4:1: unknown key `usr`; did you mean `user`?",
        ":5:1: a turn has either `user` or `prompt`",
        ":6:1: a turn has either `user` or `prompt`",
        ":7:1: a turn is text, got `3`",
        ":8:1: a turn is text, got a list",
        ":9:1: a turn must not be empty",
        ":10:1: a turn is text, got null",
    ]
    assert '{"prompt": "text"}' in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "turns file `.*` holds no turn"), (" \n\n", "turns file `.*` holds no turn")],
)
def test_a_file_without_turns_is_refused(tmp_path, text, message):
    with pytest.raises(UsageError, match=message):
        read_turns(write(tmp_path, text))


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"turns file `.*gone` does not exist"):
        read_turns(str(tmp_path / "gone"))
    (tmp_path / "a").write_bytes(b"caf\xe9")
    with pytest.raises(UsageError, match="not UTF-8: byte 0xe9 at offset 3"):
        read_turns(str(tmp_path / "a"))
