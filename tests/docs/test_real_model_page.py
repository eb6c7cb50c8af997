"""The page of the real model follows from the results beside it."""

import importlib.util
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "recipes" / "real-model"
SPEC = importlib.util.spec_from_file_location("real_model_page", FOLDER / "page.py")
PAGE = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(PAGE)


def test_the_page_that_stands_is_the_one_that_the_results_give():
    assert (FOLDER / "README.md").read_text() == PAGE.page(FOLDER / "results")


def test_every_cell_is_of_a_hundred_texts_or_more():
    for name in PAGE.RUNS:
        run = PAGE.read_results_file(FOLDER / "results" / f"{name}.json")
        assert run.complete
        assert {result.task for result in run.results} == {"niah"}
        assert min(result.n for result in run.results) >= 100
