"""Attention weights, dropout and gradient checkpointing on an attached model."""

import pytest
import torch

import kvtool
from tests.models_for_tests import family_model, peaky_model, random_ids

IDS = random_ids(20)


@pytest.mark.parametrize("family", ["gpt_oss", "falcon"])
def test_weights_without_a_kvtool_cache_are_the_models_own(family):
    """Of a model that was loaded with eager attention, and so has them to give."""
    plain, model = family_model(family), kvtool.attach(family_model(family))
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :6] = 0
    asked = {"attention_mask": mask, "output_attentions": True}
    with torch.no_grad():
        for use_cache in (True, False):
            found, right = (
                each(IDS.repeat(2, 1), use_cache=use_cache, **asked) for each in (model, plain)
            )
            assert len(found.attentions) == 4
            for ours, theirs in zip(found.attentions, right.attentions, strict=True):
                valid = mask[:, None, :, None].bool()
                assert torch.allclose(ours * valid, theirs * valid, atol=1e-5)
    settings = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    ours, theirs = (
        each.generate(IDS, output_attentions=True, **settings) for each in (model, plain)
    )
    assert torch.equal(ours.sequences, theirs.sequences)
    assert torch.allclose(ours.attentions[1][0], theirs.attentions[1][0], atol=1e-5)


def test_weights_over_a_kvtool_cache_are_refused_before_it_changes():
    model = peaky_model("llama")
    cache = kvtool.build_cache(model, "full")
    model(IDS, past_key_values=cache)
    with pytest.raises(kvtool.KvtoolError, match="output_attentions is not available"):
        model(IDS[:, :2], past_key_values=cache, output_attentions=True)
    with (
        kvtool.compressed(model, "h2o", 12),
        pytest.raises(kvtool.KvtoolError, match="output_attentions is not available"),
    ):
        model.generate(IDS, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
    model(IDS[:, :2], past_key_values=cache)
    assert cache.get_seq_length() == 22


def test_dropout_without_a_kvtool_cache_is_the_models_own():
    logits = []
    for attached in (False, True):
        model = peaky_model("llama", attention_dropout=0.5).train()
        if attached:
            kvtool.attach(model)
        torch.manual_seed(1)
        logits.append(model(IDS, use_cache=False).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {"attention_dropout": 0.5}), ("gptj", {"attn_pdrop": 0.5})],
)
def test_dropout_over_a_kvtool_cache_is_refused(family, changes):
    model = peaky_model("llama", **changes) if family == "llama" else family_model(family)
    for name, value in changes.items():
        setattr(model.config, name, value)
    cache = kvtool.build_cache(model, "full")
    model.train()
    with pytest.raises(kvtool.KvtoolError, match="train mode with attention dropout"):
        model(IDS, past_key_values=cache)
    model.eval()
    model(IDS, past_key_values=cache)
    assert cache.get_seq_length() == 20


def test_train_mode_without_dropout_works():
    model = peaky_model("llama").train()
    cache = kvtool.build_cache(model, "full")
    logits = model(IDS, past_key_values=cache).logits
    assert torch.allclose(logits, peaky_model("llama")(IDS).logits, atol=2e-5)


@pytest.mark.filterwarnings("ignore")
def test_gradient_checkpointing():
    gradients = []
    for attached in (False, True):
        model = peaky_model("llama").train()
        model.gradient_checkpointing_enable()
        if attached:
            kvtool.attach(model)
        model(IDS, labels=IDS, use_cache=False).loss.backward()
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    assert gradients[0].abs().max() > 0
    assert torch.allclose(*gradients, atol=1e-6)
    cache = kvtool.build_cache(model, "full")
    with pytest.raises(kvtool.KvtoolError, match="gradient checkpointing"):
        model(IDS, past_key_values=cache)
    model.gradient_checkpointing_disable()
    model(IDS, past_key_values=cache)
    assert cache.get_seq_length() == 20
