import io
import itertools
import json
import sys

import pytest

from kvtool.documents.messages import Turns, UserTurn, read_turns
from kvtool.documents.tree import DocumentError
from kvtool.errors import UsageError

SAID = [UserTurn("How?"), UserTurn(" Why?")]


def write(tmp_path, text, name="turns.jsonl"):
    path = tmp_path / name
    path.write_bytes(text.encode())
    return str(path)


def test_text_is_a_turn_a_line(tmp_path):
    for name, end in (("turns.txt", "\n"), ("turns", "\r\n"), ("turns.md", "\n")):
        text = end.join(["How?", "", "  ", " Why?", ""])
        assert read_turns(write(tmp_path, text, name)).turns == SAID


@pytest.mark.parametrize("first", ['"How?"', '{"user": "How?"}'])
def test_json_lines_hold_strings_or_objects(tmp_path, first):
    text = f'\n{first}\n\n{{"user": " Why?"}}\n{{"prompt": "As\\nis"}}'
    for name in ("turns.jsonl", "turns", "TURNS.JSONL"):
        turns = read_turns(write(tmp_path, text, name)).turns
        assert turns == [*SAID, UserTurn("As\nis", verbatim=True)]


def test_json_may_hold_other_line_ends(tmp_path):
    turn = "one\u2028two\x85three\x0bfour"
    text = json.dumps(turn, ensure_ascii=False) + "\n"
    assert read_turns(write(tmp_path, text)).turns == [UserTurn(turn)]


def test_text_that_only_looks_like_json_is_text(tmp_path):
    for text in ("[1] is a note\n", '"Who?" he said\n', "42\n", "null\n"):
        assert read_turns(write(tmp_path, text, "turns")).turns == [UserTurn(text.strip())]


def test_a_name_decides_against_the_first_line(tmp_path):
    assert read_turns(write(tmp_path, '"How?"', "a.txt")).turns == [UserTurn('"How?"')]
    with pytest.raises(DocumentError, match="is not JSON"):
        read_turns(write(tmp_path, "How?", "a.jsonl"))


def test_stdin(monkeypatch):
    for text in ("How?\n Why?\n", '"How?"\n" Why?"'):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert read_turns("-").turns == SAID


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
        ":4:1: a turn has either `user` or `prompt`, got `usr`",
        ":5:1: a turn has either `user` or `prompt`, got nothing",
        ":6:1: a turn has either `user` or `prompt`, got `user`, `prompt`",
        ":7:1: a turn is text, got `3`",
        ":8:1: a turn is text, got a list",
        ":9:1: a turn must not be empty",
        ":10:1: a turn is text, got null",
    ]
    assert '{"prompt": "text"}' in caught.value.hint


def test_a_file_that_holds_no_turns_or_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"turns file `.*` holds no turn"):
        read_turns(write(tmp_path, " \n\n"))
    with pytest.raises(UsageError, match=r"cannot read turns file `.*gone`: No such file"):
        read_turns(str(tmp_path / "gone"))
    (tmp_path / "a").write_bytes(b"caf\xe9")
    with pytest.raises(UsageError, match="not UTF-8: byte 0xe9 at offset 3"):
        read_turns(str(tmp_path / "a"))


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How?"},
    {"role": "assistant", "content": "So."},
    {"role": "user", "content": " Why?"},
]
HEARD = Turns([UserTurn("How?", answer="So."), UserTurn(" Why?")], system="Be brief.")


NAMES = ("turns.json", "turns.jsonl", "turns", "turns.txt", "turns.md")


@pytest.mark.parametrize("indent", [None, 2])
def test_one_array_is_never_a_line_of_text(tmp_path, indent):
    text = f"\n{json.dumps(MESSAGES, indent=indent)}\n"
    others = ["How?", {"user": " Why?"}, {"prompt": "As is"}]
    for name in NAMES:
        assert read_turns(write(tmp_path, text, name)) == HEARD
        turns = read_turns(write(tmp_path, json.dumps(others, indent=indent), name))
        assert turns == Turns([*SAID, UserTurn("As is", verbatim=True)])


def test_an_answer_may_be_given_to_what_came_before_the_turns(tmp_path):
    turns = read_turns(write(tmp_path, json.dumps([MESSAGES[2], MESSAGES[3]])))
    assert turns == Turns([UserTurn("", answer="So."), UserTurn(" Why?")])


def test_messages_in_an_order_that_no_conversation_has(tmp_path):
    for messages, place, message in [
        ([1, 0], "1:54", "a system message comes before all others"),
        ([1, 2, 2, 3], "1:106", "an assistant message comes after one of the user"),
    ]:
        padded = [json.dumps(MESSAGES[i]).ljust(50) for i in messages]
        path = write(tmp_path, f"[{', '.join(padded)}]", "a.json")
        with pytest.raises(DocumentError) as caught:
            read_turns(path)
        assert str(caught.value.problems[0]) == f"{path}:{place}: {message}"


def test_arrays_that_hold_no_turns_are_refused_with_the_place(tmp_path):
    for text, message in [
        ('[{"role": "tool", "content": "a"}]', "no role `tool`; choose one of: system, user, assi"),
        ('[{"role": "user"}]', "a message has `role` and `content`"),
        ('[{"role": "user", "content": "a", "user": "b"}]', "a message has `role` and `content`"),
        (
            '[{"role": "user", "content": [{"type": "text"}]}]',
            "texts, got null",
        ),
        ('[{"role": "user", "content": null}]', "texts, got null"),
        ('[{"role": "user", "content": ""}]', "a turn must not be empty"),
        ('[["a"]]', "a turn is text, got a list"),
        ('[{"user": "a"}]\n[{"user": "b"}]', "not valid JSON: extra data"),
        ('["a", "b"', "not valid JSON"),
    ]:
        with pytest.raises(DocumentError, match=r"turns:1:\d+|turns:2:1") as caught:
            read_turns(write(tmp_path, text, "turns"))
        assert message in str(caught.value)


def test_turns_without_a_message_to_answer_are_refused(tmp_path):
    for kept in ([0], [0, 1, 2], []):
        path = write(tmp_path, json.dumps([MESSAGES[i] for i in kept]))
        with pytest.raises(UsageError, match="holds no message to answer"):
            read_turns(path)


SPOKEN = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "How?"},
    {"from": "gpt", "value": "So."},
    {"from": "human", "value": " Why?"},
]
PARTS = [
    MESSAGES[0] | {"role": "developer"},
    {"role": "user", "content": [{"type": "text", "text": "Ho"}, {"type": "text", "text": "w?"}]},
    MESSAGES[2] | {"tool_calls": None, "function_call": None, "refusal": None, "name": None},
    {"role": "user", "content": [" Why?"]},
]


@pytest.mark.parametrize(
    "value",
    [{"messages": MESSAGES}, {"id": "x1", "conversations": SPOKEN}, {"messages": PARTS}],
    ids=["messages", "conversations", "parts"],
)
def test_a_whole_conversation_may_stand_in_one_object(tmp_path, value):
    for name, indent in itertools.product(NAMES, (None, 2)):
        assert read_turns(write(tmp_path, json.dumps(value, indent=indent), name)) == HEARD
        assert read_turns(write(tmp_path, json.dumps([value], indent=indent), name)) == HEARD


def test_messages_may_stand_a_line(tmp_path):
    for messages in (MESSAGES, SPOKEN, PARTS):
        text = "\n".join(map(json.dumps, messages))
        for name in ("turns.jsonl", "turns", "turns.md"):
            assert read_turns(write(tmp_path, text, name)) == HEARD


def test_a_conversation_may_go_on_in_further_lines_but_no_other_may_begin(tmp_path):
    first, rest = {"messages": MESSAGES[:2]}, {"messages": MESSAGES[2:]}
    text = f"{json.dumps(first)}\n{json.dumps(rest)}\n"
    assert read_turns(write(tmp_path, text, "a.jsonl")) == HEARD
    ended = {"messages": MESSAGES[1:3]}
    text = f"{json.dumps(ended)}\n"
    turns = read_turns(write(tmp_path, f'{text}{{"user": "b"}}', "b.jsonl"))
    assert turns == Turns([UserTurn("How?", answer="So."), UserTurn("b")])
    path = write(tmp_path, f"{text}{json.dumps({'messages': MESSAGES[1:2]})}", "b.jsonl")
    with pytest.raises(DocumentError, match=r"b\.jsonl:2:1: another conversation begins here"):
        read_turns(path)


IMAGE = {"type": "image_url", "image_url": {"url": "a"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "a"}}


def test_what_is_no_text_is_refused_by_its_name(tmp_path):
    for message, said in [
        (
            {"role": "assistant", "content": None, "tool_calls": [{}]},
            "`tool_calls`; kvtool reads me",
        ),
        (
            {"role": "assistant", "content": "", "function_call": {"name": "f"}},
            "`function_call`; kvtool",
        ),
        ({"role": "tool", "content": "4", "tool_call_id": "x"}, "`content`, `tool_call_id`"),
        ({"role": "tool", "content": "4"}, "no role `tool`; choose one of"),
        ({"from": "function_call", "value": "4"}, "no from `function_call`; choose one of"),
        ({"role": "user", "content": [IMAGE]}, "a part of the type `image_url` is no text"),
        ({"role": "user", "content": ["What?", SOUND]}, "type `input_audio` is no text"),
        ({"role": "user", "content": [{"type": "video", "video": "a"}]}, "`video` is no text"),
        ({"role": "user", "content": [{"type": "file"}]}, "`file` is no text"),
        ({"role": "user", "content": [{"type": "thing"}]}, "`thing` is no text"),
        ({"role": "user", "content": "a", "images": ["a.png"]}, "`content`, `images`"),
        ({"role": "user", "content": [3]}, "a turn is text, or a list of texts, got `3`"),
        (
            {"messages": [{"role": "user", "content": "a"}], "tools": [{}]},
            "unknown key `tools`",
        ),
        ({"user": "a", "images": ["a"]}, "got `user`, `images`"),
        ({"content": "a"}, "a message has `role` and `content`"),
    ]:
        path = write(tmp_path, f'{{"user": "a"}}\n{json.dumps(message)}\n', "a.jsonl")
        with pytest.raises(DocumentError) as caught:
            read_turns(path)
        (problem,) = caught.value.problems
        assert str(problem).startswith(f"{path}:2:1: ")
        assert said in str(problem)


def test_a_key_that_is_given_twice_is_refused(tmp_path):
    path = write(tmp_path, '{"user": "a"}\n{"user": "b", "user": "c"}\n', "a.jsonl")
    with pytest.raises(DocumentError, match=r"a\.jsonl:2:1: key `user` is given twice"):
        read_turns(path)
