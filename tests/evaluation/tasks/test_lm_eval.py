"""Tasks of the lm-evaluation-harness: its prompts, its scores, our caches."""

import json
import math
import re
from typing import ClassVar

import pytest

import kvtool
from kvtool.documents.settings import Protocol
from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.bench.bench import Bench
from kvtool.evaluation.samples.sample import Sample, TokenCounter
from kvtool.evaluation.tasks import lm_eval as lm_eval_tasks
from kvtool.evaluation.tasks.lm_eval import LmEval
from kvtool.evaluation.tasks.table import expand, task_class
from kvtool.models.load import load
from kvtool.models.reference.tasks import needle_prompt
from tests.evaluation.variants import make_variants
from tests.tiers import first

lm_eval = pytest.importorskip("lm_eval")

DOCUMENTS = 4
HEAD = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder}/needles.jsonl}}
  cache_dir: {folder}/cache
test_split: test
"""
TASKS = {
    "needle_said": """\
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["."], max_gen_toks: 12, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
filter_list:
  - {name: stripped, filter: [{function: remove_whitespace}, {function: take_first}]}
  - {name: first-two, filter: [{function: regex, regex_pattern: "^ (..)"}, {function: take_first}]}
metadata: {version: 2.5}
""",
    "needle_chosen": """\
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
target_delimiter: " "
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
metadata: {version: 0}
""",
    "needle_judged": """\
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: [" no", " yes"]
doc_to_target: judged
metric_list:
  - {metric: f1}
  - {metric: mcc}
  - {metric: acc}
""",
    "needle_read": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
metadata: {version: 1.0}
""",
    "needle_last": """\
output_type: loglikelihood
doc_to_text: "{{prompt}}"
doc_to_target: " {{answer}}"
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "needle_shots": """\
output_type: generate_until
fewshot_split: test
doc_to_text: "Question: {{key}}\\nAnswer:"
doc_to_target: "{{answer}}"
num_fewshot: 2
metric_list:
  - {metric: bleu}
""",
    "needle_measured": """\
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
process_results: !function measured.results
metric_list:
  - {metric: length, aggregation: mean, higher_is_better: true}
""",
    "needle_unsafe": """\
output_type: generate_until
unsafe_code: true
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
""",
    "needle_seen": """\
output_type: generate_until
doc_to_image: picture
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
""",
}

MEASURED = """\
def results(doc, responses):
    print("noise")
    return {"characters": len(responses[0]), "right": responses[0] == doc["answer"]}
"""


def documents(count: int = DOCUMENTS) -> list[dict]:
    """Needle questions of the reference model, each with three wrong answers beside the right."""
    answers, made = [], []
    for seed in range(count):
        prompt, answer = needle_prompt(tokens=100, seed=seed)
        answers.append(answer.strip())
        made.append({"prompt": prompt, "key": f"key {seed}", "answer": answer.strip()})
    for i, made_of in enumerate(made):
        wrong = [answer[::-1] + str(i) for answer in answers if answer != answers[i]]
        choices = [*wrong[:i], answers[i], *wrong[i:]]
        text = made_of["prompt"] + " " + answers[i] + "."
        made_of |= {"choices": choices, "gold": i, "text": text, "judged": i % 2}
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    write_data(folder, documents())
    for name, body in TASKS.items():
        text = HEAD.format(name=name, folder=folder) + body
        (folder / f"{name}.yaml").write_text(text)
    (folder / "measured.py").write_text(MEASURED)
    (folder / "group.yaml").write_text("group: needles\ntask: [needle_said, needle_chosen]\n")
    return folder


def write_data(folder, made: list[dict]) -> None:
    lines = "".join(json.dumps(document) + "\n" for document in made)
    (folder / "needles.jsonl").write_text(lines)


@pytest.fixture(scope="module")
def loaded():
    loaded = load()
    kvtool.attach(loaded.model)
    return loaded


def task_of(folder, name: str, **settings) -> LmEval:
    return LmEval(name=f"lm-eval/{name}", include_path=str(folder), **settings)


def draw(task: LmEval) -> list[Sample]:
    return list(task.draw(TokenCounter(encode=list, decode=str)))


class Knowing:
    """A substitute for a model that gives the answers it is made with."""

    def __init__(self, say=lambda prompt: "", likely=lambda text: (0.0, False)) -> None:
        self.say, self.likely = say, likely
        self.asked: list[tuple] = []

    def generate(self, prompt, *, max_new_tokens, stop=(), temperature=0.0):
        self.asked.append((prompt, max_new_tokens, stop, temperature))
        return self.say(prompt)

    def loglikelihood(self, context, continuation):
        self.asked.append((context, continuation))
        return self.likely(continuation)

    def rolling(self, text):
        self.asked.append((text,))
        return -float(len(text))


def run(task: LmEval, bench) -> list[dict]:
    """Records as they come back from a file."""
    return [json.loads(json.dumps(task.run(bench, sample))) for sample in draw(task)]


# ---- under caches


@pytest.mark.parametrize("name", first(1, ["needle_said", "needle_chosen", "needle_read"]))
def test_a_tiny_budget_costs_every_kind_of_task_its_score(folder, loaded, name):
    count = 1 if name == "needle_read" else DOCUMENTS
    task = task_of(folder, name, samples=count)
    score = {}
    for variant in make_variants(["h2o"], ["12", "500"]):
        summary = task.summarise(run(task, Bench(loaded, variant, Protocol())))
        score[variant.name] = summary.metrics["score"]
    full, tiny, ample = score["full"], score["h2o@12"], score["h2o@500"]
    assert full.n == tiny.n == count
    assert ample.value == pytest.approx(full.value, rel=1e-4)
    if task.best:
        assert full.value == 1.0
        assert tiny.value <= 0.75
    else:
        assert tiny.value > 1.05 * full.value


@pytest.mark.exhaustive
def test_a_full_cache_scores_what_the_harness_measures_with_its_own_model(folder, loaded):
    """The harness' own model class, on the same weights without kvtool's attention."""
    from lm_eval.models.huggingface import HFLM

    plain = load()
    (variant,) = make_variants(["full"], [])
    for name in ("needle_said", "needle_chosen", "needle_last", "needle_read"):
        model = HFLM(
            pretrained=plain.model,
            tokenizer=plain.tokenizer,
            batch_size=1,
            add_bos_token=name != "needle_read",  # a text whose likelihood is wanted has one anyway
        )
        theirs = lm_eval.simple_evaluate(
            model=model, tasks=[name], task_manager=manager(folder), bootstrap_iters=0, limit=2
        )["results"][name]
        task = task_of(folder, name, samples=2)
        ours = task.summarise(run(task, Bench(loaded, variant, Protocol()))).metrics
        for metric, statistic in ours.items():
            if metric != "score":
                assert statistic.value == pytest.approx(theirs[metric], rel=1e-4), metric


def manager(folder):
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(folder), include_defaults=False)


# ---- requests and scores


def test_requests_say_all_that_answering_needs(folder):
    made = documents()
    said = draw(task_of(folder, "needle_said"))
    assert [sample.id for sample in said] == ["0", "1", "2", "3"]
    assert said[1].facts["requests"] == [
        {
            "type": "generate_until",
            "context": made[1]["prompt"],
            "until": ["."],
            "max_new_tokens": 12,
            "temperature": 0.0,
        }
    ]
    assert said[1].facts["task_version"] == "2.5"
    chosen = draw(task_of(folder, "needle_chosen", samples=2))
    assert [sample.id for sample in chosen] == ["0", "1"]
    assert [request["continuation"] for request in chosen[1].facts["requests"]] == [
        f" {choice}" for choice in made[1]["choices"]
    ]
    read = draw(task_of(folder, "needle_read"))[3].facts["requests"]
    assert read == [{"type": "loglikelihood_rolling", "text": made[3]["text"]}]


def test_answers_end_where_the_task_says(folder):
    task, bench = task_of(folder, "needle_said", samples=1), Knowing()
    run(task, bench)
    assert bench.asked == [(documents()[0]["prompt"], 12, (".",), 0.0)]


def test_right_answers_score_one_and_wrong_ones_nothing(folder):
    answers = {made["prompt"]: made["answer"] for made in documents()}
    task = task_of(folder, "needle_said")
    right = [task.score(record) for record in run(task, Knowing(lambda p: f" {answers[p]}"))]
    # the second filter keeps two digits, which are not the answer
    assert (
        right
        == [{"score": 1.0, "exact_match,stripped": 1.0, "exact_match,first-two": 0.0}] * DOCUMENTS
    )
    wrong = [task.score(record) for record in run(task, Knowing(lambda p: " 99"))]
    assert {score["exact_match,stripped"] for score in wrong} == {0.0}

    golds = {f" {made['answer']}" for made in documents()}
    task = task_of(folder, "needle_chosen")
    likes = {True: lambda text: (-1.0 * (text not in golds), text in golds)}
    likes[False] = lambda text: (-1.0 * (text in golds), False)
    for right, likely in likes.items():
        records = run(task, Knowing(likely=likely))
        assert task.score(records[2])["acc,none"] == float(right)
        metrics = task.summarise(records).metrics
        assert metrics["score"] == metrics["acc,none"]
        assert (metrics["acc,none"].value, metrics["acc,none"].stderr) == (float(right), 0.0)


def test_perplexities_weigh_documents_by_their_words(folder):
    # the substitute gives every character -1: exp(characters / words) over all, not a mean over
    # texts
    task = task_of(folder, "needle_read")
    metrics = task.summarise(run(task, Knowing())).metrics
    texts = [made["text"] for made in documents()]
    characters, words = sum(map(len, texts)), sum(len(re.split(r"\s+", text)) for text in texts)
    assert metrics["word_perplexity,none"].value == pytest.approx(math.exp(characters / words))
    assert metrics["bits_per_byte,none"].value == pytest.approx(1 / math.log(2))
    assert metrics["score"] == metrics["word_perplexity,none"]
    assert task.lower_is_better
    assert task.best is None


def test_a_mean_over_documents_says_what_each_gives_to_it_and_nothing_else_does(folder):
    answers = {made["prompt"]: made["answer"] for made in documents()[:3]}
    task, perplexity = task_of(folder, "needle_said"), task_of(folder, "needle_read")
    summary = task.summarise(run(task, Knowing(lambda prompt: f" {answers.get(prompt, 99)}")))
    assert summary.parts == [(1.0, 1.0)] * 3 + [(0.0, 1.0)] * (DOCUMENTS - 3)
    assert summary.metrics["score"].value == 3 / DOCUMENTS
    assert perplexity.summarise(run(perplexity, Knowing())).parts == []


RULED = ["needle_said", "needle_chosen", "needle_judged", "needle_last", "needle_shots"]


def test_the_harness_itself_gets_the_same_scores_and_errors_from_the_same_answers(folder):
    """Every prompt, every metric and every standard error, with a model that answers by rule."""
    from lm_eval.api.model import LM

    def say(prompt):
        return f" {sum(map(ord, prompt)) % 7}13 4"

    def likely(text):
        return -float(sum(map(ord, text)) % 11), len(text) % 2 == 0

    class Ruled(LM):
        prompts: ClassVar[list] = []

        def generate_until(self, requests, disable_tqdm=False):
            self.prompts.extend(request.args[0] for request in requests)
            return [say(request.args[0]) for request in requests]

        def loglikelihood(self, requests, disable_tqdm=False):
            self.prompts.extend(request.args[0] for request in requests)
            return [likely(request.args[1]) for request in requests]

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            raise NotImplementedError

    model = Ruled()
    with lm_eval_tasks.contained():
        theirs = lm_eval.simple_evaluate(
            model=model, tasks=RULED, task_manager=manager(folder), bootstrap_iters=100
        )["results"]
    bench = Knowing(say, likely)
    for name in RULED:
        task = task_of(folder, name)
        ours = task.summarise(run(task, bench)).metrics
        named = {metric: value for metric, value in ours.items() if metric != "score"}
        assert named
        for metric, statistic in named.items():
            assert statistic.value == pytest.approx(theirs[name][metric]), (name, metric)
            kind, pipeline = metric.split(",")
            stderr = theirs[name][f"{kind}_stderr,{pipeline}"]
            assert statistic.stderr == (None if stderr == "N/A" else pytest.approx(stderr))
    assert sorted(asked[0] for asked in bench.asked) == sorted(model.prompts)


def test_metrics_that_need_several_documents_are_left_to_all_of_them(folder):
    task = task_of(folder, "needle_judged")
    records = run(task, Knowing(likely=lambda text: (len(text) / 9, False)))  # always "yes"
    assert [task.score(record) for record in records[:2]] == [{"acc,none": 0.0}, {"acc,none": 1.0}]
    metrics = task.summarise(records).metrics
    # 2 of 4 are: precision 1/2, recall 1
    assert metrics["score"].value == metrics["f1,none"].value == pytest.approx(2 / 3)
    # a single "no" has no F1 that means anything, and the run goes on without it
    assert task.summarise(records[:1]).metrics["acc,none"].value == 0.0


def test_a_task_s_own_function_may_name_its_metrics_as_it_likes(folder, capfd):
    task = task_of(folder, "needle_measured")
    records = run(task, Knowing(lambda prompt: "four"))
    named = {"score": 4.0, "characters,none": 4.0, "right,none": 0.0}
    assert task.score(records[0]) == named
    metrics = task.summarise(records).metrics
    assert {name: statistic.value for name, statistic in metrics.items()} == named
    assert capfd.readouterr().out == ""


def test_examples_come_in_front_of_the_question(folder):
    def contexts(**settings):
        return [
            sample.facts["requests"][0]["context"]
            for sample in draw(task_of(folder, "needle_shots", **settings))
        ]

    own = contexts()
    assert [context.count("Question:") for context in own] == [3] * DOCUMENTS
    assert own[0].endswith("Question: key 0\nAnswer:")
    assert "Question: key 0\n" not in own[0][:-30]
    assert [context.count("Question:") for context in contexts(fewshot=1)] == [2] * DOCUMENTS
    assert contexts(fewshot=0)[2] == "Question: key 2\nAnswer:"
    assert contexts(samples=2) == own[:2]
    assert contexts(seed=1) != own


def test_protocol_names_versions_and_the_headline(folder):
    protocol = task_of(folder, "needle_said").protocol
    assert protocol.startswith("lm-eval 0.")
    assert protocol.endswith(", task version 2.5, exact_match,stripped")
    assert not task_of(folder, "needle_said").lower_is_better


def test_names_behind_the_prefix_are_tasks_without_being_listed():
    assert expand("lm-eval/gsm8k") == ["lm-eval/gsm8k"]
    assert task_class("lm-eval/gsm8k") is LmEval
    assert LmEval.extra == "lm-eval"


def test_nothing_is_printed_and_the_random_state_is_left_alone(folder, capfd):
    import random

    state = random.getstate()
    lm_eval_tasks.prepare.cache_clear()
    task = task_of(folder, "needle_chosen")
    task.summarise(run(task, Knowing()))
    assert capfd.readouterr() == ("", "")
    assert random.getstate() == state


# ---- refusals


def test_refuses_to_score_documents_that_have_changed(folder):
    task = task_of(folder, "needle_said")
    records = run(task, Knowing(lambda prompt: " 1"))
    made = documents()
    made[2]["answer"] = "12345"
    try:
        write_data(folder, made)
        lm_eval_tasks.prepare.cache_clear()
        assert task.score(records[1])["score"] == 0.0
        with pytest.raises(KvtoolError, match="document 2 is not the one that was answered"):
            task.score(records[2])
        write_data(folder, made[:1])
        lm_eval_tasks.prepare.cache_clear()
        with pytest.raises(KvtoolError, match="document 1 is not the one"):
            task.score(records[1])
    finally:
        write_data(folder, documents())
        lm_eval_tasks.prepare.cache_clear()


@pytest.mark.parametrize(
    ("name", "settings", "message", "hint"),
    [
        ("needle_sad", {}, "has no task `needle_sad`", "did you mean `needle_said`"),
        ("needles", {}, "is a group of tasks", "lm-eval/needle_said,lm-eval/needle_chosen"),
        ("needle_unsafe", {}, "runs code that the model writes", None),
        ("needle_seen", {}, "shows pictures", None),
        ("needle_said", {"include_path": "/no/such"}, "folder `/no/such` does not exist", None),
    ],
)
def test_refuses_what_it_cannot_run(folder, monkeypatch, name, settings, message, hint):
    here = lm_eval_tasks._manager(str(folder))
    monkeypatch.setattr(
        lm_eval_tasks, "_manager", lambda folder: here
    )  # the harness' own takes seconds
    task = LmEval(name=f"lm-eval/{name}", **{"include_path": str(folder), **settings})
    with pytest.raises(UsageError, match=message) as refusal:
        draw(task)
    assert hint is None or hint in refusal.value.hint


@pytest.mark.slow
def test_the_harness_own_tasks_are_known():
    with pytest.raises(UsageError, match="has no task `gsm8q`") as refusal:
        draw(LmEval(name="lm-eval/gsm8q"))
    assert refusal.value.hint == "did you mean `gsm8k`?"
    with pytest.raises(UsageError, match="lm-eval/truthfulqa is a group of tasks") as refusal:
        draw(LmEval(name="lm-eval/truthfulqa"))
    assert "lm-eval/truthfulqa_gen" in refusal.value.hint
    with pytest.raises(UsageError, match="lm-eval/humaneval runs code"):
        draw(LmEval(name="lm-eval/humaneval"))


def test_refuses_examples_for_a_task_that_takes_none(folder):
    added = HEAD.format(name="needle_zero", folder=folder) + TASKS["needle_said"]
    (folder / "needle_zero.yaml").write_text(added + "num_fewshot: 0\n")
    lm_eval_tasks._manager.cache_clear()
    with pytest.raises(UsageError, match="takes no examples, got fewshot 3"):
        draw(task_of(folder, "needle_zero", fewshot=3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{do_sample: true, temperature: 0.7, top_p: 0.9}", "generates with top_p=0.9"),
        ("{num_beams: 10}", "generates with num_beams=10"),
        ("{temperature: 0.5}\nrepeats: 8", "samples 8 answers to a prompt"),
    ],
)
def test_refuses_ways_to_generate_that_it_does_not_have(folder, options, message):
    body = "output_type: generate_until\ndoc_to_text: a\ndoc_to_target: b\n"
    body += f"generation_kwargs: {options}\n"
    name = f"needle_{abs(hash(options))}"
    (folder / f"{name}.yaml").write_text(HEAD.format(name=name, folder=folder) + body)
    lm_eval_tasks._manager.cache_clear()
    with pytest.raises(UsageError, match=message):
        draw(task_of(folder, name))


def test_data_that_are_not_there_are_told_in_one_line(folder):
    body = TASKS["needle_said"].replace("needles", "none")
    text = HEAD.format(name="needle_gone", folder="/no/such/place") + body
    (folder / "needle_gone.yaml").write_text(text)
    lm_eval_tasks._manager.cache_clear()
    with pytest.raises(KvtoolError, match="lm-eval/needle_gone cannot be prepared: ") as failure:
        draw(task_of(folder, "needle_gone"))
    assert "\n" not in str(failure.value)
    assert "must be cached on this machine" in failure.value.hint
