import numpy as np
import pytest

pytest.importorskip("matplotlib")

from kvtool.report.cost_pictures import kept_by_layer, layers_figure
from kvtool.report.panels import drawing
from tests.report.examples import LAYERS, cost, document


def test_each_layer_of_each_variant_has_its_number():
    run = document(("niah",), {"h2o": 1, "quest": 1}, (64, 128))
    variants = [
        variant.model_copy(update={"reads": variant.policy == "quest"}) for variant in run.variants
    ]
    run = run.model_copy(update={"variants": variants})
    with drawing():
        panel = layers_figure(run).axes[0]
    names = [tick.get_text() for tick in panel.get_yticklabels()]
    assert names == ["full", "h2o@64", "h2o@128", "quest@64 (stored)", "quest@128 (stored)"]
    values = np.asarray(panel.get_images()[0].get_array())
    assert values[1].tolist() == run.of("h2o@64", "niah").cost.kept_per_layer
    shown = {text.get_position(): text.get_text() for text in panel.texts}
    assert shown[LAYERS - 1, 2] == f"{128 + LAYERS - 1}"
    assert len(shown) == 5 * LAYERS


def test_means_are_over_samples_and_runs_that_did_not_record_layers_have_none():
    run = document(("niah", "ruler/vt"), {"h2o": 1}, (64,))
    first, second = (run.of("h2o@64", task) for task in ("niah", "ruler/vt"))
    other = second.cost.model_copy(update={"kept_per_layer": [0.0] * LAYERS})
    results = [r.model_copy(update={"cost": other}) if r is second else r for r in run.results]
    kept = kept_by_layer(run.model_copy(update={"results": results}))["h2o@64"]
    share = first.n / (first.n + second.n)
    assert kept == pytest.approx([share * tokens for tokens in first.cost.kept_per_layer])
    old = cost(run.variants[1]).model_copy(update={"kept_per_layer": []})
    results = [r.model_copy(update={"cost": old}) for r in run.results]
    assert kept_by_layer(run.model_copy(update={"results": results})) == {}
