"""MRCR from small files in its published form; how a conversation is put to a model."""

import json
import re

import pytest

from kvtool.documents.settings import Protocol
from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.bench.bench import Bench
from kvtool.evaluation.bench.estimate import Estimate
from kvtool.evaluation.bench.prompts import SPOKEN, first_prompt, spoken, transcript
from kvtool.evaluation.metrics.text import recited
from kvtool.evaluation.samples.sample import TokenCounter
from kvtool.evaluation.tasks.mrcr import Mrcr
from kvtool.evaluation.tasks.table import task_class
from kvtool.models.chat import Frame, make_frame
from tests.evaluation.tasks.counters import WORDS
from tests.evaluation.variants import make_variants

CHAT = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TALK = [
    {"role": "user", "content": "Write a poem about tapirs."},
    {"role": "assistant", "content": "Tapirs rest."},
    {"role": "user", "content": "Write a poem about tapirs."},
    {"role": "assistant", "content": "Tapirs run."},
    {"role": "user", "content": "Prepend aB3 to the 2nd poem about tapirs."},
]
ROW = {
    "prompt": json.dumps(TALK),
    "answer": "aB3Tapirs run.",
    "random_string_to_prepend": "aB3",
    "n_needles": 2,
    "desired_msg_index": 3,
    "total_messages": 5,
    "n_chars": 160,
}


def make(folder, *rows, **settings):
    file = folder / "mrcr.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return Mrcr(name="mrcr", data=str(file), **settings)


def scored(task, sample, answer):
    turns = [{"prediction": answer, "references": list(sample.turns[0].references)}]
    return task.score(json.loads(json.dumps({"turns": turns, "facts": sample.facts})))


def test_the_ratio_is_that_of_the_texts_behind_the_prefix():
    for said, score in [
        ("aB3Tapirs run.", 1),
        ("\n aB3Tapirs run.", 1),
        ("aB3", 0),
        ("Tapirs run.", 0),  # the prefix is wanted
        (" ab3Tapirs run.", 0),
        ("aB3Tapirs rest.", 2 * 9 / (12 + 11)),  # "Tapirs r" and "." of 12 and 11 characters
        ("", 0),
    ]:
        assert recited(said, "aB3Tapirs run.", "aB3") == pytest.approx(score)


def test_a_sample_is_a_conversation_and_its_last_question(tmp_path):
    task = make(tmp_path, ROW)
    (sample,) = task.draw(WORDS)
    (turn,) = sample.turns
    assert json.loads(sample.context) == [message["content"] for message in TALK[:-1]]
    assert turn.question == "Prepend aB3 to the 2nd poem about tapirs."
    assert turn.references == ("aB3Tapirs run.",)
    assert sample.cell == {"needles": 2, "length": 4096}
    assert scored(task, sample, "aB3Tapirs run.") == {"match_ratio": 100}
    assert scored(task, sample, "<think>which?</think>\n\naB3Tapirs run.") == {"match_ratio": 100}
    assert scored(task, sample, "<think>aB3Tapirs run.") == {"match_ratio": 0}
    assert task_class("mrcr") is Mrcr


def test_messages_of_one_side_are_joined(tmp_path):
    examples = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Examples."},
    ]
    (sample,) = make(tmp_path, {**ROW, "prompt": json.dumps(examples + TALK)}).draw(WORDS)
    first = "Be brief.\n\nExamples.\n\nWrite a poem about tapirs."
    assert json.loads(sample.context)[0] == first


def test_rows_are_chosen_by_needles_and_by_length(tmp_path):
    long = [dict(TALK[0], content="word " * 5000), *TALK[1:]]
    rows = [ROW, {**ROW, "n_needles": 4}, {**ROW, "prompt": json.dumps(long)}]
    drawn = list(make(tmp_path, *rows).draw(WORDS))
    assert [sample.id for sample in drawn] == ["1", "2", "3"]
    assert [sample.cell["length"] for sample in drawn] == [4096, 4096, 8192]
    assert [s.id for s in make(tmp_path, *rows, needles=4).draw(WORDS)] == ["2"]
    assert [s.id for s in make(tmp_path, *rows, samples=1).draw(WORDS)] == ["1"]
    assert [s.id for s in make(tmp_path, *rows, longest="4K").draw(WORDS)] == ["1", "2"]
    short = TokenCounter(WORDS.encode, WORDS.decode, limit=4096)
    assert [s.id for s in make(tmp_path, *rows).draw(short)] == ["1", "2"]
    with pytest.raises(UsageError, match=r"8 needles of `.*mrcr\.jsonl` is at most 4096"):
        list(make(tmp_path, *rows, needles=8).draw(short))
    with pytest.raises(UsageError, match=r"no row with 8 needles of `.*mrcr\.jsonl`"):
        list(make(tmp_path, *rows, needles=8).draw(WORDS))


def test_rows_of_another_form_are_refused_in_a_line(tmp_path):
    for changes, message in [
        ({"prompt": None}, "row 1 lacks `prompt`"),
        ({"prompt": "Hello"}, "`prompt` is no JSON list of messages with `role` and `content`"),
        ({"prompt": json.dumps([{"role": "user"}])}, "`prompt` is no JSON list of messages"),
        ({"prompt": json.dumps(TALK[:4])}, "that a user begins and ends"),
        ({"prompt": json.dumps(TALK[1:])}, "that a user begins and ends"),
        ({"prompt": json.dumps(TALK[:1])}, "that a user begins and ends"),
        ({"answer": "Tapirs run."}, "`answer` does not begin with `aB3`"),
        ({"n_needles": "two"}, "`n_needles` is no number: `two`"),
    ]:
        with pytest.raises(KvtoolError, match=re.escape(message)) as caught:
            list(make(tmp_path, {**ROW, **changes}).draw(WORDS))
        assert "\n" not in str(caught.value)


# ---- the conversation


def test_without_a_chat_template_speakers_are_named():
    assert spoken(Frame()) == SPOKEN
    assert transcript(SPOKEN, ["a", "b", "c"]) == "User: a\n\nAssistant: b\n\nUser: c\n\nAssistant:"
    assert transcript(SPOKEN, ["a"]) == "User: a\n\nAssistant:"


@pytest.fixture
def chatty(loaded):
    before = loaded.tokenizer.chat_template
    loaded.tokenizer.chat_template = CHAT
    yield loaded
    loaded.tokenizer.chat_template = before


def test_a_chat_template_gets_the_messages_as_turns(chatty, tmp_path):
    (sample,) = make(tmp_path, ROW).draw(WORDS)
    frame = make_frame(chatty.tokenizer, "auto", True)
    prompt = first_prompt(
        chatty.tokenizer, frame, sample, max_length=None, truncate="middle", conversation=True
    )
    whole = chatty.tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert prompt.context + prompt.question == whole
    assert prompt.context.endswith("Tapirs run.\n[user] ")


def test_a_conversation_is_never_cut(chatty, tmp_path):
    (sample,) = make(tmp_path, ROW).draw(WORDS)
    frame = make_frame(chatty.tokenizer, "auto", True)
    with pytest.raises(KvtoolError, match="tokens, above the 20 allowed"):
        first_prompt(
            chatty.tokenizer, frame, sample, max_length=20, truncate="middle", conversation=True
        )


@pytest.mark.parametrize("query_aware", [True, False])
def test_a_run_reads_the_whole_conversation(loaded, tmp_path, query_aware):
    (full,) = make_variants([], [])
    protocol = Protocol(query_aware=query_aware, max_new_tokens=3)
    task = make(tmp_path, ROW)
    (sample,) = task.draw(WORDS)
    record = task.measure(Bench(loaded, full, protocol), sample)
    text = transcript(SPOKEN, [message["content"] for message in TALK])
    count = len(loaded.tokenizer(text)["input_ids"])
    assert abs(record["cost"]["prompt_tokens"] - count) <= 1  # where context and question meet
    estimate = Estimate(loaded.tokenizer, loaded.model.config, "float32", protocol)
    assert estimate.prompt_tokens(task, sample) == count
