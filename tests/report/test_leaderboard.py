"""RULER's scores of a run in the layout of kvpress' leaderboard."""

import csv
import io

import pytest

from kvtool.errors import UsageError
from kvtool.evaluation.tasks.table import TASKS
from kvtool.report.results_text import RULER, board_csv, check_board
from tests.report.examples import cost, document, result, variants

FULL, H2O = variants(["h2o"], [64])


def ruler(variant, task, value, length=4096, **changes):
    return result(variant, f"ruler/{task}", value, 100, settings={"lengths": [length]}, **changes)


def read(results, **changes):
    run = document(policies=["h2o"], budgets=[64], results=results, **changes)
    text = board_csv(run)
    assert "\r" not in text
    return list(csv.DictReader(io.StringIO(text)))


def test_the_columns_are_rulers_tasks_in_the_boards_order():
    assert {f"ruler/{name}" for name in RULER} == {
        name for name in TASKS if name.startswith("ruler/")
    }
    assert sorted(RULER) == list(RULER)
    (row, _) = read([ruler(FULL, "vt", 80.0)])
    before = ["dataset", "data_dir", "model", "method", "compression_ratio", "query_aware"]
    assert list(row) == [*before, "question", *RULER, "score", "tasks"]


def test_a_row_is_an_variant_with_what_it_has_removed_and_its_mean():
    full = [ruler(FULL, "vt", 81.0), ruler(FULL, "cwe", 40.126)]
    mine = [ruler(H2O, "vt", 50.0), ruler(H2O, "cwe", 30.0), result(H2O, "niah", 0.5, 1.0)]
    first, second = read([*full, *mine])
    assert (first["method"], first["compression_ratio"]) == ("full", "0.0")
    assert (first["vt"], first["cwe"], first["score"]) == ("81.0", "40.13", "60.56")
    assert (second["dataset"], second["data_dir"], second["model"]) == (
        "ruler",
        "4096",
        "kvtool/reference",
    )
    # 64 of 648 slots are filled
    assert (second["method"], second["compression_ratio"]) == ("h2o", f"{1 - 64 / 648:.4f}")
    assert (second["score"], second["tasks"], second["qa_1"]) == ("40.0", "2", "")


def test_what_is_removed_is_counted_and_no_nominal_ratio():
    half = cost(H2O).model_copy(update={"kv_bytes": 300.0, "full_bytes": 1200.0})
    none = cost(H2O).model_copy(update={"kv_bytes": 600.0, "full_bytes": 1200.0})
    results = [ruler(H2O, "vt", 1.0, cost=half), ruler(H2O, "cwe", 1.0, cost=none)]
    assert read(results)[1]["compression_ratio"] == "0.625"
    assert read([ruler(H2O, "vt", None, cost=None)])[1]["compression_ratio"] == ""


def test_when_the_question_comes_is_told():
    known = read([ruler(H2O, "vt", 1.0)])[1]
    assert (known["query_aware"], known["question"]) == ("True", "known")
    later = read([ruler(H2O, "vt", 1.0, query_aware=False, keep_question=True)])[1]
    assert (later["query_aware"], later["question"]) == ("False", "later, kept")


def test_scores_that_are_missing_are_empty_and_no_part_of_the_mean():
    row = read([ruler(H2O, "vt", None), ruler(H2O, "cwe", 30.0)])[1]
    assert (row["vt"], row["score"], row["tasks"]) == ("", "30.0", "1")


def test_a_run_without_ruler_is_refused():
    told = "-f board has RULER's scores in its columns, and this run has niah, ppl alone"
    with pytest.raises(UsageError, match=told):
        check_board(["niah", "ppl"])
    with pytest.raises(UsageError, match="this run has niah alone"):
        read([result(FULL, "niah", 1.0, 1.0)])
    check_board(["niah", "ruler/vt"])
