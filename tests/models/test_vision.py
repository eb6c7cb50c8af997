"""Models that read images: the cache of their text is compressed, by their own `generate`."""

import functools
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, DynamicCache, PreTrainedConfig

import kvtool
from tests.models.families import LOCAL, Watched, check_held, kept_before
from tests.models.tiny import VOCABULARY, tiny_config, tiny_model
from tests.tiers import first

IMAGE, BEGIN, NEW, BUDGET = VOCABULARY - 1, VOCABULARY - 2, 6, 14
SIDE, PATCH = 4, 14  # patches of an image's side before they are merged by two, pixels of a patch's
IMAGES = {"gemma3": 16, "qwen2_5_vl": 4, "qwen3_vl": 4}  # tokens of an image


@functools.cache
def config_of(family: str) -> PreTrainedConfig:
    config = tiny_config(family)
    config.image_token_id = IMAGE
    if family == "gemma3":
        config.mm_tokens_per_image = IMAGES[family]
    else:
        config.vision_start_token_id = BEGIN
    return config


def prompt_of(family: str) -> dict[str, Any]:
    """A prompt of words, an image, words, another image and more words."""
    source = torch.Generator().manual_seed(1)
    words = [torch.randint(2, BEGIN, (n,), generator=source) for n in (9, 7, 10)]
    image = torch.tensor([BEGIN] + [IMAGE] * IMAGES[family])
    ids = torch.cat([words[0], image, words[1], image, words[2]])[None]
    seen = (ids == IMAGE).long()
    if family == "gemma3":
        pixels = torch.randn(2, 3, SIDE * 2 * PATCH, SIDE * 2 * PATCH, generator=source)
        return {"input_ids": ids, "pixel_values": pixels, "token_type_ids": seen}
    vision = config_of(family).vision_config
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(2 * SIDE * SIDE, size, generator=source)
    grid = torch.tensor([[1, SIDE, SIDE]] * 2)
    return {
        "input_ids": ids,
        "pixel_values": pixels,
        "image_grid_thw": grid,
        "mm_token_type_ids": seen,
    }


def model_of(family: str, kernel: str = "eager"):
    return tiny_model(config_of(family), kernel, AutoModelForImageTextToText)


def generated(model, family: str, cache, **given) -> tuple[list[int], torch.Tensor]:
    """Tokens that `generate` adds, and the logits that they were chosen from."""
    out = model.generate(
        **(given or prompt_of(family)),
        past_key_values=cache,
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[0, -NEW:].tolist(), torch.cat(out.logits)


@pytest.mark.parametrize("family", first(1, IMAGES))
def test_a_budget_that_fits_reads_images_like_the_models_own_cache(family):
    plain = model_of(family)
    tokens, expected = generated(plain, family, DynamicCache(config=plain.config))
    model = kvtool.attach(model_of(family))
    for policy in ("full", "h2o"):
        ours = generated(model, family, kvtool.build_cache(model, policy, 512))
        assert ours[0] == tokens
        torch.testing.assert_close(ours[1], expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("policy", "family"),
    [
        ("h2o", "gemma3"),
        pytest.param("h2o", "qwen2_5_vl", marks=pytest.mark.exhaustive),
        pytest.param("snapkv(window=4)", "qwen3_vl", marks=pytest.mark.exhaustive),
    ],
)
def test_a_small_budget_is_the_model_that_sees_what_was_kept(family, policy):
    model = kvtool.attach(model_of(family))
    cache, kept = kvtool.build_cache(model, policy, BUDGET), []
    watch = model.get_decoder().register_forward_pre_hook(
        lambda *given: kept.append(kept_before(cache))
    )
    tokens, ours = generated(model, family, cache)
    watch.remove()
    if policy == "h2o":
        check_held(cache, BUDGET)
    plain, forwards = model_of(family, "kept"), iter(kept)
    LOCAL.kept, LOCAL.owners, LOCAL.layer = {}, [], None  # while images are looked at

    def before(module, args, given):
        LOCAL.kept, LOCAL.new = next(forwards), given["inputs_embeds"].shape[1]
        LOCAL.owners, LOCAL.layer = [], None

    plain.get_decoder().register_forward_pre_hook(before, with_kwargs=True)
    expected = generated(plain, family, Watched(config=plain.config.get_text_config()))
    assert tokens == expected[0]
    torch.testing.assert_close(ours, expected[1], atol=2e-4, rtol=2e-4)
    whole = generated(model, family, kvtool.build_cache(model, "full"))[1]
    assert (whole - ours).abs().max() > 1e-2  # something that was evicted is missed


def test_places_in_the_cache_are_refused_where_images_have_rows_and_columns():
    with pytest.raises(kvtool.KvtoolError, match="by rows and columns"):
        kvtool.build_cache(model_of("qwen2_5_vl"), "streaming(positions=cache)", BUDGET)


def test_a_prompt_with_images_seen_from_both_sides_is_not_split_inside_a_layer():
    model = kvtool.attach(model_of("gemma3"))
    cache = kvtool.build_cache(model, "h2o", BUDGET, prefill="block:16")
    with pytest.raises(kvtool.KvtoolError, match="images from both sides"):
        generated(model, "gemma3", cache)


@pytest.mark.parametrize("family", first(1, ["gemma3", "qwen2_5_vl"]))
def test_a_padded_prompt_with_an_image_is_the_prompt_alone(family):
    """The second row has fewer words, and its padding lies before them."""
    model, both = kvtool.attach(model_of(family)), prompt_of(family)
    width = both["input_ids"].shape[1]
    start = 10  # where the first image begins
    cut = {name: each[:, start - 1 :] for name, each in both.items() if each.shape[-1] == width}
    alone = both | cut
    rows = {
        name: torch.cat([both[name], torch.nn.functional.pad(each, (start - 1, 0))])
        for name, each in cut.items()
    }
    rows["attention_mask"] = torch.ones(2, width, dtype=torch.long)
    rows["attention_mask"][1, : start - 1] = 0
    images = {name: torch.cat([both[name]] * 2) for name in both if name not in cut}
    for policy in ("h2o", "snapkv(window=12)"):
        cache = kvtool.build_cache(model, policy, BUDGET)
        together = generated(model, family, cache, **rows, **images)[1].view(NEW, 2, -1)
        for row, given in enumerate((both, alone)):
            cache = kvtool.build_cache(model, policy, BUDGET)
            own = generated(model, family, cache, **given)[1]
            torch.testing.assert_close(together[:, row], own, atol=2e-4, rtol=2e-4)
