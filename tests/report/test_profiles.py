import io

import pytest
import torch

from kvtool.documents.profile import ProfileDocument
from kvtool.report.measurements import measured, profile_table, sparkline

MODEL = {
    "id": "reference",
    "config_hash": "abc",
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "layer_types": ["full_attention"] * 3,
    "kv_bytes_per_token": 384,
}
METRICS = {
    "f_variance": [1.0, None, 3.0],
    "output_error": {"policy": "h2o", "budgets": [8, 64], "errors": [[0.5, 0.2], None, [0.1, 0.0]]},
    "jaccard": {"rates": [0.3, 0.5], "mas": [[0.8, 0.9], None, [0.7, 0.8]]},
}
CURVES = {"query_cosine": {"distances": [1, 2, 4], "values": [[0.9, 0.8, 0.7], None, [0.5] * 3]}}


@pytest.fixture
def document():
    return ProfileDocument(model=MODEL, metrics=METRICS, curves=CURVES)


def test_a_sparkline_runs_from_the_least_to_the_most():
    assert sparkline([0.0, 7.0, 3.0]) == "▁█▄"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([None, None]) == "··"


def test_every_measurement_has_a_line(document):
    lines = dict(measured(document.metrics))
    assert lines["density variance F"] == [1.0, None, 3.0]
    assert lines["output error, h2o 64"] == [0.2, None, 0.0]
    assert lines["overlap of mas at 50%"] == [0.9, None, 0.8]


def test_the_table_tells_least_mean_and_most(document):
    from rich.console import Console

    text = io.StringIO()
    Console(file=text, width=100).print(profile_table(document))
    line = next(line for line in text.getvalue().splitlines() if line.startswith("density"))
    assert line.split()[-4:] == ["▁·█", "1.000", "2.000", "3.000"]


def test_the_picture_has_a_panel_for_each(document):
    pytest.importorskip("matplotlib")
    from kvtool.report.measurements import profile_figure

    heads = {"f_variance": torch.rand(3, 4).numpy()}
    figure = profile_figure(document, heads)
    panels = {panel.get_title(): panel for panel in figure.axes if panel.get_title()}
    assert list(panels) == [
        "density variance",
        "density variance F",
        "cosine by distance",
        "output error, h2o",
        "mas: overlap with no eviction",
    ]
    heights = [bar.get_height() for bar in panels["density variance"].patches]
    assert heights[::2] == [1.0, 3.0]
    lines = panels["cosine by distance"].lines
    assert [list(line.get_ydata()) for line in lines] == [[0.9, 0.8, 0.7], [0.5] * 3]
    assert panels["cosine by distance"].get_xlabel() == "distance (tokens)"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["layer 0", "layer 2"]
