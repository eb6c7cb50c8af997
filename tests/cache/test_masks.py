"""Attention masks of a caller's own over a kvtool cache: what plain transformers makes of them."""

import pytest
import torch
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask

import kvtool
from kvtool.generation import prefill
from kvtool.maths.attention import biased_weights
from tests.models_for_tests import (
    HOOKED,
    family_model,
    peaky_model,
    random_ids,
)
from tests.tiers import first

READ, NEW = 20, 3
MASKED = ["gemma2", "deepseek_v3", "gpt_oss", "llama4", "qwen3_next", *HOOKED]


def tree(batch=1, heads=1, past=READ, hidden=()):
    """Candidates for one place: each sees what was read, but for some columns, and itself."""
    mask = torch.zeros(batch, heads, NEW, past + NEW, dtype=torch.bool)
    mask[..., :past] = True
    mask[..., list(hidden)] = False
    mask[..., range(NEW), range(past, past + NEW)] = True
    return mask


def as_float(mask, dtype=torch.float32):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def added(mask):
    """The same mask as numbers, whether it is one or several by kind of layer."""
    if isinstance(mask, dict):
        return {kind: added(one) for kind, one in mask.items()}
    return as_float(mask) if mask is not None and mask.dtype == torch.bool else mask


def fresh(family="llama", **changes):
    return peaky_model(family, **changes) if family == "llama" else family_model(family)


@torch.no_grad()
def both(steps, family="llama", policy="full", **changes):
    """Logits of each forward in turn, over transformers' own cache and over kvtool's."""
    found = []
    for ours in (False, True):
        model = fresh(family, **changes)
        cache = kvtool.build_cache(model, policy) if ours else DynamicCache(config=model.config)
        logits = []
        for step in steps:
            step = dict(step)
            step["input_ids"] = step.pop("ids")
            if not ours and family != "llama":  # eager attention adds what it is given
                step["attention_mask"] = added(step.get("attention_mask"))
            logits.append(model(**step, past_key_values=cache, use_cache=True).logits)
        found.append(logits)
    return found


def check(steps, tolerance=2e-5, **options):
    theirs, ours = both(steps, **options)
    for mine, right in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, right, atol=tolerance), (mine - right).abs().max()


def varied(batch, heads):
    """A mask that differs from entry to entry, and from head to head."""
    generator = torch.Generator().manual_seed(5)
    mask = tree(batch, heads)
    return mask & (
        (torch.rand(mask.shape, generator=generator) > 0.3) | tree(past=READ, hidden=range(READ))
    )


@pytest.mark.parametrize(
    ("batch", "heads", "kind"),
    [(1, 1, "bool"), (2, 1, "float"), (1, 8, "bias"), (2, 8, "bool"), (2, 8, "bias")],
)
def test_every_shape_and_kind(batch, heads, kind):
    mask = varied(batch, heads)
    if kind == "bias":  # finite numbers, as ALiBi's
        mask = as_float(mask) + torch.rand(mask.shape, generator=torch.Generator().manual_seed(1))
    elif kind == "float":
        mask = as_float(mask)
    place = torch.full((2, NEW), READ)
    steps = [
        {"ids": random_ids(READ, batch=2)},
        {"ids": random_ids(NEW, seed=3, batch=2), "attention_mask": mask, "position_ids": place},
        {"ids": random_ids(1, seed=4, batch=2)},
    ]
    check(steps)


@pytest.mark.parametrize("family", first(2, MASKED))
def test_every_family(family):
    place = torch.full((1, NEW), 12)
    mask = tree(past=12, hidden=(2, 5))
    later = torch.ones(1, 1, 1, 12 + NEW + 1, dtype=torch.bool)
    later[..., 12:14] = False
    steps = [
        {"ids": random_ids(12)},
        {"ids": random_ids(NEW, seed=3), "attention_mask": mask, "position_ids": place},
        {"ids": random_ids(1, seed=4), "attention_mask": later, "position_ids": place[:, :1] + 1},
        {"ids": random_ids(2, seed=5), "position_ids": torch.tensor([[14, 15]])},
    ]
    check(steps, family=family)


@pytest.mark.parametrize("family", ["gemma3n"])
def test_layers_that_read_the_keys_of_others_are_refused(family):
    model = family_model(family)
    cache = kvtool.build_cache(model, "full")
    model(random_ids(12), past_key_values=cache)
    with pytest.raises(kvtool.KvtoolError, match="layer whose keys other layers read"):
        model(random_ids(NEW), past_key_values=cache, attention_mask=tree(past=12))


def test_a_mask_as_large_as_kvtools_own():
    """(batch, 1, q, 1) and (batch, 1, q, 3) are what kvtool's own masks look like."""
    one = torch.ones(2, 1, 1, 1, dtype=torch.bool)
    three = torch.ones(2, 1, 2, 3, dtype=torch.bool)
    three[1, 0, 1, 0] = False
    steps = [
        {"ids": random_ids(1, batch=2), "attention_mask": one},
        {"ids": random_ids(2, seed=3, batch=2), "attention_mask": three},
        {"ids": random_ids(1, seed=4, batch=2), "attention_mask": torch.ones(2, 4)},
    ]
    check(steps)
    check(
        [
            {
                "ids": random_ids(3),
                "attention_mask": as_float(torch.ones(3, 3).tril().bool()[None, None]),
            }
        ]
    )


def test_two_texts_packed_into_the_first_forward():
    mask = torch.ones(12, 12).tril().bool()
    mask[7:, :7] = False
    place = torch.cat([torch.arange(7), torch.arange(5)])[None]
    ids = random_ids(12)
    check([{"ids": ids, "attention_mask": mask[None, None], "position_ids": place}])
    _, (logits,) = both([{"ids": ids, "attention_mask": mask[None, None], "position_ids": place}])
    alone = fresh()(ids[:, 7:]).logits
    assert torch.allclose(logits[:, 7:], alone, atol=2e-5)


def test_a_padded_batch_in_front_of_the_mask():
    pads = torch.ones(2, READ, dtype=torch.long)
    pads[1, :6] = 0
    mask = tree(2)
    mask[1, ..., :6] = False
    place = torch.tensor([[READ] * NEW, [READ - 6] * NEW])
    before = (pads.cumsum(1) - 1).clamp(min=0)
    steps = [
        {"ids": random_ids(READ, batch=2), "attention_mask": pads, "position_ids": before},
        {"ids": random_ids(NEW, batch=2), "attention_mask": mask, "position_ids": place},
        {
            "ids": random_ids(1, batch=2),
            "attention_mask": torch.cat([pads, torch.ones(2, NEW + 1)], 1),
            "position_ids": place[:, :1] + 1,
        },
    ]
    theirs, ours = both(steps)
    theirs[0], ours[0] = theirs[0][:, 6:], ours[0][:, 6:]  # padding reads differently
    for mine, right in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, right, atol=2e-5)


def test_padding_that_was_moved_is_refused():
    model = fresh()
    cache, pads = kvtool.build_cache(model, "full", prefill="block:8"), torch.ones(2, READ)
    pads[1, :6] = 0
    model(random_ids(READ, batch=2), attention_mask=pads.long(), past_key_values=cache)
    with pytest.raises(kvtool.KvtoolError, match="its padding is not where it was"):
        model(random_ids(NEW, batch=2), attention_mask=tree(2), past_key_values=cache)


def test_a_mask_for_each_kind_of_layer():
    """Sliding layers keep their window, and a mask of theirs has that many columns."""
    window = 24  # of the model
    ids, more = random_ids(40), random_ids(NEW, seed=3)
    full, sliding = tree(past=40, hidden=(4,)), tree(past=window - 1, hidden=(2, 9))
    masks = {"full_attention": full, "sliding_attention": sliding}
    one = {"full_attention": torch.ones(1, 1, 1, 44, dtype=torch.bool)}
    one["sliding_attention"] = torch.ones(1, 1, 1, window, dtype=torch.bool)
    one["sliding_attention"][..., 3:8] = False
    steps = [
        {"ids": ids},
        {"ids": more, "attention_mask": masks, "position_ids": torch.full((1, NEW), 40)},
        {"ids": more[:, :1], "attention_mask": one, "position_ids": torch.full((1, 1), 41)},
        {
            "ids": more[:, 1:2],
            "attention_mask": one | {"full_attention": torch.ones(1, 1, 1, 45).bool()},
        },
        {"ids": more, "position_ids": torch.full((1, NEW), 43)},
    ]
    check(steps, family="gemma2")
    check(steps, family="gemma3")
    model = family_model("gemma2")
    cache = kvtool.build_cache(model, "full")
    model(ids, past_key_values=cache)
    with pytest.raises(kvtool.KvtoolError, match=r"shape \(1, 1, 3, 43\).* 26 keys"):
        model(more, past_key_values=cache, attention_mask=full)


def test_kvtools_own_masks_are_handed_on():
    model = kvtool.attach(fresh())
    pads = torch.ones(2, READ, dtype=torch.long)
    pads[1, :6] = 0
    ids, found = random_ids(READ, batch=2), []
    for by_hand in (False, True):
        cache, mask = kvtool.build_cache(model, "h2o", 12), pads
        if by_hand:
            embeds = model.get_input_embeddings()(ids)
            mask = create_causal_mask(model.config, embeds, pads, cache)
            assert mask.shape == (2, 1, READ, 1)
        found.append(model(ids, attention_mask=mask, past_key_values=cache).logits)
        assert cache.tokens_seen() == [READ, READ - 6]
    assert torch.equal(*found)
    with pytest.raises(kvtool.KvtoolError, match=r"bool .* or float .* not torch.int64"):
        model(ids, attention_mask=mask.clone(), past_key_values=kvtool.build_cache(model, "full"))


@pytest.mark.parametrize("codec", ["int4"])
def test_a_codec_under_a_mask_that_hides_nothing(codec):
    steps = [
        {"ids": random_ids(READ)},
        {"ids": random_ids(NEW, seed=3)},
        {"ids": random_ids(1, seed=4)},
        {"ids": random_ids(1, seed=5)},
    ]
    _, plain = both(steps, policy=f"full+{codec}", head_dim=32)
    causal = torch.ones(25, 25).tril().bool()[None, None]
    for step, (start, end) in zip(steps[1:], [(20, 23), (23, 24), (24, 25)], strict=True):
        step["attention_mask"] = causal[:, :, start:end, :end]
    _, masked = both(steps, policy=f"full+{codec}", head_dim=32)
    for one, other in zip(plain, masked, strict=True):
        assert torch.allclose(one, other, atol=2e-5)


def test_a_prompt_that_is_read_in_blocks():
    """A mask of the caller's own is read at once."""
    mask = torch.ones(READ, READ).tril().bool()[None, None]
    mask[..., 11:, 2:5] = False
    found = []
    for prefill_as in ("full", "block:8"):
        model = fresh()
        cache = kvtool.build_cache(model, "full", prefill=prefill_as)
        found.append(model(random_ids(READ), attention_mask=mask, past_key_values=cache).logits)
    assert torch.equal(*found)


@pytest.mark.parametrize("policy", ["snapkv(window=4)", "sirllm", "h2o+int8"])
def test_policies_that_evict_refuse(policy):
    model = fresh(head_dim=32)
    cache = kvtool.build_cache(model, policy, 30)
    model(random_ids(READ), past_key_values=cache)
    with pytest.raises(kvtool.KvtoolError, match=r"4D attention mask .* evicts some"):
        model(random_ids(NEW), attention_mask=tree(), past_key_values=cache)
    with pytest.raises(kvtool.KvtoolError, match="4D attention mask"):
        model(random_ids(NEW), attention_mask={"full_attention": tree()}, past_key_values=cache)
    model(random_ids(NEW), past_key_values=cache)


@pytest.mark.parametrize("policy", ["quest", "rocketkv(window=4)"])
def test_readers_refuse(policy):
    model = fresh()
    cache = kvtool.build_cache(model, policy, 16)
    with pytest.raises(kvtool.KvtoolError, match="4D attention mask"):
        model(random_ids(NEW), attention_mask=tree(past=0), past_key_values=cache)


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        (torch.ones(1, 1, NEW, NEW, dtype=torch.bool), r"\(1, 1, 3, 3\).* 23 keys"),
        (torch.ones(3, 1, NEW, 23, dtype=torch.bool), r"\(3, 1, 3, 23\)"),
        (torch.ones(1, 2, NEW, 23, dtype=torch.bool), r"heads 8 or 1"),
        (torch.ones(1, 1, NEW, 23, dtype=torch.long), "not torch.int64"),
        (torch.ones(1, NEW, 23), r"shape \(1, 3, 23\)"),
        ([[1] * 23], "list"),
        (torch.ones(1, NEW), "has 3 columns, and the cache has read 20 tokens before these 3"),
    ],
)
def test_what_fits_nothing_is_refused(mask, told):
    model = fresh()
    cache = kvtool.build_cache(model, "full")
    model(random_ids(READ), past_key_values=cache)
    with pytest.raises(kvtool.KvtoolError, match=told):
        model(random_ids(NEW), attention_mask=mask, past_key_values=cache)


# ---- masks of two dimensions that say something else of what was read


def columns(hidden, length):
    mask = torch.ones(1, length, dtype=torch.long)
    mask[:, list(hidden)] = 0
    return mask


@pytest.mark.parametrize("family", ["gemma2", HOOKED[0]])
def test_tokens_that_are_hidden_later(family):
    steps = [
        {"ids": random_ids(READ)},
        {"ids": random_ids(NEW, seed=3), "attention_mask": columns((4, 5, 9), 23)},
        {"ids": random_ids(1, seed=4), "attention_mask": columns((4, 5), 24)},
        {"ids": random_ids(1, seed=5), "attention_mask": columns((), 25)},
        {"ids": random_ids(1, seed=7), "attention_mask": columns((25,), 26)},
        {"ids": random_ids(NEW, seed=6)},
    ]
    check(steps, family=family)


def test_padding_that_is_shown_later():
    """Over `full` as transformers does; a policy that evicts never stored it, and hides it on."""
    pads = torch.ones(2, READ, dtype=torch.long)
    pads[1, :6] = 0
    ids, ones = random_ids(READ, batch=2), torch.ones(2, READ + NEW)
    steps = [
        {"ids": ids, "attention_mask": pads},
        {"ids": ids[:, :NEW], "attention_mask": ones},
    ]
    theirs, ours = both(steps, num_hidden_layers=1)  # in which padding has the same keys
    assert torch.allclose(theirs[1], ours[1], atol=2e-5)
    model, found = fresh(), []
    for mask in (None, ones):
        cache = kvtool.build_cache(model, "h2o", 30)
        model(ids, attention_mask=pads, past_key_values=cache)
        found.append(model(ids[:, :NEW], attention_mask=mask, past_key_values=cache).logits)
    assert torch.equal(*found)
    ones[1, 10:12] = 0
    cache = kvtool.build_cache(model, "h2o", 30)
    model(ids, attention_mask=pads, past_key_values=cache)
    with pytest.raises(kvtool.KvtoolError, match="hides or shows other tokens"):
        model(ids[:, :NEW], attention_mask=ones, past_key_values=cache)


@pytest.mark.parametrize("new", [NEW, 1])
def test_policies_that_evict_refuse_to_hide_what_was_read(new):
    model = fresh()
    cache = kvtool.build_cache(model, "h2o", 30)
    model(random_ids(READ), past_key_values=cache)
    with pytest.raises(kvtool.KvtoolError, match="hides or shows other tokens of the text"):
        model(random_ids(new), attention_mask=columns((4,), READ + new), past_key_values=cache)
    with pytest.raises(kvtool.KvtoolError, match="hides or shows other tokens of the text"):
        model(random_ids(1), attention_mask=columns((READ,), READ + 1), past_key_values=cache)


def test_generate_goes_on_with_what_it_hides():
    ids = random_ids(30)
    settings = {"max_new_tokens": 6, "do_sample": False}
    found = []
    for ours in (False, True):
        model = fresh()
        cache = kvtool.build_cache(model, "full") if ours else DynamicCache(config=model.config)
        model(ids[:, :READ], past_key_values=cache)
        mask = columns(range(2, 12), 30)
        found.append(model.generate(ids, attention_mask=mask, past_key_values=cache, **settings))
        found.append(model(found[-1][:, -1:], past_key_values=cache).logits)
    assert torch.equal(found[0], found[2])
    assert torch.allclose(found[1], found[3], atol=2e-5)
    with torch.no_grad():
        plain = fresh().generate(ids, **settings)
    assert not torch.equal(plain, found[0]), "hiding ten tokens changes nothing here"


@pytest.mark.parametrize("policy", ["h2o(positions=cache)", "expected+int8"])
def test_positions_that_do_not_count_on_are_refused_where_a_policy_goes_by_them(policy):
    model, pads = fresh(head_dim=32), torch.ones(2, READ, dtype=torch.long)
    pads[1, :6] = 0
    counted = (pads.cumsum(1) - 1).clamp(min=0)
    packed = torch.cat([torch.arange(12), torch.arange(8)])[None].expand(2, -1)
    ids = random_ids(READ, batch=2)
    for place in (None, counted):
        cache = kvtool.build_cache(model, policy, 12)
        model(ids, attention_mask=pads, position_ids=place, past_key_values=cache)
    with pytest.raises(kvtool.KvtoolError, match="do not count them one by one"):
        model(ids[:, :2], position_ids=torch.full((2, 2), 20), past_key_values=cache)
    with pytest.raises(kvtool.KvtoolError, match="do not count them one by one"):
        model(ids, position_ids=packed, past_key_values=kvtool.build_cache(model, policy, 12))
    model(ids, position_ids=packed, past_key_values=kvtool.build_cache(model, "h2o", 12))


def test_rows_packed_by_length_are_refused():
    model = fresh()
    cache = kvtool.build_cache(model, "full")
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    for name in ("cu_seq_lens_q", "seq_idx"):
        with pytest.raises(kvtool.KvtoolError, match=f"`{name}` packs several texts"):
            model(random_ids(9), past_key_values=cache, **{name: ends})


def test_a_reserved_slot_is_no_column():
    steps = [
        {"ids": random_ids(READ)},
        {"ids": random_ids(1, seed=3), "attention_mask": as_float(torch.ones(1, 1, 1, 21).bool())},
    ]
    theirs, _ = both(steps)
    model = fresh()
    cache = kvtool.build_cache(model, "full")
    prefill(model, cache, steps[0]["ids"])
    assert cache.fix_shapes(9)
    found = model(steps[1]["ids"], attention_mask=steps[1]["attention_mask"], past_key_values=cache)
    assert torch.allclose(found.logits, theirs[1], atol=2e-5)


def test_weights_under_a_bias_against_a_loop():
    generator = torch.Generator().manual_seed(2)
    query, keys = (
        torch.randn(shape, generator=generator) for shape in ((1, 2, 2, 3, 4), (1, 2, 5, 4))
    )
    bias, sinks = torch.randn(1, 1, 2, 3, 5, generator=generator), torch.randn(2, 2)
    for cap, sink in ((None, None), (2.0, sinks)):
        found = biased_weights(query, keys, bias, scale=0.5, softcap=cap, sinks=sink)
        for head, member, row in torch.cartesian_prod(
            torch.arange(2), torch.arange(2), torch.arange(3)
        ):
            logits = []
            for key in range(5):
                logit = 0.5 * float(query[0, head, member, row] @ keys[0, head, key])
                logit = logit if cap is None else cap * float(torch.tensor(logit / cap).tanh())
                logits.append(logit + float(bias[0, 0, member, row, key]))
            own = [] if sink is None else [float(sink[head, member])]
            right = torch.tensor(logits + own).softmax(0)[:5]
            assert torch.allclose(found[0, head, member, row], right, atol=1e-6)
