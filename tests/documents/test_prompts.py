"""Files of many prompts, and the file of their answers."""

import json

import pytest

from kvtool.documents.messages import Message
from kvtool.documents.prompts import (
    AnswerLine,
    AnswersFile,
    PromptEntry,
    make_prompts,
    read_prompts,
)
from kvtool.documents.tree import DocumentError
from kvtool.errors import UsageError


def answer(index: int) -> AnswerLine:
    return AnswerLine(
        index=index, id=None, text="a\u2028b", token_ids=[1], prompt_tokens=3, new_tokens=1
    )


def test_lines_are_objects_or_texts(tmp_path):
    path = tmp_path / "prompts"
    path.write_text('"one"\n\n{"prompt": "two", "id": 7, "max_new_tokens": 3}\r\n"thr\\nee"')
    found = read_prompts(str(path))
    assert [each.prompt for each in found] == ["one", "two", "thr\nee"]
    assert (found[1].id, found[1].max_new_tokens) == (7, 3)
    assert make_prompts(["one", {"prompt": "two", "id": 7, "max_new_tokens": 3}]) == found[:2]


def test_every_bad_line_is_told_with_its_number(tmp_path):
    path = tmp_path / "bad.jsonl"
    lines = ['"fine"', "{", '{"promt": "a"}', '" "', '{"prompt": "a", "max_new_tokens": 0}', "3"]
    path.write_text("\n".join(lines))
    with pytest.raises(DocumentError) as caught:
        read_prompts(str(path))
    assert [problem.mark.line for problem in caught.value.problems] == [2, 3, 4, 5, 6]
    assert "the prompt is empty" in str(caught.value.problems[2])
    path.write_text("\n")
    with pytest.raises(UsageError, match="holds no prompt"):
        read_prompts(str(path))


def test_a_file_of_answers_grows_and_is_put_in_order(tmp_path):
    path = tmp_path / "a.jsonl"
    first = AnswersFile(path)
    with first.opened():
        first.append(answer(2))
        first.append(answer(0))
        with pytest.raises(UsageError, match="another run is writing"), AnswersFile(path).opened():
            pass
    with path.open("a") as file:
        file.write(answer(1).to_line()[:20])  # a run that was killed while it wrote
    again = AnswersFile(path)
    with again.opened():
        assert sorted(again.answers) == [0, 2]
        again.append(answer(1))
        again.put_in_order()
    assert path.read_text(encoding="utf-8").split("\n")[:-1] == [
        answer(index).to_line()[:-1] for index in (0, 1, 2)
    ]


def test_what_holds_something_else_is_left_alone(tmp_path):
    path = tmp_path / "notes.jsonl"
    path.write_text(json.dumps({"index": 0}) + "\n")
    told = r"notes\.jsonl:1 is not the answer to a prompt"
    with pytest.raises(UsageError, match=told), AnswersFile(path).opened():
        pass
    assert path.read_text() == '{"index": 0}\n'


TALK = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "How"}, {"type": "text", "text": "?"}]},
    {"role": "assistant", "content": "So.", "tool_calls": None, "refusal": None},
    {"role": "user", "content": "Why?"},
]
SHARED = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "How?"},
    {"from": "gpt", "value": "So."},
    {"from": "human", "value": "Why?"},
]
SAID = (
    Message("system", "Be brief."),
    Message("user", "How?"),
    Message("assistant", "So."),
    Message("user", "Why?"),
)


def test_a_prompt_may_be_a_conversation(tmp_path):
    lines = [
        {"messages": TALK, "id": "a", "max_new_tokens": 3, "tools": []},
        {"id": 1, "conversations": SHARED},
        {"prompt": "one"},
    ]
    path = tmp_path / "prompts.jsonl"
    found = make_prompts(lines)
    for text in (json.dumps(lines, indent=2), "\n".join(map(json.dumps, lines))):
        path.write_text(text)
        assert read_prompts(str(path)) == found
    assert [each.messages for each in found] == [SAID, SAID, None]
    assert [(each.id, each.max_new_tokens) for each in found] == [("a", 3), (1, None), (None, None)]
    assert (found[0].prompt, found[2].prompt) == (None, "one")


def test_what_is_no_prompt_is_told_with_its_line(tmp_path):
    for line, said in [
        ('{"messages": []}', "`messages` is a list of messages, got a list"),
        (
            '{"messages": [{"role": "user", "content": "a"}], "tools": [{"a": 1}]}',
            "unknown key `tools`",
        ),
        ('{"messages": [{"role": "user", "content": "a"}], "prompt": "b"}', "key `prompt` beside"),
        ('{"messages": [{"role": "user", "content": "a"}], "id": 1.5}', "id.str: must be"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "no message to answer: the last"),
        ('{"messages": ["a"]}', "message 0: a message has `role` and `content`, got `a`"),
        ('{"conversations": [{"from": "observation", "value": "3"}]}', "no from `observation`"),
        ('{"prompt": "a", "prompt": "b"}', "key `prompt` is given twice"),
        ('{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "key `content` is"),
        ("{}", "prompt: is required"),
    ]:
        path = tmp_path / "bad.jsonl"
        path.write_text(f'"fine"\n{line}\n')
        with pytest.raises(DocumentError) as caught:
            read_prompts(str(path))
        (problem,) = caught.value.problems
        assert str(problem).startswith(f"{path}:2:1: ")
        assert said in str(problem)


def test_an_id_that_is_given_twice_is_refused(tmp_path):
    lines = [{"prompt": "a", "id": 1}, {"prompt": "b", "id": "1"}, {"prompt": "c", "id": 1}]
    path = tmp_path / "twice.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)))
    with pytest.raises(DocumentError) as caught:
        read_prompts(str(path))
    (problem,) = caught.value.problems
    assert str(problem) == f"{path}:5:1: id `1` is given twice, first in line 1"
    assert len(make_prompts(lines[:2])) == 2
    with pytest.raises(UsageError, match="prompt 2: id `1` is given twice"):
        make_prompts(lines)


def test_a_line_that_is_no_prompt_may_be_kept_with_what_is_wrong_with_it(tmp_path):
    path = tmp_path / "bad.jsonl"
    lines = ['{"prompt": "a", "id": 1}', '{"prompt":', '{"prompt": "b", "id": 1}', '"c"', "3"]
    path.write_text("\n".join(lines))
    found = read_prompts(str(path), keep_bad=True)
    assert [each.prompt for each in found] == ["a", None, None, "c", None]
    assert [each.bad is None for each in found] == [True, False, False, True, False]
    assert found[1].bad.startswith(f"{path}:2:11: is not JSON")
    assert found[2].bad == f"{path}:3:1: id `1` is given twice, first in line 1"
    with pytest.raises(DocumentError) as caught:
        read_prompts(str(path))
    assert [problem.mark.line for problem in caught.value.problems] == [2, 3, 5]
    found = make_prompts([{"prompt": "a", "id": 1}, 3, {"prompt": "b", "id": 1}], keep_bad=True)
    assert [each.bad is None for each in found] == [True, False, False]
    assert found[2].bad == "prompt 2: id `1` is given twice, first in prompt 0"


def test_a_line_has_tokens_or_an_error():
    assert "error" not in json.loads(answer(0).to_line())
    bad = AnswerLine.of_bad(3, PromptEntry(id="x"), "no text")
    assert json.loads(bad.to_line()) == {
        "index": 3,
        "id": "x",
        "text": "",
        "token_ids": [],
        "prompt_tokens": 0,
        "new_tokens": 0,
        "error": "no text",
    }
    with pytest.raises(ValueError, match="holds no token"):
        AnswerLine(index=0, id=None, text="", token_ids=[], prompt_tokens=3, new_tokens=0)


def test_an_error_in_a_file_of_answers_is_no_answer(tmp_path):
    path = tmp_path / "a.jsonl"
    bad = AnswerLine.of_bad(0, PromptEntry(), "no text")
    path.write_text(bad.to_line() + answer(1).to_line() + answer(0).to_line())
    file = AnswersFile(path)
    with file.opened():
        assert file.answers == {0: answer(0), 1: answer(1)}
        file.put_in_order()
    assert path.read_text(encoding="utf-8") == answer(0).to_line() + answer(1).to_line()
