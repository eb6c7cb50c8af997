import pytest

pytest.importorskip("matplotlib")

import numpy as np

from kvtool.report.needles import needle_figure, needle_tasks
from kvtool.report.panels import drawing
from tests.report.examples import DEPTHS, LENGTHS, document


def drawn(run, task="niah"):
    with drawing():
        return needle_figure(run, task)


def panel_of(figure, variant):
    return next(p for p in figure.axes if p.get_title().split("\n")[0] == variant)


def with_cells(run, change):
    results = [
        r.model_copy(update={"cells": [c for c in map(change, r.cells) if c is not None]})
        for r in run.results
    ]
    return run.model_copy(update={"results": results})


def test_cells_at_places_that_are_no_numbers_are_no_map():
    run = document(("niah",), {"h2o": 1}, (64,))
    assert needle_tasks(run) == ["niah"]
    for at in ({"depth": "1/3"}, {"length": "1K"}):
        changed = with_cells(run, lambda cell, at=at: cell.model_copy(update={"at": cell.at | at}))
        assert needle_tasks(changed) == []


def test_depth_0_is_on_top_lengths_grow_to_the_right_and_each_cell_shows_its_number():
    run = document(("niah",), {"h2o": 1}, (64,))
    figure = drawn(run)
    panel = panel_of(figure, "h2o@64")
    [image] = panel.get_images()
    values = np.asarray(image.get_array())
    cells = {(c.at["depth"], c.at["length"]): c.value for c in run.of("h2o@64", "niah").cells}
    for row, depth in enumerate(DEPTHS):
        for column, length in enumerate(LENGTHS):
            assert values[row, column] == cells[depth, length]
    top = panel.transData.transform((0, 0))[1]
    assert top > panel.transData.transform((0, len(DEPTHS) - 1))[1]  # row 0 is drawn higher up
    ticks = dict(
        zip((t.get_text() for t in panel.get_yticklabels()), panel.get_yticks(), strict=True)
    )
    assert (ticks["0"], ticks["100"]) == (0, len(DEPTHS) - 1)
    assert [t.get_text() for t in panel.get_xticklabels()][-2:] == ["768", "1K"]
    shown = {text.get_position(): text.get_text() for text in panel.texts}
    for cell in run.of("h2o@64", "niah").cells:
        place = (LENGTHS.index(cell.at["length"]), DEPTHS.index(cell.at["depth"]))
        assert float(shown[place]) == pytest.approx(cell.value, abs=0.00501)
    assert len(shown) == len(LENGTHS) * len(DEPTHS)
    assert panel.get_title() == f"h2o@64\nmean {run.of('h2o@64', 'niah').value:.3f}"


def test_the_full_cache_is_a_thin_row_of_means_over_depths():
    run = document(("niah",), {"h2o": 1}, (64, 128))
    cells = [c for c in run.of("full", "niah").cells if c.at != {"length": 512, "depth": 0}]
    low = [
        cell.model_copy(update={"value": 0.0}) if cell.at["depth"] < 50 else cell for cell in cells
    ]
    results = [
        r.model_copy(update={"cells": low}) if r.variant == "full" else r for r in run.results
    ]
    figure = drawn(run.model_copy(update={"results": results}))
    panel = panel_of(figure, "full")
    values = np.asarray(panel.get_images()[0].get_array())
    expected = [6 / 10 if length == 512 else 6 / 11 for length in LENGTHS]
    assert values == pytest.approx(np.array([expected]))
    assert [t.get_text() for t in panel.get_yticklabels()] == ["all"]
    assert [text.get_text() for text in panel.texts] == [".55", ".55", ".60", ".55", ".55", ".55"]
    figure.draw_without_rendering()
    assert panel.get_position().height < 0.3 * panel_of(figure, "h2o@64").get_position().height


def test_the_dashed_line_stands_where_training_ended():
    figure = drawn(document(("niah",), {}, ()))
    panel = panel_of(figure, "full")
    assert panel.get_images()[0].get_array().shape == (len(DEPTHS), len(LENGTHS))  # alone: whole
    [line] = panel.get_lines()
    assert line.get_linestyle() == "--"
    assert LENGTHS.index(512) < line.get_xdata()[0] < LENGTHS.index(640)
    assert "512" in figure.get_supxlabel()


def test_there_is_no_line_where_training_ended_outside():
    run = document(("niah",), {}, ())
    for trained in (None, 128, 4096):
        model = run.model.model_copy(update={"trained_length": trained})
        figure = drawn(run.model_copy(update={"model": model}))
        assert not panel_of(figure, "full").get_lines()
        assert "dashed" not in figure.get_supxlabel()


def test_missing_cells_are_gaps_not_zeros():
    def holes(cell):
        if cell.at == {"length": 256, "depth": 0}:
            return None
        empty = cell.at == {"length": 384, "depth": 10}
        return cell.model_copy(update={"value": None}) if empty else cell

    panel = panel_of(drawn(with_cells(document(("niah",), {}, ()), holes)), "full")
    values = np.ma.filled(panel.get_images()[0].get_array(), np.nan)
    assert np.isnan(values[0, 0])
    assert np.isnan(values[1, 1])
    assert np.isnan(values).sum() == 2
    shown = {text.get_position(): text.get_text() for text in panel.texts}
    assert shown[1, 1] == shown[0, 0] == "–"


def test_a_scale_of_100_is_100_wide():
    run = document(("niah",), {}, ())
    run = with_cells(run, lambda c: c.model_copy(update={"value": c.value * 66.4}))
    results = [r.model_copy(update={"best": 100.0}) for r in run.results]
    panel = panel_of(drawn(run.model_copy(update={"results": results})), "full")
    assert panel.get_images()[0].norm.vmax == 100.0
    assert {text.get_text() for text in panel.texts} == {"66"}
