import pytest
import torch
from safetensors.torch import load_file

import kvtool
import kvtool.models.load
from kvtool.generation import decode_step, prefill
from kvtool.profiling.key_basis import KeyMoments, leading_share, with_basis
from kvtool.profiling.measure import measure
from kvtool.profiling.request import Plan
from kvtool.profiling.summary import summarise
from tests.models_for_tests import peaky_model, random_ids
from tests.profiling.watching import watch


def test_texts_together_have_the_components_of_all_their_keys():
    model = kvtool.attach(peaky_model("llama"))
    texts = [random_ids(60, seed=seed) for seed in (0, 1)]
    found = measure(model, texts, Plan(("key_basis",), 0))
    keys = []
    for ids in texts:
        seen = watch(model, ids, 0)
        keys.append(next(key for index, _, _, key in seen if index == 1))
    joined = torch.cat(keys, 1).double()
    for head in range(2):
        centred = joined[head] - joined[head].mean(0)
        spread = torch.linalg.svd(centred, full_matrices=False).S.square() / 120
        torch.testing.assert_close(found["key_variance"][1, head], spread, atol=1e-4, rtol=1e-3)
        basis = found["key_basis"][1, head]
        along = (centred @ basis).square().mean(0)
        torch.testing.assert_close(along, spread, atol=1e-4, rtol=1e-3)
    metrics, _ = summarise(found, Plan(("key_basis",), 0))
    share = found["key_variance"][:, :, :4].sum(-1) / found["key_variance"].sum(-1)
    assert metrics.key_basis == pytest.approx(share.mean(1).tolist(), rel=1e-5)


def test_layers_that_slide_have_none():
    model = kvtool.attach(
        peaky_model(
            "gemma3_text", sliding_window=8, layer_types=["sliding_attention", "full_attention"]
        )
    )
    study = KeyMoments()
    watch(model, random_ids(30), 2, study)
    assert list(study.results()["key_moments"]) == [1]
    nothing = with_basis({"key_moments": torch.full((2, 1), float("nan"))})
    assert leading_share(nothing["key_variance"]).isnan().all()


def test_the_file_serves_loki(tmp_path, monkeypatch):
    from kvtool.cli.main import main

    monkeypatch.chdir(tmp_path)
    command = "profile --metrics key_basis --samples 2 --tokens 128 -o profile.yaml -q"
    assert main(command.split()) == 0
    bases = load_file("profile.heads.safetensors")["key_basis"]
    unit = torch.eye(bases.shape[-1], dtype=bases.dtype)
    torch.testing.assert_close(bases.transpose(2, 3) @ bases, unit.expand_as(bases))
    model = kvtool.attach(kvtool.models.load.load("reference").model)
    cache = kvtool.build_cache(model, "loki(basis=profile.heads.safetensors)", 32)
    logits = prefill(model, cache, random_ids(90))
    assert decode_step(model, cache, logits.argmax(-1)).isfinite().all()
