"""Published budget curves: read, put between ratios, and refused where they do not fit a model."""

import json

import pytest

from kvtool.errors import UsageError
from kvtool.planning.split_facts import read_curves


def curves(tmp_path, data, layers=2, heads=2):
    path = tmp_path / "curves.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return read_curves(str(path), layers, heads)


def test_shares_between_two_ratios_are_on_the_line(tmp_path):
    found = curves(tmp_path, {"0.4": [0.6, 0.2], "0.1": [0.1, 0.1]})
    assert found.ratios == [0.1, 0.4]
    assert found.at(0.2) == pytest.approx([0.1 + 0.5 / 3, 0.1 + 0.1 / 3])
    assert found.at(0.4) == pytest.approx([0.6, 0.2])
    assert found.at(0.05) == pytest.approx([0.05, 0.05])  # half of the smallest
    assert found.at(0.8) == pytest.approx([1.2, 0.4])
    assert not found.by_head


def test_a_layer_gets_the_mean_of_its_heads(tmp_path):
    found = curves(tmp_path, {"0.2": [[0.1, 0.3], [0.0, 0.4]]})
    assert found.by_head
    assert found.at(0.2) == pytest.approx([0.2, 0.2])


def test_what_is_no_curve_is_refused_in_a_line(tmp_path):
    for data, told in [
        ({"0.2": [0.1, 0.3, 0.2]}, "has 3 layers at 0.2, and the model 2"),
        ({"0.2": [[0.1, 0.3], [0.2] * 3]}, "layer 1 at 0.2 has 3 KV heads, and the model 2"),
        ({"0.2": [0.1, 1.5]}, "0.2.1.0: must be at most 1, got `1.5`"),
        ({"many": [0.1, 0.2]}, "must be a number, got `many`"),
        ({"0": [0.1, 0.2]}, "must be above 0, got `0`"),
        ([1], "holds no budget curves"),
        ("{", "holds no budget curves"),
        ('{"0.2": 5}', "0.2: must be a valid array, got `5`"),
        ('{"0.2": [NaN, 0.1]}', "must be at most 1, got `nan`"),
    ]:
        with pytest.raises(UsageError) as caught:
            curves(tmp_path, data)
        assert told in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot read budget curves"):
        read_curves(str(tmp_path / "none.json"), 2, 2)
