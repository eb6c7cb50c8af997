import pytest

pytest.importorskip("matplotlib")


from kvtool.evaluation.costs import spent_by_variant
from kvtool.report.cost_pictures import cost_figure
from kvtool.report.formats import share
from kvtool.report.panels import drawing
from tests.report.examples import HOST_BYTES, document, with_host_memory


def drawn(run):
    """The panels, and the widths of the bars of each panel by variant."""
    with drawing():
        panels = cost_figure(run).axes
    names = [tick.get_text() for tick in panels[0].get_yticklabels()]
    places = dict(zip((round(y, 6) for y in panels[0].get_yticks()), names, strict=True))
    found = []
    for panel in panels:
        bars = {}
        for patch in panel.patches:
            variant = places[round(patch.get_y() + patch.get_height() / 2, 6)]
            bars.setdefault(variant, []).append(patch)
        found.append(bars)
    return panels, found


def test_bars_are_shares_of_the_full_cache_with_the_state_hatched_behind():
    run = document(("niah",), {"streaming": 1, "h2o": 1})
    spent = spent_by_variant(run)
    _, (sizes, *_) = drawn(run)
    assert list(sizes) == [variant.name for variant in run.variants]
    for variant, (kv, state) in sizes.items():
        assert kv.get_width() == pytest.approx(spent[variant].kv_bytes / spent[variant].full_bytes)
        assert state.get_x() == kv.get_width()
        assert state.get_width() == pytest.approx(
            spent[variant].state_bytes / spent[variant].full_bytes
        )
        assert state.get_hatch()
    assert sizes["full"][0].get_width() == 1
    assert sizes["streaming@64"][1].get_width() == 0


def test_speeds_are_multiples_of_the_full_cache():
    run = document(("niah",), {"h2o": 1}, (64, 256))
    panels, (_, decode, prefill) = drawn(run)
    assert [panel.get_title() for panel in panels[1:]] == [
        "decode tokens/s, × full",
        "prefill tokens/s, × full",
    ]
    assert decode["h2o@64"][0].get_width() == pytest.approx(44 / 40)
    assert decode["h2o@256"][0].get_width() == pytest.approx(38 / 40)
    assert prefill["h2o@64"][0].get_width() == pytest.approx(0.25 / 0.3)
    texts = [text.get_text() for text in panels[1].texts]
    assert texts == ["1.00x", "1.10x", "0.95x"]


def test_without_a_full_cache_there_are_bytes_only():
    run = document(("niah",), {"h2o": 1}, (64,))
    run = run.model_copy(update={"variants": run.variants[1:], "results": run.results[1:]})
    panels, _ = drawn(run)
    assert len(panels) == 1


def test_a_speed_that_was_not_measured_has_no_bar():
    run = document(("niah",), {"h2o": 1}, (64,))
    full, other = run.results
    untimed = other.cost.model_copy(update={"decode_tokens_per_s": None})
    results = [full, other.model_copy(update={"cost": untimed})]
    _, (_, decode, prefill) = drawn(run.model_copy(update={"results": results}))
    assert "h2o@64" not in decode
    assert "h2o@64" in prefill


def test_host_memory_is_dotted_behind_what_is_held():
    run = with_host_memory(document(("niah",), {"h2o": 1, "snapkv": 1}, (64,)), "h2o@64")
    spent = spent_by_variant(run)["h2o@64"]
    assert spent.host_bytes == HOST_BYTES
    panels, (sizes, *_) = drawn(run)
    kv, state, host = sizes["h2o@64"]
    assert host.get_width() == pytest.approx(HOST_BYTES / spent.full_bytes)
    assert host.get_x() == pytest.approx(kv.get_width() + state.get_width())
    assert host.get_hatch() == "...."
    assert len(sizes["snapkv@64"]) == 2
    held, aside = spent.share(spent.kv_bytes + spent.state_bytes), spent.share(spent.host_bytes)
    shares = f"{share(held)} + {share(aside)}"
    assert shares in [each.get_text() for each in panels[0].texts]
    assert "host memory (dotted)" in panels[0].get_title()
