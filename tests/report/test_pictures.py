import xml.etree.ElementTree as ElementTree

import pytest

from kvtool.errors import KvtoolError, UsageError
from kvtool.report.pictures import draw, file_name, pictures
from tests.report.examples import cost, document, variants

SMALL = ({"h2o": 1}, (64, 128))


def without(run, **update):
    return run.model_copy(update={"results": [r.model_copy(update=update) for r in run.results]})


def test_there_is_a_picture_for_all_that_the_data_hold_and_no_other():
    def names(run):
        return [picture.name for picture in pictures(run)]

    assert names(document()) == [
        "score-by-bytes",
        "score-by-budget",
        "cost",
        "tokens-by-layer",
        "niah",
        "ruler-niah_multikey_1-score-by-length",
        "ppl-nll-by-position",
        "output-error-error-by-layer",
        "speed-score-by-length",
    ]
    shared = ["score-by-bytes", "score-by-budget", "cost", "tokens-by-layer"]
    assert names(document(("ruler/vt",))) == shared
    assert names(without(document(("ruler/vt",)), cost=None)) == ["score-by-budget"]
    assert names(without(document(("niah",), *SMALL), cells=[])) == shared
    alone = ["cost", "tokens-by-layer"]  # the full cache has no budget
    assert names(document(("ruler/vt",), {})) == alone
    old = cost(variants()[0]).model_copy(update={"kept_per_layer": []})
    assert names(without(document(("ruler/vt",)), cost=old)) == shared[:-1]
    assert names(without(document(("ruler/vt",)), cost=None, value=None)) == []


def test_names_are_safe_and_tell_tasks_apart():
    assert file_name("ruler/niah_multikey_1") == "ruler-niah_multikey_1"
    assert file_name("../../etc/passwd") == "etc-passwd"


@pytest.mark.exhaustive
def test_files_are_written_whole_and_the_same_every_time(tmp_path):
    pytest.importorskip("matplotlib")
    run = document(("niah",), {"h2o": 1}, (64,))
    first = draw(run, tmp_path / "new" / "a")
    second = draw(run, tmp_path / "b")
    assert [path.name for path in first] == [
        f"{name}.{form}"
        for name in ("score-by-bytes", "score-by-budget", "cost", "tokens-by-layer", "niah")
        for form in ("png", "svg")
    ]
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == sorted(
        path.name for path in second
    )  # and nothing half-written beside them
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
        if one.suffix == ".svg":
            root = ElementTree.fromstring(one.read_text())
            assert root.tag == "{http://www.w3.org/2000/svg}svg"
            assert "Matplotlib" not in one.read_text()
        else:
            assert one.read_bytes().startswith(b"\x89PNG")


def test_text_in_an_svg_is_text_and_a_dollar_a_dollar(tmp_path):
    pytest.importorskip("matplotlib")
    run = without(document(("ruler/vt",), *SMALL), task="lm-eval/$x_1$ <b>", cost=None)
    [path] = [p for p in draw(run, tmp_path, ("svg",)) if p.name == "score-by-budget.svg"]
    root = ElementTree.fromstring(path.read_text())
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "lm-eval/$x_1$ <b>" in texts
    assert "h2o" in texts


def test_the_users_settings_change_nothing(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    run = without(document(("ruler/vt",), *SMALL), cost=None)
    draw(run, tmp_path / "a", ("svg",))
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path", "axes.grid": True}):
        draw(run, tmp_path / "b", ("svg",))
        assert matplotlib.rcParams["font.size"] == 30  # and theirs are left as they were
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtool.extras.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="drawing pictures needs matplotlib") as caught:
        draw(document(), tmp_path / "plots")
    assert "kvtool[plots]" in caught.value.hint
    assert not (tmp_path / "plots").exists()


def test_a_folder_that_cannot_be_made_is_told_in_one_line(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    with pytest.raises(KvtoolError, match=r"cannot make folder `.*file/plots`: Not a directory"):
        draw(document(("ruler/vt",)), tmp_path / "file" / "plots")
