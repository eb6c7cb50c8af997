"""Which wrong answers of a run are shown, from its files."""

import json
import re
import shutil

import pytest

from kvtool.documents.results import ResultsDocument
from kvtool.evaluation.run.wrong import wrong_answers
from tests.old_files.make import DATA

FULL, SNAPKV, QUEST = "full", "snapkv(window=4)@32", "quest@32"
VARIANTS = [
    FULL,
    "quest@25%",
    QUEST,
    "h2o+caote@25%",
    "h2o+caote@32",
    "snapkv(window=4)@25%",
    SNAPKV,
]


@pytest.fixture
def run(tmp_path):
    """A run of two samples of niah: they score in the order of `VARIANTS`, all right."""
    folder = shutil.copytree(DATA / "run", tmp_path / "run")
    index = json.loads((folder / "samples.json").read_text())
    index["tasks"] = [entry for entry in index["tasks"] if entry["task"] == "niah"]
    (folder / "samples.json").write_text(json.dumps(index))
    for variant in VARIANTS:
        answer(folder, variant, ())
    return folder


def file(folder, variant):
    return folder / "samples" / re.sub("[()]", "_", variant) / "niah.jsonl"


def answer(folder, variant, wrong):
    """Let the samples of these places be answered wrongly, the others rightly; return ids."""
    records = [json.loads(line) for line in file(folder, variant).read_text().splitlines()]
    for place, record in enumerate(records):
        (turn,) = record["turns"]
        right = turn["references"][0]
        turn["prediction"] = f"not {variant} {place}" if place in wrong else f" {right}."
    file(folder, variant).write_text("".join(json.dumps(record) + "\n" for record in records))
    return [record["id"] for record in records]


def found(folder, most=3):
    document = ResultsDocument.model_validate_json((folder / "results.json").read_text())
    values = {
        variant: 1.0 if variant in right(folder) else 0.9 - VARIANTS.index(variant) / 10
        for variant in VARIANTS
    }
    results = [r.model_copy(update={"value": values[r.variant]}) for r in document.results]
    return wrong_answers(folder, document.model_copy(update={"results": results}), most)["niah"]


def right(folder):
    return [variant for variant in VARIANTS if "not " not in file(folder, variant).read_text()]


def shown(folder, most=3):
    return [(each.variant, each.answer) for each in found(folder, most)]


def test_the_best_the_middle_and_the_worst_variant_that_err_are_shown(run):
    for variant in VARIANTS[2:]:  # five variants
        ids = answer(run, variant, (1,))
    middle = "h2o+caote@32"
    assert shown(run) == [(variant, f"not {variant} 1") for variant in (QUEST, middle, SNAPKV)]
    assert shown(run, most=1) == [(QUEST, f"not {QUEST} 1")]
    first = found(run)[0]
    assert (first.sample, first.question, first.score, first.best) == (ids[1], None, 0.0, 1.0)
    assert len(first.references) == 1
    assert first.references[0].isdigit()


def test_few_variants_that_err_show_more_of_their_answers(run):
    answer(run, SNAPKV, (0, 1))
    assert shown(run) == [(SNAPKV, f"not {SNAPKV} 0"), (SNAPKV, f"not {SNAPKV} 1")]
    answer(run, QUEST, (0, 1))
    assert shown(run) == [
        (QUEST, f"not {QUEST} 0"),
        (QUEST, f"not {QUEST} 1"),
        (SNAPKV, f"not {SNAPKV} 0"),
    ]


def test_right_answers_failed_samples_and_lines_of_other_runs_are_left_out(run):
    assert shown(run) == []
    lines = file(run, QUEST).read_text().splitlines()
    record = json.loads(lines[0])
    record["turns"][0]["prediction"] = f"not {QUEST} 0"
    failed = {k: v for k, v in record.items() if k not in ("scores", "cost")} | {"error": "told"}
    other = record | {"key": "of another configuration"}
    file(run, QUEST).write_text(f"{lines[1]}\n{json.dumps(failed)}\n{json.dumps(other)}\n")
    assert QUEST not in right(run)
    assert shown(run) == []
    file(run, QUEST).write_text(f"{lines[1]}\n{json.dumps(record)}\n")  # so it would have been seen
    assert shown(run) == [(QUEST, f"not {QUEST} 0")]
