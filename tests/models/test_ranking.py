"""Rankings of policies beside those of larger models."""

import json

import pytest

from ranking import BOARD, main, scores, spearman


def document(order, kept="50%"):
    """Results in which the policies are in an order, the best first."""
    arms = [{"arm": "full", "task": task, "value": 0.8} for task in ("a", "b")]
    for place, policy in enumerate(order):
        value = 0.8 * (1 - place / len(order))
        arms += [{"arm": f"{policy}@{kept}", "task": task, "value": value} for task in ("a", "b")]
    return {"results": arms}


def test_scores_are_means_of_shares_of_the_full_cache():
    run = document(["kvzip", "random"])
    run["results"][0]["value"] = 0.4
    assert scores(run, "50%") == {"kvzip": pytest.approx(150), "random": pytest.approx(75)}
    assert scores(run, "25%") == {}


def test_the_two_columns_agree_to_about_087():
    for kept in (0, 1):
        columns = [[column[name][kept] for name in BOARD["Qwen3-8B"]] for column in BOARD.values()]
        assert spearman(*columns) == pytest.approx(0.87, abs=0.05)


def test_the_program_prints_both_rankings(tmp_path, capsys):
    order = sorted(BOARD["Qwen3-8B"], key=lambda name: -BOARD["Qwen3-8B"][name][0])
    both = document(order)["results"] + document(order, "25%")["results"]
    (tmp_path / "results.json").write_text(json.dumps({"results": both}))
    main([str(tmp_path / "results.json")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| kvzip | 100.0 | 95.2 | 95.4 |")
    half, quarter = [line for line in lines if line.startswith("| Spearman")]
    assert half.startswith("| Spearman |  | 1.00 | 0.")
    assert not quarter.startswith("| Spearman |  | 1.00")


def test_policies_that_the_board_lacks_are_shown_unranked(tmp_path, capsys):
    order = ["kvzip", "h2o", "snapkv"]
    both = document(order)["results"] + document(order, "25%")["results"]
    (tmp_path / "results.json").write_text(json.dumps({"results": both}))
    main([str(tmp_path / "results.json")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[4].startswith("| h2o (unranked) | 66.7 |")
    assert lines[5].startswith("| Spearman |  | 1.00 | 1.00 |")


@pytest.mark.parametrize(("policies", "said"), [(None, "no file"), (["kvzip"], "fewer than two")])
def test_what_ranks_nothing_is_refused(policies, said, tmp_path, capsys):
    path = tmp_path / "results.json"
    if policies is not None:
        path.write_text(json.dumps(document(policies)))
    with pytest.raises(SystemExit):
        main([str(path)])
    assert said in capsys.readouterr().err
