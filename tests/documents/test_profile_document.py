import pytest
import yaml

from kvtool.documents.profile import ProfileDocument
from kvtool.documents.source import Source
from kvtool.documents.tree import DocumentError

MODEL = {
    "id": "reference",
    "config_hash": "abc",
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "layer_types": ["full_attention"] * 2,
    "kv_bytes_per_token": 256,
}


def profile(**metrics) -> ProfileDocument:
    return ProfileDocument(model=MODEL, metrics=metrics)


def read(text: str) -> ProfileDocument:
    return Source.parse(text, "p.yaml").validate(ProfileDocument)


def test_what_is_written_is_read_back():
    document = profile(
        f_variance=[1.5, None],
        output_error={"policy": "h2o", "budgets": [8, 16], "errors": [[0.5, 0.25], None]},
        jaccard={"rates": [0.3], "mas": [[0.9], None]},
    )
    assert read(document.to_yaml()) == document
    assert read(document.to_json()) == document


def test_what_was_not_measured_is_left_out():
    data = profile(entropy=[0.5, 0.25]).to_data()
    assert list(data) == ["kind", "schema_version", "model", "metrics"]
    assert data["metrics"] == {"entropy": [0.5, 0.25]}


def test_what_does_not_fit_is_refused():
    for metrics, message in [
        ({"entropy": [0.5]}, "`metrics.entropy` has 1 entries, but there are 2 layers"),
        (
            {"output_error": {"policy": "h2o", "budgets": [8], "errors": [[0.5]] * 3}},
            "`metrics.output_error.errors` has 3 entries, but there are 2 layers",
        ),
        ({"entropi": [0.5, 0.5]}, "unknown key `entropi`; did you mean `entropy`"),
        ({"entropy": [0.5, "high"]}, "must be a number, got `high`"),
        (
            {"output_error": {"policy": "h2o", "budgets": [8, 16], "errors": [[0.5, 0.2], [0.1]]}},
            "`metrics.output_error.errors.1` has 1 entries, but there are 2 points",
        ),
        (
            {"jaccard": {"rates": [0.1], "aas": [[0.5, 0.2], None]}},
            "`metrics.jaccard.aas.0` has 2 entries, but there are 1 points",
        ),
    ]:
        data = profile(entropy=[1.0, 1.0]).to_data() | {"metrics": metrics}
        with pytest.raises(DocumentError) as caught:
            read(yaml.safe_dump(data))
        assert message in str(caught.value)


DATA = {"source": "a.txt", "samples": 1, "tokens": 64, "seed": 0, "fingerprint": "x"}


def test_no_text_has_more_tokens_than_positions_can_tell():
    """Such a profile was planned from, a token after the other, and with figures that disagreed."""
    most = 2**31 - 1
    for key in ("tokens", "decode"):
        whole = ProfileDocument(model=MODEL, metrics={}, data=DATA | {key: most})
        read(whole.to_yaml())
        data = whole.to_data() | {"data": DATA | {key: most + 1}}
        with pytest.raises(DocumentError, match=f"data.{key}: must be at most {most}"):
            read(yaml.safe_dump(data))
