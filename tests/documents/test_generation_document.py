import json

import yaml

from kvtool.documents.generation import (
    CacheSection,
    Fidelity,
    GenerationDocument,
    GenerationTiming,
)

CACHE = CacheSection(
    tokens_seen=1000,
    kept_per_layer=[512, 512],
    kv_bytes=2**20,
    allocated_bytes=2**20 + 2048,
    state_bytes=100,
    full_bytes=2**21,
    peak_bytes=2**20 + 4096,
    traffic_pairs=512.0,
    traffic_bytes=2**20,
)


def document(**changes):
    values = {
        "model": "reference",
        "policy": "h2o",
        "budget": 512,
        "prompt_tokens": 998,
        "new_tokens": 2,
        "text": " schön: ja",
        "token_ids": [5, 7],
        "cache": CACHE,
        "timing": GenerationTiming(prefill_s=0.5, decode_s=0.1, decode_tokens_per_s=10.0),
    }
    return GenerationDocument(**(values | changes))


def test_keys_are_those_of_the_contract():
    data = document().to_data()
    assert list(data) == [
        *("kind", "schema_version", "model", "policy", "budget", "prompt_tokens", "new_tokens"),
        *("text", "token_ids", "cache", "timing"),
    ]
    assert (data["kind"], data["schema_version"]) == ("generation", 1)
    assert document(budget=None).to_data()["budget"] is None
    assert document(prefill="block:2048").to_data()["prefill"] == "block:2048"


def test_fidelity_is_there_when_measured():
    fidelity = Fidelity(agreement=1.0, kl=0.0, first_divergence=None)
    data = document(fidelity=fidelity).to_data()
    assert data["fidelity"] == {"agreement": 1.0, "kl": 0.0, "first_divergence": None}
    assert fidelity.in_words() == "full cache: 100.0% of tokens agree, KL 0, no difference"


def test_json_and_yaml_read_back():
    original = document()
    assert GenerationDocument(**json.loads(original.to_json())) == original
    assert GenerationDocument(**yaml.safe_load(original.to_yaml())) == original
    assert "schön" in original.to_json()


def test_the_cache_in_words():
    assert CACHE.in_words() == "kept 512 of 1000 tokens, 1.0 MiB of 2.0 MiB (2.0x smaller)"
    mixed = CACHE.model_copy(update={"kept_per_layer": [10, 0, 30], "kv_bytes": 600})
    assert mixed.in_words().startswith("kept 10 to 30 of 1000 tokens, 600 B of 2.0 MiB")
