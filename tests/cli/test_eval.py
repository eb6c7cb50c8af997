"""`kvtool eval` as a user runs it: results, resuming, rescoring, gates, refusals."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

import kvtool as library
from kvtool.documents.results import ResultsDocument

QUICK = ("-t", "niah", "--lengths", "256", "--depths", "3")
VARIANTS = ("-p", "streaming,h2o(recent=8)+caote", "-b", "32,50%")
TWO = ("-p", "streaming,h2o", "-b", "32")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run under `TWO`, made once."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    recipe = {"kind": "recipe", "policy": ["streaming", "h2o"], "budget": 32}
    task = {"task": "niah", "lengths": [256], "depths": 3}
    library.evaluate(recipe | {"eval": {"tasks": [task]}}, folder)
    return folder


@pytest.fixture
def run(finished, kvtool):
    """A copy of it, `run`, in the folder of the test."""
    shutil.copytree(finished, "run")


def evaluate(kvtool, *arguments, code=0) -> ResultsDocument:
    done = kvtool("eval", "-q", "-f", "json", "--no-plots", *arguments)
    assert (done.code, done.err) == (code, "")
    return ResultsDocument(**json.loads(done.out))


def scores(results) -> dict:
    return {(r.variant, r.task): (r.value, r.n, r.stderr, r.delta) for r in results.results}


@pytest.mark.usefixtures("drawn_pages")
def test_a_run_holds_every_sample_and_its_results(kvtool, tmp_path):
    results = evaluate(kvtool, *QUICK, *VARIANTS, "-o", "runs/first")
    variants = [variant.name for variant in results.variants]
    assert variants == [
        "full",
        "streaming@32",
        "streaming@50%",
        "h2o(recent=8)+caote@32",
        "h2o(recent=8)+caote@50%",
    ]
    assert [(r.variant, r.task, r.n) for r in results.results] == [
        (variant, "niah", 3) for variant in variants
    ]
    assert results.complete
    assert results.of("full", "niah").value == 1.0
    folder = tmp_path / "runs" / "first"
    assert json.loads((folder / "results.json").read_text()) == json.loads(results.to_json()) | {
        "finished": json.loads((folder / "results.json").read_text())["finished"]
    }
    files = sorted((folder / "samples").iterdir())
    assert len(files) == len(variants)
    for file in files:
        records = [json.loads(line) for line in (file / "niah.jsonl").read_text().splitlines()]
        assert [record["cell"]["depth"] for record in records] == [0, 50, 100]
        for record in records:
            turn = record["turns"][0]
            right = turn["references"][0] in turn["prediction"]
            assert record["scores"]["em"] == float(right)
    lock = yaml.safe_load((folder / "recipe.lock.yaml").read_text())
    assert lock["kind"] == "recipe"
    assert lock["eval"]["tasks"][0]["lengths"] == [256]
    page = (folder / "report.html").read_text()
    assert page.startswith("<!")
    assert page.count('role="img"') > 3
    assert results.of("streaming@32", "niah").value < 1
    assert "Wrong answers beside their references" in page
    assert len(results.of("h2o(recent=8)+caote@32", "niah").cost.kept_per_layer) == 4


def test_a_run_without_a_bar_says_how_much_it_is_and_how_far(kvtool):
    done = kvtool(
        "eval", *QUICK, "-p", "h2o", "-b", "32", "--no-progress", "--no-plots", "-f", "text"
    )
    lines = done.err.splitlines()
    assert "3 cells x 1 samples x 2 variants = 6 measurements" in lines
    assert [line for line in lines if line.startswith("measured ")] == [
        f"measured {n}/6: niah length=256 depth={depth}" for n, depth in ((2, 0), (4, 50), (6, 100))
    ]


def test_answers_of_one_token_compare_no_policies(kvtool):
    run = ("-t", "niah", "--lengths", "256", "--depths", "1", "-p", "h2o", "-b", "32")
    run += ("--set", "eval.tasks.0.digits=1", "--no-plots")
    warned = "niah: 100% of the right answers are one token"
    known = kvtool("eval", *run, "-f", "text", "-o", "known")
    assert any(line.startswith(warned) for line in known.err.splitlines())
    assert warned in " ".join(known.out.split())
    assert warned in " ".join((Path("known") / "report.html").read_text().split())
    later = kvtool("eval", *run, "-f", "text", "-o", "later", "--query-agnostic")
    assert later.code == 0
    assert warned not in later.err + " ".join(later.out.split())


def test_right_answers_are_scored(kvtool):
    run = ("-t", "niah,ruler/vt", "--lengths", "256", "--depths", "1", "--samples", "1")
    run += ("-p", "h2o,quest", "-b", "128", "-o", "run", "--answers", "scored")
    done = kvtool("eval", *run, "--no-plots", "-f", "json")
    lines = done.err.splitlines()
    assert "answers are decoded, not scored, of ruler/vt" in lines
    assert "answers are scored token by token under quest@128" in lines
    results = ResultsDocument(**json.loads(done.out))
    names = {metric.name for metric in results.of("h2o@128", "niah").metrics}
    assert names == {"em", "word_set", "nll", "right_tokens"}
    assert {m.name for m in results.of("h2o@128", "ruler/vt").metrics} == {"string_match_all"}
    assert results.of("full", "niah").value == 1.0
    recorded = (Path("run") / "samples" / "full" / "niah.jsonl").read_text().splitlines()
    assert all(json.loads(line)["scores"]["right_tokens"] == 7 for line in recorded)
    assert (
        yaml.safe_load((Path("run") / "recipe.lock.yaml").read_text())["eval"]["answers"]
        == "scored"
    )


def test_bytes_are_those_of_the_tensors(finished):
    results = ResultsDocument(**json.loads((finished / "results.json").read_text()))
    cost, full = results.of("h2o@32", "niah").cost, results.of("full", "niah").cost
    per_token = 4 * 2 * 32 * 2 * 4  # layers heads dim k+v float32
    assert (cost.kept_tokens, cost.kv_bytes) == (32, 32 * per_token)
    assert full.kv_bytes == full.kept_tokens * per_token == full.full_bytes
    assert cost.full_bytes > 200 * per_token
    assert cost.state_bytes == 4 * 2 * 33 * (4 + 4)  # int32 position and float32 sum a slot
    assert cost.prefill_s > 0
    assert cost.decode_tokens_per_s > 0


@pytest.mark.exhaustive
def test_a_kept_question_is_told_everywhere(kvtool):
    flags = ("--query-agnostic", "--keep-question")
    first = evaluate(kvtool, *QUICK, "-p", "h2o", "-b", "32", *flags, "-o", "first")
    assert {result.question for result in first.results} == {"later, kept"}
    again = evaluate(kvtool, "first/recipe.lock.yaml", "-o", "second")
    assert scores(first) == scores(again)
    cut = evaluate(kvtool, *QUICK, "-p", "h2o", "-b", "32", "--query-agnostic", "-o", "third")
    kept, less = (run.of("h2o@32", "niah").cost for run in (first, cut))
    assert kept.kept_tokens > less.kept_tokens == 32  # the question is beside the budget
    page = Path("first/report.html").read_text()
    assert "the question is kept whole beside it" in page
    assert set(first.to_pandas()["question"]) == {"later, kept"}


@pytest.mark.parametrize("given", [(), ("--set", "eval.query_aware=true")])
def test_a_question_that_is_known_cannot_be_kept(kvtool, given):
    done = kvtool("eval", *QUICK, "-p", "h2o", "-b", "32", "--keep-question", *given, "-o", "run")
    assert done.code == 2
    assert "error: --keep-question keeps a question that comes after the context" in done.err
    assert "hint: --query-agnostic --keep-question" in done.err
    assert not Path("run").exists()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("run")
def test_a_second_run_measures_only_what_is_new(kvtool):
    before = Path("run/samples/full/niah.jsonl").read_bytes()
    done = kvtool("eval", *QUICK, "-p", "streaming,tova", "-b", "32", "-o", "run", "--no-plots")
    assert done.code == 0
    assert "resumed 6/9 in run" in done.err
    again = ("-t", "niah", "--lengths", "256", "--depths", "3", "-p", "tova", "-b", "32")
    done = kvtool("eval", *again, "-o", "run", "--no-plots", "--progress")
    assert "resumed 6/6 in run\n" in done.err  # at once, without a bar
    assert "wrote run/results.json" in done.err
    assert Path("run/samples/full/niah.jsonl").read_bytes() == before
    results = evaluate(kvtool, *QUICK, "-p", "tova", "-b", "32", "-o", "run", "--samples", "2")
    assert results.of("tova@32", "niah").n == 6
    assert len(Path("run/samples/tova@32/niah.jsonl").read_text().splitlines()) == 6
    results = evaluate(kvtool, *QUICK, "-p", "tova", "-b", "32", "-o", "run", "--limit", "1")
    assert results.of("tova@32", "niah").n == 1


@pytest.mark.exhaustive
@pytest.mark.usefixtures("run")
def test_overwrite_starts_anew_in_a_run_only(kvtool):
    evaluate(kvtool, *QUICK, "-p", "tova", "-b", "32", "-o", "run", "--overwrite")
    assert sorted(path.name for path in Path("run/samples").iterdir()) == ["full", "tova@32"]
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years of work")
    for flags in ([], ["--overwrite"]):
        done = kvtool("eval", *QUICK, "-p", "tova", "-b", "32", "-o", "mine", *flags)
        assert done.code == 2
        assert "error: folder `mine` holds other files, no run" in done.err
    assert Path("mine/thesis.txt").read_text() == "years of work"


def test_interrupting_keeps_what_is_done(kvtool, monkeypatch):
    from kvtool.evaluation.tasks.task import Task

    measure = Task.measure
    done = []

    def twice(self, bench, sample):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(sample)
        return measure(self, bench, sample)

    monkeypatch.setattr(Task, "measure", twice)
    stopped = kvtool("eval", *QUICK, "-p", "tova", "-b", "32", "-o", "run", "--no-plots")
    assert stopped.code == 130
    results = ResultsDocument(**json.loads(Path("run/results.json").read_text()))
    assert not results.complete
    assert [result.n for result in results.results] == [1, 1]


@pytest.mark.usefixtures("run")
def test_rescoring_needs_no_model_and_sees_changed_answers(kvtool, monkeypatch):
    first = ResultsDocument(**json.loads(Path("run/results.json").read_text()))
    assert first.of("full", "niah").value == 1.0
    monkeypatch.setattr("kvtool.models.attached.load", None)
    monkeypatch.setattr("kvtool.models.attached.load_tokenizer", None)
    same = evaluate(kvtool, "--rescore", "run")
    assert scores(same) == scores(first)
    path = Path("run/samples/full/niah.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["turns"][0]["prediction"] = "I forgot"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    changed = evaluate(kvtool, "--rescore", "run")
    assert changed.of("full", "niah").value == pytest.approx(2 / 3)
    assert json.loads(Path("run/results.json").read_text())["results"][0]["value"] < 1


def test_problems_are_answered_several_times_and_scored_anew(kvtool):
    rows = [{"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"} for n in (1, 2)]
    Path("test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ("--samples", "2", "-s", "eval.tasks.0.max_new_tokens=4", "-o", "run")
    run = ("-t", "gsm8k", "--data", "gsm8k=test.jsonl", *settings)
    (result,) = evaluate(kvtool, *run, "-p", "full").results
    assert (result.metric, result.n, result.query_aware) == ("pass@1", 2, True)
    path = Path("run/samples/full/gsm8k.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [len(line["turns"]) for line in lines] == [2, 2]
    lines[0]["turns"][1]["prediction"] = "<think>1 + 1</think> so #### 2.00"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = evaluate(kvtool, "--rescore", "run").of("full", "gsm8k")
    assert (again.value, again.n, again.stderr) == (25, 2, 25)  # of 50 and 0
    assert "resumed 2/2" in kvtool("eval", *run, "-p", "full", "-f", "json", "--no-plots").err


def test_a_run_is_exported_as_rows_of_the_leaderboard(kvtool):
    run = ("-t", "ruler/niah_single_1", "--lengths", "256", "--samples", "1", "--no-plots")
    done = kvtool("eval", *run, "-p", "streaming", "-b", "32", "-o", "run", "-f", "board")
    head, full, streaming = done.out.splitlines()
    assert head.startswith("dataset,data_dir,model,method,compression_ratio,query_aware,question,")
    assert full.startswith("ruler,256,reference,full,0.0,True,known,")
    assert streaming.startswith("ruler,256,reference,streaming,0.75,")
    again = kvtool("eval", "--rescore", "run", "-f", "board", "--no-plots", "-q")
    assert (again.code, again.out, again.err) == (0, done.out, "")


@pytest.mark.usefixtures("run")
def test_gates_decide_the_exit_code(kvtool):
    run = (*QUICK, "-p", "streaming", "-b", "32", "-o", "run")
    low = evaluate(kvtool, *run, "--fail-under", "niah=0.1")
    assert low.of("streaming@32", "niah").value == pytest.approx(1 / 3)
    assert [gate.passed for gate in low.gates] == [True]
    high = evaluate(kvtool, *run, "--fail-under", "niah=0.9", code=3)
    assert [(gate.variant, gate.passed) for gate in high.gates] == [("streaming@32", False)]
    evaluate(kvtool, *run, "--max-drop", "70")
    evaluate(kvtool, *run, "--max-drop", "60", code=3)
    evaluate(kvtool, "--rescore", "run", "--fail-under", "niah=0.9", code=3)
    done = kvtool("eval", *run, "--fail-under", "niah=90")
    assert done.code == 2
    assert "`niah` is scored from 0 to 1" in done.err


@pytest.mark.usefixtures("run")
def test_a_failed_gate_is_told(kvtool):
    run = (*QUICK, "-p", "streaming", "-b", "32", "-o", "run", "--no-plots")
    done = kvtool("eval", *run, "--fail-under", "niah=0.9", "--max-drop", "60")
    assert done.code == 3
    assert "gate failed: niah, streaming@32: 0.3333, the limit is 0.9\n" in done.err
    worse = "gate failed: niah, streaming@32: 66.67 % worse than full, the limit is 60 %\n"
    assert worse in done.err


def test_rescoring_refuses_what_a_run_has_settled(kvtool):
    Path("run").mkdir()
    done = kvtool("eval", "--rescore", "run", "--seed", "3", "--dry-run", "-t", "niah", "-b", "3")
    assert done.code == 2
    assert "takes a run as it is; leave out --seed, --dry-run, --tasks, --budget\n" in done.err
    done = kvtool("eval", "again.yaml", "--rescore", "run", "-o", "copy")
    assert done.code == 2
    assert "leave out --output, the recipe\n" in done.err


def test_a_failing_sample_is_recorded_and_the_rest_goes_on(kvtool):
    # a quarter of a short prompt is less than what streaming(sinks=60) always keeps
    run = ("-t", "niah", "--lengths", "128,384", "--depths", "1", "-p", "streaming(sinks=60)")
    run = (*run, "-b", "25%", "-o", "run", "--no-plots")
    done = kvtool("eval", *run, "-f", "json")
    assert done.code == 4
    assert "failed: niah, streaming(sinks=60)@25%: " in done.err
    assert "failed samples: 1; `error` in run/samples says why\n" in done.err
    results = ResultsDocument(**json.loads(done.out))
    result = results.of("streaming(sinks=60)@25%", "niah")
    assert (result.failed, result.n) == (1, 1)
    assert results.of("full", "niah").failed == 0
    stopped = kvtool("eval", *run, "--stop-on-error")
    assert stopped.code == 1
    assert "error: niah, sample length=128/depth=50/0, streaming" in stopped.err


@pytest.mark.usefixtures("run")
def test_results_of_another_schema_are_refused(kvtool):
    path = Path("run/results.json")
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 7'))
    for arguments in ([*QUICK, "-p", "tova", "-b", "32", "-o", "run"], ["--rescore", "run"]):
        done = kvtool("eval", *arguments)
        assert done.code == 2
        assert "schema_version 7, not 1" in done.err


def test_every_mistake_of_a_recipe_is_told_at_once(kvtool):
    Path("bad.yaml").write_text(
        "kind: recipe\npolicy: [h2o, snapvk]\nbudgt: 64\neval:\n  limit: 0\n  tasks:\n"
        "  - {task: niah, lenghts: 256}\n  - nia\n  - ppl\n  - ppl\n"
    )
    done = kvtool("eval", "bad.yaml", "--lengths", "1k")
    assert done.code == 2
    told = [line for line in done.err.splitlines() if not line.startswith(" ")]
    places = [line.removeprefix("error: ").partition(": ")[0] for line in told]
    assert places == ["bad.yaml:3:1", "bad.yaml:5:10"]
    done = kvtool("eval", "bad.yaml", "--lengths", "1k", "--unset", "budgt", "-s", "eval.limit=1")
    told = [line for line in done.err.splitlines() if not line.startswith(" ")]
    places = [line.removeprefix("error: ").partition(": ")[0] for line in told]
    lines = ["2:15", "7:18", "8:5"]
    assert places == ["--lengths 1k", *(f"bad.yaml:{place}" for place in lines)]
    done = kvtool("eval", "bad.yaml", "--unset", "budgt", "-s", "eval.limit=1")
    assert "bad.yaml:10:5: eval.tasks.3.task: task `ppl` is given twice" in done.err


def test_a_dry_run_tells_the_work_and_writes_nothing(kvtool):
    done = kvtool("eval", *QUICK, *VARIANTS, "-o", "run", "--dry-run")
    assert done.code == 0
    told = yaml.safe_load(done.out)
    assert told["kind"] == "recipe"
    assert told["work"]["measurements"] == 15
    (task,) = told["work"]["tasks"]
    assert (task["task"], task["samples"]) == ("niah", 3)
    assert not Path("run").exists()


@pytest.mark.exhaustive
def test_a_dry_run_tells_the_bytes_that_the_run_then_holds(kvtool):
    settings = ("-t", "niah", "--lengths", "512", "-L", "1", "--set", "generation.max_new_tokens=1")
    variants = ("-p", "streaming", "-b", "32,50%,17KiB,4K")
    told = yaml.safe_load(kvtool("eval", *settings, *variants, "--dry-run").out)
    (estimate,) = told["work"]["tasks"]
    results = evaluate(kvtool, *settings, *variants, "-o", "run")
    held = {
        variant.name: results.of(variant.name, "niah").cost.kv_bytes for variant in results.variants
    }
    assert estimate["kv_bytes"] == held
    per_token = 4 * 2 * 32 * 2 * 4  # layers heads dim k+v float32
    assert held["full"] == estimate["longest_prompt"] * per_token


def test_a_recipe_with_flags_and_sets_over_it(kvtool):
    Path("mine.yaml").write_text(
        "kind: recipe\nschema_version: 1\nname: mine\npolicy: [streaming, tova]\n"
        "budget: {tokens: [32, 64]}\neval:\n  tasks:\n"
        "    - {task: niah, lengths: [256, 512], depths: 3}\noutput: {dir: here, plots: false}\n"
    )
    results = evaluate(
        kvtool, "mine.yaml", "-p", "h2o", "-s", "budget=48", "-s", "eval.tasks.0.depths=1"
    )
    assert [variant.name for variant in results.variants] == ["full", "h2o@48"]
    assert results.of("full", "niah").n == 2
    assert Path("here/results.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-p", "h2o"], "error: no tasks"),
        (["-t", "niah", "--no-baseline"], "error: no policy to evaluate"),
        (["-t", "niah", "--lengths", "0"], "must be above 0"),
        (["-t", "lm-eval"], "lm-eval/gsm8k"),
        (["-t", "fidelity", "--depths", "3"], "none of these tasks takes --depths"),
        (["-t", "niah", "--data", "niah=x.json"], "takes no data"),
        (["-t", "niah", "--data", "haystack=x.txt", "-p", "h2o"], "x.txt` is neither builtin"),
        (
            ["-t", "ruler/vt", "-p", "h2o", "--answers", "scored"],
            "one right answer that can be fed",
        ),
        (
            [
                *("-t", "niah", "-p", "h2o", "--answers", "scored"),
                "--set",
                "generation.temperature=1",
            ],
            "leave out the temperature",
        ),
        (["-t", "longbench/qasper", "--data", "longbench/qasper=no.jsonl"], "no.jsonl"),
        (["--rescore", "", "-o", "-"], "--rescore: no folder ``"),
        (["-t", ",", "-p", "h2o"], "--tasks is empty"),
        (["-t", "niah", "-p", ""], "--policy is empty"),
        (["-t", "niah", "-p", "h2o", "-b", ""], "--budget is empty"),
        (["-t", "niah", "-o", " "], "--output is empty"),
        (
            ["-t", "niah", "-o", "all.json"],
            "the folder of a run, `all.json` is or looks like a file",
        ),
        (["-t", "niah", "-p", "h2o", "--no-baseline", "--max-drop", "3"], "from the full cache"),
        (["-t", "niah", "--chat-template", "on"], "the tokenizer has no chat template"),
        (["-t", "niah", "-f", "board"], "-f board has RULER's scores in its columns"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_told_in_a_line_before_anything_runs(kvtool, arguments, told):
    output = [] if "-o" in arguments else ["-o", "run"]
    done = kvtool("eval", *output, *arguments)
    assert done.code == 2
    assert told in done.err
    assert "Traceback" not in done.err
    assert done.out == ""
    assert not Path("run").exists()


def test_what_is_named_twice_counts_once(kvtool):
    done = kvtool("eval", "-t", "niah", "--lengths", "256,256", "--depths", "0,50,50", "--dry-run")
    assert yaml.safe_load(done.out)["work"]["tasks"][0]["samples"] == 2


def test_a_missing_extra_is_told_before_the_model_loads(kvtool, monkeypatch):
    monkeypatch.setattr("kvtool.extras.find_spec", lambda name: None)
    monkeypatch.setattr("kvtool.models.attached.load_tokenizer", None)
    done = kvtool("eval", "-t", "reconstruct", "-p", "h2o")
    assert done.code == 2
    assert "pip install 'kvtool[eval]'" in done.err
    done = kvtool("eval", "-t", "niah", "-p", "h2o", "--plots")
    assert done.code == 2
    assert "pip install 'kvtool[plots]'" in done.err


@pytest.mark.exhaustive
def test_the_hub_is_asked_aloud_and_fails_in_one_line(kvtool, monkeypatch):
    def fail(*arguments, **options):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr("datasets.load_dataset_builder", fail)
    done = kvtool("eval", "-t", "longbench_e/trec,longbench/qasper,niah", "-L", "1", "-o", "run")
    assert (done.code, done.out) == (1, "")
    asked = "data: Xnhyacinth/LongBench (no such folder here, asking the hub)\n"
    assert done.err.count(asked) == 1
    assert "error: longbench_e/trec: cannot load `Xnhyacinth/LongBench" in done.err
    done = kvtool("eval", "-t", "ppl", "--data", "ppl=some/texts", "-o", "run")
    assert "data: some/texts (no such folder here, asking the hub)\nerror: " in done.err


@pytest.mark.parametrize(
    ("task", "policies", "said"),
    [
        ("trace", "full+int4,h2o+int(keys=4,values=8)", "full+int4, h2o+int(keys=4,values=8)"),
        ("trace", "full+int8,full+k8v4,full+fp8,h2o", None),
        ("niah", "full+int4", None),
    ],
)
def test_it_is_said_once_that_keys_of_4_bits_cost_reasoning(kvtool, task, policies, said):
    model = () if task == "niah" else ("-m", "reference-trace")
    done = kvtool("eval", *model, "-t", task, "-p", policies, "-b", "64,80", "--dry-run")
    assert done.code == 0, done.err
    lines = [line for line in done.err.splitlines() if "keys of 4 bits cost reasoning" in line]
    assert len(lines) == (said is not None)
    if said is not None:
        assert f"; here {said} on trace; +k8v4 keeps 8 bits for keys" in lines[0]
