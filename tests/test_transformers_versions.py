"""What older releases of transformers say about layers is read as the pinned one says it."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from transformers import AutoConfig, cache_utils

import kvtool
from kvtool.cli.main import main
from kvtool.transformers_versions import OLDEST, check_transformers, kv_sharing_layers, layer_types
from tests.models_for_tests import BASE, HYBRID

MIXED = {**BASE, "head_dim": 16, "sliding_window": 24, "layer_types": HYBRID}


@pytest.mark.parametrize("shared", [0, 1])
def test_arguments_given_once_for_all_layers_go_to_the_layers_they_are_for(monkeypatch, shared):
    """As before 5.19: one dict, and no layer that uses the cache of another."""
    config = AutoConfig.for_model("gemma3_text", **MIXED)
    expected = [("sliding_attention", {"sliding_window": 24}), ("full_attention", {})] * 2
    assert layer_types(config) == expected
    kinds = HYBRID[: 4 - shared]
    monkeypatch.setattr(
        cache_utils,
        "get_layer_types_and_kwargs",
        lambda config: (kinds, {"sliding_window": 24, "number_of_states": 1}),
    )
    assert layer_types(config) == expected[: 4 - shared] + [("dummy", {})] * shared


def test_layers_whose_keys_others_read_are_known_by_either_name():
    eight = {"layer_types": HYBRID * 2, "num_hidden_layers": 8}
    config = AutoConfig.for_model("gemma3_text", **(MIXED | eight))
    assert not kv_sharing_layers(config)
    config.num_kv_shared_layers = 3
    assert kv_sharing_layers(config) == {3, 4}  # the last one of each kind among the first five
    config.kv_sharing_modes = [None, "store", "reuse"]
    assert kv_sharing_layers(config) == {1}


@pytest.fixture
def installed(monkeypatch):
    """Pretend that another transformers is installed."""

    def pretend(version):
        def find(name):
            if version is None:
                raise PackageNotFoundError(name)
            return version

        monkeypatch.setattr("importlib.metadata.version", find)
        check_transformers.cache_clear()

    yield pretend
    check_transformers.cache_clear()


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("5.16.2", "transformers 5.16.2 is installed, and kvtool runs on 5.17 or later"),
        ("4.57.1", "transformers 4.57.1 is installed, and kvtool runs on 5.17 or later"),
        (None, "transformers is not installed"),
    ],
)
def test_a_transformers_that_is_too_old_is_one_line(installed, capsys, version, told):
    installed(version)
    assert main(["generate"]) == 1
    assert capsys.readouterr().err == f"error: {told}\nhint: pip install 'transformers>=5.17'\n"
    with pytest.raises(kvtool.KvtoolError, match=told):
        _ = kvtool.build_cache
    assert kvtool.parse_policy("h2o").name == "h2o"


@pytest.mark.parametrize("version", ["5.17.0", "5.18.0.dev0", "6.0.0", "5.100.1", "odd"])
def test_later_releases_are_taken(installed, version):
    installed(version)
    check_transformers()


def test_the_oldest_release_is_that_of_the_package_and_of_the_gate():
    root = Path(__file__).parents[1]
    oldest = ".".join(map(str, OLDEST))
    assert f'"transformers>={oldest}"' in (root / "pyproject.toml").read_text()
    assert f"transformers=={oldest}.0" in (root / ".ci" / "run").read_text()
