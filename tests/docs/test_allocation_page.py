"""The page that compares allocators is what its script writes from the results beside it."""

import importlib.util
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "recipes" / "allocation"


def test_the_page_is_made_from_the_results():
    spec = importlib.util.spec_from_file_location("allocation_page", FOLDER / "page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (FOLDER / "README.md").read_text() == module.page(FOLDER)
