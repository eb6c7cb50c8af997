"""Files of many prompts, and the file of their answers."""

import json

import pytest

from kvtool.documents.asked import AnswerLine, AnswersFile, make_prompts, read_prompts
from kvtool.documents.problems import DocumentError
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
