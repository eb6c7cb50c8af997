"""LongBench's tasks from small files in both layouts; what right and wrong answers score."""

import hashlib
import json
import re

import pytest

from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.samples.data import PRESETS, Data
from kvtool.evaluation.tasks.longbench import LongBench, benchmarks, split_prompt
from kvtool.evaluation.tasks.table import TASKS, task_class
from tests.evaluation.tokenizers import WORDS

QA = ["narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"]
SUMMARIES = ["gov_report", "qmsum", "multi_news"]
CODE = ["lcc", "repobench-p"]
FEW_SHOT = ["trec", "triviaqa", "samsum"]
ALL = [*QA, *SUMMARIES, *FEW_SHOT, "passage_count", "passage_retrieval_en", *CODE]
EXTENDED = [task for task in ALL if task not in ("narrativeqa", "musique", "qmsum")]

ANSWERS = {
    **dict.fromkeys([*QA, "triviaqa"], ("William Shakespeare", "Shakespeare")),
    **dict.fromkeys([*SUMMARIES, "samsum"], ("the budget was cut. nobody minded",)),
    **dict.fromkeys(CODE, ("    return total / count",)),
    "trec": ("Human group",),
    "passage_count": ("17",),
    "passage_retrieval_en": ("Paragraph 17",),
}
LIMITS = {  # new tokens and metric, as published
    **dict.fromkeys(["narrativeqa", "qasper"], (128, "qa_f1")),
    "multifieldqa_en": (64, "qa_f1"),
    **dict.fromkeys(["hotpotqa", "2wikimqa", "musique", "triviaqa"], (32, "qa_f1")),
    **dict.fromkeys(SUMMARIES, (512, "rouge_l")),
    "samsum": (128, "rouge_l"),
    "trec": (64, "classification"),
    "passage_count": (32, "count"),
    "passage_retrieval_en": (32, "retrieval"),
    **dict.fromkeys(CODE, (64, "code_sim")),
}
CUES = {
    **dict.fromkeys([*QA, "qmsum"], "Answer:"),
    **dict.fromkeys(["gov_report", "multi_news"], "Summary:"),
    "passage_count": "The final answer is: ",
    "passage_retrieval_en": "The answer is: ",
    **dict.fromkeys(CODE, "Next line of code:\n"),
}
WITHOUT_INPUT = ("gov_report", "multi_news", "lcc", "passage_count")
CONTEXT = "CONTEXT {with} a brace }"
INPUT = "INPUT {0}"


def raw_row(task, **others):
    return {
        "input": INPUT,
        "context": CONTEXT,
        "answers": ANSWERS[task],
        "length": 5000,
        "dataset": task,
        "language": "en",
        "all_classes": ["Human", "Human group", "Date"] if task == "trec" else None,
        "_id": f"{task}-1",
        **others,
    }


def joined_row(task, **others):
    row = raw_row(task, question="QUESTION\n", answer_prefix="Answer:")
    del row["input"], row["_id"]
    return {**row, "task": task, "max_new_tokens": LIMITS[task][0] + 20, **others}


@pytest.fixture
def write(tmp_path):
    """Write rows under a file name and return the folder."""

    def write_rows(name, *rows):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name).write_text(text, "utf-8")
        return str(tmp_path)

    return write_rows


def draw(name, data, **settings):
    task = LongBench(name=name, data=data, **settings)
    return task, list(task.draw(WORDS))


def whole_prompt(sample):
    turn = sample.turns[0]
    return sample.context + turn.question + turn.answer_prefix


def scored(task, sample, prediction):
    """Score an answer from its record, as written to a file and read back."""
    references = list(sample.turns[0].references)
    record = {
        "turns": [{"prediction": prediction, "references": references}],
        "facts": sample.facts,
        "cell": dict(sample.cell),
    }
    return task.score(json.loads(json.dumps(record)))


def test_every_name_in_the_table_is_a_task_here():
    named = {name for name, place in TASKS.items() if place.startswith("longbench:")}
    assert {f"longbench/{task}" for task in ALL} | {
        f"longbench_e/{task}" for task in EXTENDED
    } == named
    assert set(benchmarks()) == set(ALL)
    assert task_class("longbench_e/trec") is LongBench


# ---- raw data


def test_raw_data_are_put_into_words(write):
    for task in ALL:
        made, (sample,) = draw(f"longbench/{task}", write(f"{task}.jsonl", raw_row(task)))
        limit, metric = LIMITS[task]
        turn = sample.turns[0]
        assert sample.id == f"{task}-1"
        assert sample.context.endswith(CONTEXT)
        assert len(sample.context) > len(CONTEXT) + 20  # an instruction comes first
        assert whole_prompt(sample).count(INPUT) == (task not in WITHOUT_INPUT)
        assert INPUT not in sample.context
        assert whole_prompt(sample).endswith(CUES.get(task, INPUT))  # examples end in their cue
        assert sample.cell == {}
        assert "{" not in whole_prompt(sample).replace(CONTEXT, "").replace(INPUT, "")
        assert turn.max_new_tokens == limit
        assert sample.facts["metric"] == metric
        assert turn.references == ANSWERS[task]
        assert made.protocol == sample.facts["protocol"] == "kvtool-wording"


def test_code_is_continued_where_it_ends(write):
    row = raw_row("repobench-p", context="def f():\n", input="    x = 1\n")
    _, (sample,) = draw("longbench/repobench-p", write("repobench-p.jsonl", row))
    assert whole_prompt(sample).endswith("\ndef f():\n    x = 1\nNext line of code:\n")


def test_no_chat_template_goes_around_examples_and_code():
    without = {task for task in ALL if not LongBench(name=f"longbench/{task}").chat}
    assert without == {*FEW_SHOT, *CODE}


def test_only_a_dialogue_summary_ends_with_its_line():
    for task in ALL:
        made = LongBench(name=f"longbench/{task}")
        expected = (("\n",), 1) if task == "samsum" else ((), 0)
        assert (made.stop, made.min_new_tokens) == expected


def test_the_user_may_give_the_prompts(write, tmp_path):
    templates = {"qasper": "{{P}} {context}|{input}|{input} A:", "trec": "{input} {context}"}
    (tmp_path / "mine.json").write_text(json.dumps(templates))
    folder = write("qasper.jsonl", raw_row("qasper"))
    write("trec.jsonl", raw_row("trec"))
    prompts = str(tmp_path / "mine.json")
    made, (sample,) = draw("longbench/qasper", folder, prompts=prompts)
    assert (sample.context, sample.turns[0].question) == (
        "{P} " + CONTEXT,
        f"|{INPUT}|{INPUT} A:",
    )
    assert made.protocol == sample.facts["protocol"] == "user-prompts"
    expected = hashlib.sha256((tmp_path / "mine.json").read_bytes()).hexdigest()
    assert sample.facts["prompts"] == expected
    _, (sample,) = draw("longbench/trec", folder, prompts=prompts)
    assert (sample.context, sample.turns[0].question) == (f"{INPUT} {CONTEXT}", "")


def test_prompts_that_do_not_fit_are_refused(write, tmp_path):
    for content, message in [
        ({"qaspr": "{context}"}, "has no prompt for `qasper`"),
        ({"qasper": "{input}"}, "must have {context} once, and {input}: not enough"),
        ({"qasper": "{context}{context}"}, "must have {context} once, and {input}: too many"),
        ({"qasper": "{context}{question}"}, "once, and {input}: 'question'"),
        ({"qasper": "{context"}, "once, and {input}: expected '}'"),
        (["{context}"], "is no JSON object of a prompt for each task"),
        ({"qasper": 1}, "is no JSON object of a prompt for each task"),
    ]:
        (tmp_path / "mine.json").write_text(json.dumps(content))
        folder = write("qasper.jsonl", raw_row("qasper"))
        with pytest.raises(UsageError, match=re.escape(message)):
            draw("longbench/qasper", folder, prompts=str(tmp_path / "mine.json"))


def test_a_split_prompt_joins_to_the_filled_one():
    template = "{{x}} {input} {context} and {input}"
    before, after = split_prompt(template, INPUT)
    assert before + CONTEXT + after == template.format(context=CONTEXT, input=INPUT)


# ---- joined data


def test_joined_data_are_not_put_into_words_again(write):
    for task in ALL:
        made, (sample,) = draw(f"longbench/{task}", write(f"{task}.jsonl", joined_row(task)))
        assert sample.context == CONTEXT
        assert whole_prompt(sample) == CONTEXT + "QUESTION\nAnswer:"
        assert sample.turns[0].max_new_tokens == LIMITS[task][0]
        assert sample.id == "0"
        assert made.protocol == sample.facts["protocol"] == "official-joined"


def test_the_usual_data_are_the_joined_ones_of_the_hub():
    assert LongBench(name="longbench/qasper").protocol == "official-joined"
    assert LongBench(name="longbench/qasper", data="longbench").protocol == "official-joined"
    assert LongBench(name="longbench/qasper", data="a.jsonl").protocol == "kvtool-wording"


@pytest.mark.parametrize(("suite", "config"), [("longbench", "trec"), ("longbench_e", "trec_e")])
def test_a_dataset_on_the_hub_has_a_configuration_per_task(suite, config, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    hub = tmp_path / "hub"
    hub.mkdir()
    names = ("qasper", "trec", "trec_e")
    for name in names:
        row = joined_row(name.removesuffix("_e"), context=name)
        (hub / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (hub / "README.md").write_text(
        "---\nconfigs:\n"
        + "".join(
            f"- config_name: {name}\n  data_files:\n  - split: test\n    path: {name}.jsonl\n"
            for name in names
        )
        + "---\n"
    )
    monkeypatch.setitem(PRESETS, "longbench", {"hub": str(hub)})
    _, (sample,) = draw(f"{suite}/trec", None)
    assert sample.context == config
    _, (sample,) = draw(f"{suite}/trec", Data(hub=str(hub), config="trec"))
    assert sample.context == "trec"


def test_prompts_for_joined_data_are_refused(write, tmp_path):
    (tmp_path / "mine.json").write_text('{"qasper": "{context}"}')
    folder = write("qasper.jsonl", joined_row("qasper"))
    with pytest.raises(UsageError, match=r"`qasper.jsonl` holds whole prompts"):
        draw("longbench/qasper", folder, prompts=str(tmp_path / "mine.json"))


# ---- LongBench-E


def test_longbench_e_tells_lengths_apart(write):
    for make in [raw_row, joined_row]:
        lengths = [0, 3999, 4000, 7999, 8000, 20_000]
        rows = [make("qasper", length=length, _id=str(length)) for length in lengths]
        folder = write("qasper_e.jsonl", *rows)
        task, samples = draw("longbench_e/qasper", folder)
        buckets = [sample.cell["length_bucket"] for sample in samples]
        assert buckets == ["0-4k", "0-4k", "4-8k", "4-8k", "8k+", "8k+"]
        records = [
            {
                "turns": [{"prediction": answer, "references": ["yes"]}],
                "facts": sample.facts,
                "cell": dict(sample.cell),
            }
            for answer, sample in zip(["yes", "no", "yes", "yes", "no", "no"], samples, strict=True)
        ]
        summary = task.summarise(records)
        values = {cell["length_bucket"]: number.value for cell, number in summary.cells}
        assert values == {"0-4k": 50, "4-8k": 100, "8k+": 0}
        assert summary.metrics["score"].value == summary.metrics["qa_f1"].value == 50


# ---- scores


def test_the_reference_answer_scores_100_and_another_0(write):
    for task in ALL:
        made, (sample,) = draw(f"longbench/{task}", write(f"{task}.jsonl", raw_row(task)))
        metric = LIMITS[task][1]
        assert set(scored(made, sample, "x")) == {"score", metric}
        for reference in ANSWERS[task]:
            right = scored(made, sample, reference)
            assert right["score"] == right[metric] == pytest.approx(100, abs=1e-5)
        for wrong in ("", "~~~", "0"):
            assert scored(made, sample, wrong) == {"score": 0, metric: 0}
        assert made.best == 100


def test_only_the_first_line_of_a_continued_example_counts(write):
    for task in FEW_SHOT:
        made, (sample,) = draw(f"longbench/{task}", write(f"{task}.jsonl", raw_row(task)))
        answer = ANSWERS[task][0]
        assert scored(made, sample, f"\n{answer}\nDate\nmore")["score"] == pytest.approx(
            100, abs=1e-5
        )
        assert scored(made, sample, f"~\n{answer}")["score"] == 0


def test_every_line_of_other_answers_counts(write):
    made, (sample,) = draw("longbench/qasper", write("qasper.jsonl", raw_row("qasper")))
    assert scored(made, sample, "~\nShakespeare")["score"] == 100
    assert scored(made, sample, "Shakespeare\nor not")["score"] == pytest.approx(50)


def test_half_right_answers(write):
    made, (sample,) = draw("longbench/trec", write("trec.jsonl", raw_row("trec")))
    # named: Human (part of the answer, removed), Human group, Date
    assert scored(made, sample, "Human group or Date")["score"] == 50
    assert scored(made, sample, "Human")["score"] == 0
    made, (sample,) = draw("longbench/lcc", write("lcc.jsonl", raw_row("lcc")))
    assert 0 < scored(made, sample, "# mean\n    return total")["score"] < 100


# ---- data


def test_the_first_samples_are_taken(write):
    rows = [raw_row("qasper", _id=str(i)) for i in range(5)]
    folder = write("qasper.jsonl", *rows)
    _, samples = draw("longbench/qasper", folder, samples=2)
    assert [sample.id for sample in samples] == ["0", "1"]
    assert len(draw("longbench/qasper", folder, samples=9)[1]) == 5


def test_a_sample_knows_the_data_it_is_from(write, tmp_path):
    folder = write("trec.jsonl", raw_row("trec"))
    _, (sample,) = draw("longbench/trec", folder)
    expected = hashlib.sha256((tmp_path / "trec.jsonl").read_bytes()).hexdigest()
    assert sample.facts["data"] == expected
    assert sample.facts["all_classes"] == ["Human", "Human group", "Date"]


def test_rows_that_cannot_be_used_are_refused_before_a_run(write):
    for task, change, message in [
        ("qasper", {"answers": []}, "row 1: column `answers` must be a list of texts, got `[]`"),
        ("qasper", {"context": None}, "row 1: `context` holds NoneType, no text"),
        ("trec", {"all_classes": None}, "row 1: column `all_classes` must be a list of texts"),
        ("passage_retrieval_en", {"answers": ["17"]}, "`17` names no paragraph"),
        ("qasper", {"dataset": "trec"}, "longbench/qasper: `qasper.jsonl` holds `trec`"),
    ]:
        folder = write(f"{task}.jsonl", raw_row(task, **change))
        with pytest.raises(KvtoolError, match=re.escape(message)):
            draw(f"longbench/{task}", folder)


def test_a_length_that_is_no_number_is_refused(write):
    folder = write("qasper_e.jsonl", raw_row("qasper", length="long"))
    with pytest.raises(KvtoolError, match="column `length` must be a number, got `long`"):
        draw("longbench_e/qasper", folder)
