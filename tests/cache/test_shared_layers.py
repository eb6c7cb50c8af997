"""Layers that read the keys of another one, and layers that attend in chunks."""

import pytest
import torch

import kvtool
from kvtool.cache.whole.layers import check_shared
from kvtool.generation import decode_step, prefill
from kvtool.maths.attention import attention_weights
from kvtool.policies.grammar import parse_policy
from kvtool.profiling.seen import row_weights
from tests.coded import decoded_slots
from tests.models import families
from tests.models_for_tests import family_model, random_ids

LENGTH, NEW, BUDGET = 60, 6, 20
SHARING = ["gemma3n", "gemma4"]


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "policy"), [("gemma4", "h2o"), ("gemma3n", "full")])
def test_generate_asks_sharing_layers_for_the_last_token_only(family, policy):
    """Gemma 4 leaves the rest of a prompt out of them; kept tokens and logits are the same."""
    model = kvtool.attach(family_model(family))
    budget = None if policy == "full" else BUDGET
    ids, first, second = (
        random_ids(LENGTH),
        kvtool.build_cache(model, policy, budget),
        kvtool.build_cache(model, policy, budget),
    )
    out = model.generate(
        ids,
        past_key_values=first,
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens, logits = out.sequences[0, LENGTH:], [prefill(model, second, ids)]
    logits += [decode_step(model, second, token[None]) for token in tokens[:-1]]
    torch.testing.assert_close(torch.cat(out.logits), torch.cat(logits), atol=1e-4, rtol=1e-4)
    for layer in first.slot_layers:
        index = layer.index
        assert first.kept_positions(index).equal(second.kept_positions(index))


PACED = ["h2o+every(steps=2)", "rkv(window=2,kernel=3,buffer=2)"]
PACED += ["snapkv(window=2,kernel=3)+every(steps=2)"]


@pytest.mark.few(1)
@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "policy"),
    list(zip(["gemma3n_text", "gemma4_text", "gemma3n_text"], PACED, strict=True)),
)
def test_a_layer_is_cut_after_others_have_read_its_keys(family, policy):
    """Against the plain model under the mask of what was kept before each token."""
    ours, expected = families.evicted_logits(families.config_of(family), families.BUDGET, policy)
    torch.testing.assert_close(ours, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "policy"),
    [("gemma4", "h2o+every(steps=3)"), ("gemma3n", "rkv(window=4,buffer=5)")],
)
def test_codes_that_others_read_are_those_before_the_cut(family, policy):
    model = kvtool.attach(family_model(family))
    ids = random_ids(LENGTH).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[0, :13] = 0

    def run(spelled):
        cache = kvtool.build_cache(model, spelled, BUDGET)
        logits = [prefill(model, cache, ids, mask)]
        logits += [decode_step(model, cache, torch.tensor([t, t])) for t in range(4, 12)]
        return torch.stack(logits)

    coded = run(f"{policy}+int8")
    with decoded_slots("int8"):
        torch.testing.assert_close(coded, run(policy), atol=0.03, rtol=1e-3)


@pytest.mark.parametrize("family", SHARING)
def test_sharing_layers_hold_nothing(family):
    model = kvtool.attach(family_model(family))
    cache = kvtool.build_cache(model, "h2o", BUDGET)
    prefill(model, cache, random_ids(LENGTH))
    assert len(cache.slot_layers) == 2
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.slot_layers)
    assert cache.report().allocated_bytes == held


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("quest", "reads a part of the keys"),
        ("h2o+ada", "keeps different counts"),
        ("h2o+d2o-merge", "changes or sets aside what is evicted"),
        ("streaming(positions=cache)", "places tokens anew"),
    ],
)
def test_a_policy_that_does_more_than_evict_is_refused(policy, reason):
    model = kvtool.attach(family_model("gemma3n"))
    with pytest.raises(kvtool.KvtoolError, match=reason) as told:
        kvtool.build_cache(model, policy, 300)
    assert "evicts only" in told.value.hint
    check_shared(family_model("gemma3").config, parse_policy(policy))


def test_a_prompt_cannot_be_split_inside_a_layer_that_others_read():
    model = kvtool.attach(family_model("gemma4"))
    cache = kvtool.build_cache(model, "h2o", BUDGET, prefill="block:16")
    with pytest.raises(kvtool.KvtoolError, match="whose keys other layers read"):
        model(random_ids(LENGTH), past_key_values=cache)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "policy"), [("gemma4", "h2o"), ("llama4", "snapkv(window=8)"), ("gemma3n", "h2o")]
)
def test_a_step_of_fixed_shapes_is_the_step(family, policy):
    model = kvtool.attach(family_model(family))
    caches = [kvtool.build_cache(model, policy, BUDGET) for _ in range(2)]
    for cache in caches:
        prefill(model, cache, random_ids(LENGTH))

    def static(**inputs):
        with caches[0].static_step():
            return model(**inputs)

    fixed = []
    for token in random_ids(12, seed=4)[0]:
        fixed.append(caches[0].fix_shapes(8))
        ours = decode_step(model, caches[0], token[None], static if fixed[-1] else None)
        expected = decode_step(model, caches[1], token[None])
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    assert fixed[-1]


def test_profiles_weigh_the_keys_of_a_chunk():
    source = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 3, 5, 8, generator=source), torch.randn(2, 9, 8, generator=source)
    weights, low = row_weights(query, key, scale=0.5, window=6, chunks_from=4)
    visible = torch.zeros(5, 9, dtype=torch.bool)
    for row in range(5):  # positions 8 to 12, over keys at 4 to 12
        for column in range(9):
            mine, theirs = row + 8, column + 4
            visible[row, column] = theirs <= mine and theirs // 6 == mine // 6
    expected = attention_weights(query[None], key[None], scale=0.5, visible=visible)[0]
    torch.testing.assert_close(weights, expected[..., low:])
    assert not expected[..., :low].any()


def test_a_chunked_layer_forgets_at_a_chunks_end():
    """Tokens 0 to 23 are one chunk of the tiny Llama 4: what they were does not reach layer 0."""
    model = family_model("llama4")
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    model.config.layer_types = model.config.layer_types[:1]
    kvtool.attach(model)
    ids, logits = random_ids(40), []
    for first in (5, 9):
        ids[:, :24] = first
        cache = kvtool.build_cache(model, "full")
        logits.append(torch.cat([prefill(model, cache, ids), decode_step(model, cache, ids[:, 3])]))
        assert cache.first_layer.slots.kept == 23
    torch.testing.assert_close(*[each[:1] for each in logits])
