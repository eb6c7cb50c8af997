"""What older releases of transformers say about layers is read as the pinned one says it."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoConfig, cache_utils

import kvtool
from kvtool.cli.main import main
from kvtool.generation import prefill
from kvtool.generation.feeding import decode_step
from kvtool.transformers_versions import (
    OLDEST,
    cache_argument,
    check_transformers,
    given_cache,
    kv_sharing_layers,
    layer_types,
    returned_cache,
    with_cache,
)
from tests.models_for_tests import BASE, HYBRID, peaky_model, random_ids

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


@pytest.fixture
def named(monkeypatch):
    """Let the installed transformers be of another version, for the name of the cache alone."""

    def pretend(version):
        monkeypatch.setattr("importlib.metadata.version", lambda name: version)
        cache_argument.cache_clear()

    yield pretend
    cache_argument.cache_clear()


@pytest.mark.parametrize(
    ("version", "name"),
    [("5.17.0", "past_key_values"), ("5.23.1", "past_key_values"), ("5.24.0", "cache")],
)
def test_a_cache_is_passed_on_by_the_name_of_the_release(named, version, name):
    named(version)
    assert cache_argument() == name
    for given in ({"past_key_values": 7}, {"cache": 7}, {"cache": 7, "past_key_values": None}):
        assert given_cache(given) == 7
        assert given_cache(with_cache(given | {"use_cache": True}, given_cache(given))) == 7
    assert with_cache({"past_key_values": 1, "use_cache": True}, 7) == {name: 7, "use_cache": True}
    assert given_cache({}) is None


def test_the_cache_of_an_output_is_known_by_either_name():
    assert returned_cache(SimpleNamespace(past_key_values=7)) == 7
    assert returned_cache(SimpleNamespace(cache=None, past_key_values=7)) is None
    assert returned_cache((7,)) is None


def test_a_generated_text_warns_of_no_deprecated_name(recwarn, caplog):
    """By either name that a caller gives a cache to the `generate` of an attached model."""
    model, ids = kvtool.attach(peaky_model("llama")), random_ids(20)
    cache = kvtool.build_cache(model, "h2o", 12)
    model.generate(ids, past_key_values=cache, max_new_tokens=2, do_sample=False)
    with kvtool.compressed(model, "h2o", 12):
        model.generate(ids, max_new_tokens=2, do_sample=False)
    cache = kvtool.build_cache(model, "h2o", 12)
    prefill(model, cache, ids)
    decode_step(model, cache, ids[:, 0])
    assert not [each for each in recwarn if "past_key_values" in str(each.message)]
    assert "past_key_values" not in caplog.text
