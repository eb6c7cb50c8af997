"""The page of claims follows from the results beside it, and a verdict from its scores."""

import importlib.util
import json
import re
import runpy
from pathlib import Path

import pytest

from kvtool.documents.results import ResultsDocument

FOLDER = Path(__file__).parents[2] / "recipes" / "claims"
SPEC = importlib.util.spec_from_file_location("claims_page", FOLDER / "page.py")
PAGE = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(PAGE)


@pytest.fixture(scope="module")
def results():
    """The run of one of the claims, of 50 samples."""
    return json.loads((FOLDER / "results" / "order.json").read_text())


def written(data, folder):
    folder.mkdir(exist_ok=True)
    (folder / "order.json").write_text(json.dumps(data))
    return PAGE.page(folder)


@pytest.mark.exhaustive
def test_the_page_that_stands_is_the_one_that_the_results_give():
    assert (FOLDER / "README.md").read_text() == PAGE.page(FOLDER / "results")


def believed(text: str) -> dict[str, list[str]]:
    """Return the two verdicts of each claim of a page, and which to believe."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if "](#" in line]
    return {row[0].rpartition("](#")[2].rstrip(")"): row[2:5] for row in rows if len(row) == 8}


def test_two_claims_are_judged_as_the_page_has_it_and_believed_where_the_model_answers(
    tmp_path, monkeypatch
):
    """The page of two claims, by all results: its parts are those of the whole page."""
    for name in ("caote.yaml", "key-bits-perplexity.yaml", "ranking.py"):
        (tmp_path / name).symlink_to(FOLDER / name)
    monkeypatch.setattr(PAGE, "HERE", tmp_path)
    monkeypatch.setattr(PAGE, "BELIEVED", 0.99)  # the full cache finds 0.96 of the codes
    stands, made = (FOLDER / "README.md").read_text(), PAGE.page(FOLDER / "results")
    sections = {part.partition("\n")[0]: part for part in made.split("\n## ")[1:]}
    ranking = next(name for name in sections if name.startswith("How policies rank"))
    for name in ("caote", "key-bits-perplexity", ranking):
        assert sections[name].strip() in stands
    whole, rows = believed(stands), believed(made)
    assert rows.keys() == {"caote", "key-bits-perplexity"}
    for name, row in rows.items():
        assert row[:2] == whole[name][:2]
        assert whole[name][2] == "SmolLM2-135M"
    assert rows["caote"][2] == "bundled model, for mechanics"
    assert rows["key-bits-perplexity"][2] == "SmolLM2-135M"  # asks nothing


def test_every_claim_has_a_row_with_its_command(results, tmp_path):
    text = written(results, tmp_path)
    recipes = sorted(FOLDER.glob("*.yaml"))
    for recipe in recipes:
        assert f"`kvtool eval recipes/claims/{recipe.name} -o runs/claims/{recipe.stem}`" in text
    assert text.count("| not run | not run | not tested |") == len(recipes) - 1
    assert text.count("| later, kept | not run |") == 11
    assert "| `roco` | `h2o` | fidelity | 50% |" in text
    assert "was measured with reference, 8 layers (`config.json` " in text
    assert "## How policies rank" not in text  # their runs are not there


def test_a_folder_of_runs_gives_a_page(results, tmp_path, monkeypatch, capsys):
    """For a model of one's own, as `kvtool eval` leaves its runs; the page here stays."""
    (tmp_path / "mine" / "order").mkdir(parents=True)
    (tmp_path / "mine" / "order" / "results.json").write_text(json.dumps(results))
    before = (FOLDER / "README.md").read_text()
    monkeypatch.setattr("sys.argv", ["page.py", str(tmp_path / "mine")])
    PAGE.main()
    assert "| `roco` | `h2o` | fidelity | 50% |" in capsys.readouterr().out
    assert (FOLDER / "README.md").read_text() == before


def test_the_real_model_is_believed_where_it_answers():
    rows = believed((FOLDER / "README.md").read_text())
    for name, (_, real, which) in rows.items():
        assert (which == "SmolLM2-135M") == (real != "not run"), name
    assert rows["later-turns"][1:] == ["not run", "bundled model, for mechanics"]
    assert rows["reasoning"][1:] == ["not run", "reference-trace, for mechanics"]


def test_the_real_model_ranks_as_larger_ones_and_the_bundled_one_does_not():
    """The second half of the sentence on the page follows from these numbers."""
    text = (FOLDER / "README.md").read_text()
    found = re.search(r"by ([-.\d]+) \(mean of 6\), the bundled model by\s+([-.\d]+)\.", text)
    real, machine = map(float, found.groups())
    assert real > 0.7 > 0.5 > machine
    assert "its scores are not on\nthe first page" in text


@pytest.fixture(scope="module")
def ranking():
    return runpy.run_path(str(FOLDER / "ranking.py"))


def test_both_models_of_others_rank_nearly_alike(ranking):
    for table in ("HALF", "QUARTER"):
        columns = [list(column.values()) for column in ranking[table].values()]
        assert ranking["spearman"](*columns) == pytest.approx(0.87, abs=0.05)


def test_scores_are_means_of_shares_of_the_full_cache(ranking, results):
    document = ResultsDocument.model_validate(results)
    change = {"full": 0.4, "roco@50%": 0.3, "random@50%": 0.1}
    found = [
        result.model_copy(update={"value": change[result.variant], "best": 1.0})
        for result in document.results
        if result.variant in change
    ]
    run = document.model_copy(update={"results": found})
    shares = {"roco": pytest.approx(75), "random": pytest.approx(25)}
    assert ranking["scores"]([run], "50%") == shares
    assert ranking["scores"]([run], 50) == {}


def test_ranks_are_correlated(ranking):
    assert ranking["ranks"]([10.0, 30.0, 20.0, 20.0]) == [1.0, 4.0, 2.5, 2.5]
    assert ranking["spearman"]([1.0, 2.0, 3.0], [10.0, 30.0, 20.0]) == pytest.approx(0.5)


def test_a_verdict_changes_when_its_results_are_edited(results, tmp_path):
    def verdicts(better, worse):
        data = json.loads(json.dumps(results))
        for result in data["results"]:
            if result["variant"] in (better, worse):
                value = 1.0 if result["variant"] == better else 0.0
                n = len(result["scores"]["sums"])
                result["scores"] = {"sums": [value] * n, "weights": None, "link": "mean"}
        text = written(data, tmp_path)
        [row] = [line for line in text.splitlines() if line.startswith("| `roco` | `h2o` |")]
        return row.split(" | ")[-1].strip(" |")

    assert verdicts("roco@50%", "h2o@50%") == "holds"
    assert verdicts("h2o@50%", "roco@50%") == "fails"


def test_each_budget_has_its_own_difference_and_a_star_where_it_decides():
    """RocketKV against SparQ: the budgets disagree, and their mean says nothing."""
    text = (FOLDER / "README.md").read_text()
    of_pair = "| `rocketkv` | `sparq` | ruler/niah_multikey_1 | 64, 128, 256 |"
    row = next(line for line in text.splitlines() if line.startswith(of_pair))
    assert "| +15.0* / -14.5* / -0.5 | 200 | undecided |" in row


def test_the_codes_of_the_evaluation_page_are_those_of_the_claims():
    found = {}
    for name in ("calidrop", "caote"):
        document = json.loads((FOLDER / "results" / f"{name}.json").read_text())
        found |= {(each["variant"], each["task"]): each["value"] for each in document["results"]}
    page = (FOLDER.parents[1] / "kvtool" / "evaluation" / "README.md").read_text("utf-8")
    table = page.split("## Results")[1].split("\n## ")[0].split("| fidelity 64 / 128 / 256 |")[1]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) == 7
    for policy, niah, multikey, _ in ([cell.strip(" `") for cell in row] for row in rows):
        for task, scale, printed in (("niah", 100, niah), ("ruler/niah_multikey_1", 1, multikey)):
            at = ["full"] if policy == "full" else [f"{policy}@{each}" for each in (64, 128, 256)]
            scores = [found.get((variant, task)) for variant in at]
            shown = ["–" if score is None else f"{scale * score:.0f}" for score in scores]
            assert printed == " / ".join(shown), (policy, task)
