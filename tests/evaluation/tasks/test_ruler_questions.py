"""Question answering from a local file in the form of SQuAD or of HotpotQA."""

import json

import pytest

from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.samples.fit import needed_tokens
from tests.evaluation.tasks.drawing import draw, make, score
from tests.evaluation.tokenizers import WORDS


def squad():
    """Three articles of four paragraphs; the second question of each has no answer."""
    articles = []
    for article in range(3):
        paragraphs = []
        for number in range(4):
            name = f"subject{article}{number}"
            context = f"{name} is about thing{article}. " + f"It says word{article}{number}. " * 5
            answers = [f"word{article}{number}", f"the word{article}{number}"]
            asked = {
                "question": f"What does {name} say?",
                "answers": [{"text": text} for text in (*answers, answers[0])],
                "is_impossible": False,
            }
            unanswered = {"question": "Why?", "answers": [], "is_impossible": True}
            paragraphs.append({"context": context, "qas": [asked, unanswered]})
        articles.append({"title": f"thing{article}", "paragraphs": paragraphs})
    return {"version": "v2.0", "data": articles}


def hotpot():
    """Four questions, each with two supporting paragraphs and three others."""
    rows = []
    for number in range(4):
        context = [
            [f"Title{number}{kind}", [f"Sentence {number}{kind} one.", " And two." * 5]]
            for kind in "abcde"
        ]
        rows.append(
            {
                "question": f"Which is number {number}?",
                "answer": f"{number}d",
                "context": context,
                "supporting_facts": [[f"Title{number}d", 0], [f"Title{number}b", 1]],
            }
        )
    return rows


@pytest.fixture
def files(tmp_path):
    for name, value in {"qa_1": squad(), "qa_2": hotpot()}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    return {f"ruler/{name}": str(tmp_path / f"{name}.json") for name in ("qa_1", "qa_2")}


def documents(sample):
    """The paragraphs of a context, without their numbers."""
    parts = sample.context.split("\n\n")
    assert [part.partition("\n")[0] for part in parts] == [
        f"Document {number}:" for number in range(1, len(parts) + 1)
    ]
    return [part.partition("\n")[2] for part in parts]


def test_the_right_paragraph_comes_with_others_of_its_article_first(files):
    places = set()
    for sample in draw("ruler/qa_1", WORDS, lengths=165, samples=12, data=files["ruler/qa_1"]):
        subject = sample.turns[0].question.split()[-2]
        shown = documents(sample)
        assert len(shown) == len(set(shown)) == 5  # its article has four
        (place,) = [i for i, text in enumerate(shown) if text.startswith(subject)]
        places.add(place)
        article = [text for text in shown if f"thing{subject[-2]}." in text]
        assert len(article) == 4
        assert sample.turns[0].references == (f"word{subject[-2:]}", f"the word{subject[-2:]}")
        assert sample.turns[0].max_new_tokens == 32
    assert len(places) > 2


def test_all_supporting_paragraphs_are_there_even_without_distractors(files):
    data = files["ruler/qa_2"]
    least = 2 * (2 + 1 + 3 + 10) + 15 + 5 + 32  # documents, instruction and question, new tokens
    samples = draw("ruler/qa_2", WORDS, lengths=[least, 119], samples=4, data=data)
    for sample in samples:
        number = sample.turns[0].references[0][0]
        titles = [text.partition("\n")[0] for text in documents(sample)]
        assert {f"Title{number}b", f"Title{number}d"} <= set(titles)
        own = [title for title in titles if title.startswith(f"Title{number}")]
        assert len(own) == min(len(titles), 5)
    assert [len(documents(sample)) for sample in samples] == [2] * 4 + [4] * 4


@pytest.mark.parametrize("name", ["ruler/qa_1", "ruler/qa_2"])
def test_samples_fill_their_length_to_a_paragraph(files, name):
    for length in (120, 180):
        for sample in draw(name, WORDS, lengths=length, samples=4, data=files[name]):
            assert length - 24 <= needed_tokens(sample, WORDS) <= length


@pytest.mark.parametrize("name", ["ruler/qa_1", "ruler/qa_2"])
def test_a_sample_does_not_depend_on_what_else_is_drawn(files, name):
    few = draw(name, WORDS, lengths=120, samples=2, data=files[name])
    many = draw(name, WORDS, lengths=[150, 120], samples=4, data=files[name])
    assert many[4:6] == few
    asked = [sample.turns[0].question for sample in many]
    assert asked[:4] == asked[4:]
    assert len(set(asked)) == 4


def test_any_right_answer_is_enough(files):
    task = make("ruler/qa_1", lengths=150, samples=1, data=files["ruler/qa_1"])
    (sample,) = task.draw(WORDS)
    first, second = sample.turns[0].references
    for prediction, value in [(f" {first}.", 100), (second.upper(), 100), ("word", 0), ("", 0)]:
        assert score(task, sample, prediction) == {"string_match_part": value}


def test_refuses_what_the_file_cannot_give(files):
    squad_file, hotpot_file = files.values()
    with pytest.raises(UsageError, match=r"13 samples, but `.*` has only 12 questions"):
        draw("ruler/qa_1", WORDS, lengths=150, samples=13, data=squad_file)
    with pytest.raises(UsageError, match=r"has paragraphs for only \d+ tokens, length 5000"):
        draw("ruler/qa_1", WORDS, lengths=5000, samples=1, data=squad_file)
    with pytest.raises(UsageError, match="qa_1: length 60 is too short, a sample takes"):
        draw("ruler/qa_1", WORDS, lengths=60, samples=1, data=squad_file)
    with pytest.raises(KvtoolError, match=r"qa_1: `.*` has not the form of dev-v2.0.json of SQuAD"):
        draw("ruler/qa_1", WORDS, samples=1, data=hotpot_file)
    with pytest.raises(KvtoolError, match=r"qa_2: `.*` has not the form of hotpot_dev_distractor"):
        draw("ruler/qa_2", WORDS, samples=1, data=squad_file)


def test_refuses_files_without_an_answer_or_support(tmp_path):
    file = tmp_path / "qa.json"
    file.write_text('{"data": []}')
    with pytest.raises(KvtoolError, match="has only 0 questions with an answer"):
        draw("ruler/qa_1", WORDS, samples=1, data=str(file))
    rows = hotpot()[:1]
    rows[0]["supporting_facts"] = [["Elsewhere", 0]]
    file.write_text(json.dumps(rows))
    with pytest.raises(KvtoolError, match="no supporting paragraph for `Which is number 0"):
        draw("ruler/qa_2", WORDS, samples=1, data=str(file))
