"""What becomes of every causal language model that transformers has, tried on tiny ones.

A family works if
- the policy `full` gives the logits of the model's own attention over a `DynamicCache`,
- `h2o` at a small budget gives those of the plain model that attends, over a cache that evicts
  nothing, to just the tokens that were kept, and holds no more slots than its budget.

Otherwise it has to be refused, by one line that says why. `python -m tests.models.families` prints
the table of `kvtool/models/reference.md`; names of families after it try only these.
"""

from __future__ import annotations

import inspect
import sys
import threading
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
    logging,
)
from transformers.masking_utils import AttentionMaskInterface, eager_mask

import kvtool
from kvtool.cache.hooks.families import check_supported
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.whole.cache import KVCache
from kvtool.model_shape import RECURRENT, SLIDING, layer_kinds, stores_latents
from kvtool.transformers_versions import eager_families, kv_sharing_layers
from tests.coded import decoded_slots
from tests.models.tiny import VOCABULARY, families, takes, tiny_config, tiny_model

BLOCKS = (21, 9, 1, 1, 5, 1)  # tokens of each forward: a prompt in two, turns, decoded ones
BUDGET = 14
TOLERANCE = 2e-4
ONE_CODE = 0.01  # where rounding brings a number to the next code
LOCAL = threading.local()


@dataclass(frozen=True)
class Row:
    """What became of a family.

    Attributes:
        verdict: `works`, `refused`, `not tried` where no tiny model can be made, or `wrong` where
            it is neither, which is a defect.
        says: what a user should know: notes, the reason of a refusal, or the defect.
    """

    family: str
    verdict: str
    says: str


# ---- the plain model that sees what was kept


class Watched(DynamicCache):
    """A cache that evicts nothing and says which layer the attention that comes is of."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        key, value = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        LOCAL.layer = layer_idx
        LOCAL.owners.append((key, layer_idx))  # held, so that no other key has its identity
        return key, value


def _owner(key: Tensor) -> int | None:
    """The layer whose stored keys these are; latents are expanded after they come."""
    for stored, layer in LOCAL.owners:
        if stored is key:
            return layer
    return LOCAL.layer


def kept_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs
) -> tuple[Tensor, Tensor | None]:
    """The model's own eager attention, of all keys but those that were evicted."""
    layer, LOCAL.layer = _owner(key), None
    attention_mask = kept_mask(attention_mask, layer, *query.shape[1:3], key.shape[2])
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, key, value, attention_mask, **kwargs)


def kept_mask(
    mask: Tensor | None, layer: int | None, heads: int, q_len: int, keys: int
) -> Tensor | None:
    """Add to a mask, 0 or the lowest number, that evicted tokens are not seen.

    Returns:
        (batch, heads, q_len, keys); the mask itself where the layer evicts nothing.
    """
    kept = LOCAL.kept.get(layer)
    if kept is None:
        return mask
    past = keys - LOCAL.new
    seen = torch.zeros(*kept.shape[:2], keys, dtype=torch.bool)
    seen.scatter_(2, torch.where(kept < 0, past, kept), True)  # a new one, which is seen anyway
    seen[:, :, past:] = True
    seen = seen.repeat_interleave(heads // kept.shape[1], 1)[:, :, None]
    lowest = torch.finfo(torch.float32).min
    if mask is None:
        rows = torch.arange(keys - q_len, keys)[:, None]
        mask = torch.zeros(q_len, keys).masked_fill_(torch.arange(keys) > rows, lowest)
    return mask.masked_fill(~seen, lowest)


def _mask_module(module: nn.Module, args: tuple, given: dict) -> tuple[tuple, dict]:
    """Mask the attention of a family that has no interface for it."""
    mask, hidden = given["attention_mask"], args[0] if args else given["hidden_states"]
    heads = module.config.num_attention_heads
    kept = kept_mask(mask, module.layer_idx, heads, hidden.shape[1], mask.shape[-1])
    return args, given | {"attention_mask": kept}


def kept_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A model that attends to what was kept only."""
    if config.model_type not in eager_families():
        return tiny_model(config, "kept")
    model = tiny_model(config)
    for name, module in model.named_modules():
        if name.endswith(("self_attention", ".attn")) and hasattr(module, "layer_idx"):
            module.register_forward_pre_hook(_mask_module, with_kwargs=True)
    return model


AttentionInterface.register("kept", kept_attention)
AttentionMaskInterface.register("kept", eager_mask)


def fed(model: PreTrainedModel, cache: Any, start: int, ids: Tensor, **given) -> Tensor:
    """Feed a block and return its last logits, (batch, vocab)."""
    if takes(model, "position_ids"):
        given["position_ids"] = torch.arange(start, start + ids.shape[1])[None]
    out = model(input_ids=ids, past_key_values=cache, use_cache=True, **given)
    return out.logits[:, -1].float()


def tokens() -> list[tuple[int, Tensor]]:
    """Where each block begins, and its tokens."""
    source = torch.Generator().manual_seed(3)
    ids = torch.randint(2, VOCABULARY, (1, sum(BLOCKS)), generator=source)
    starts = [sum(BLOCKS[:i]) for i in range(len(BLOCKS))]
    return [(start, ids[:, start : start + n]) for start, n in zip(starts, BLOCKS, strict=True)]


def plain_logits(config: PreTrainedConfig) -> Tensor:
    """Logits of the model's own attention over a `DynamicCache`."""
    model = tiny_model(config)
    cache = DynamicCache(config=model.config)
    return torch.cat([fed(model, cache, *block) for block in tokens()])


def kept_before(cache: KVCache) -> dict[int, Tensor]:
    """Positions that every layer with a free budget holds, (batch, kv_heads, slots)."""
    free = [layer for layer in cache.slot_layers if layer.window is None and layer.is_initialized]
    return {layer.index: cache.kept_positions(layer.index) for layer in free}


def evicted_logits(
    config: PreTrainedConfig, budget: int, policy: str = "h2o"
) -> tuple[Tensor, Tensor]:
    """Logits of a policy, and of the plain model under the mask of what it kept."""
    model, plain = kvtool.attach(tiny_model(config)), kept_model(config)
    cache, whole = kvtool.build_cache(model, policy, budget), Watched(config=plain.config)
    ours, expected = [], []
    for start, ids in tokens():
        LOCAL.kept, LOCAL.new = kept_before(cache), ids.shape[1]
        LOCAL.owners, LOCAL.layer = [], None
        expected.append(fed(plain, whole, start, ids))
        ours.append(fed(model, cache, start, ids))
        check_held(cache, budget + cache.policy.spare - 1)
    return torch.cat(ours), torch.cat(expected)


def coded_logits(config: PreTrainedConfig) -> tuple[Tensor, Tensor]:
    """Logits of `h2o+int8`, and of `h2o` over what the codes stand for."""
    model = kvtool.attach(tiny_model(config))
    coded = kvtool.build_cache(model, "h2o+int8", BUDGET)
    ours = torch.cat([fed(model, coded, *block) for block in tokens()])
    with decoded_slots("int8"):
        decoded = kvtool.build_cache(model, "h2o", BUDGET)
        return ours, torch.cat([fed(model, decoded, *block) for block in tokens()])


def check_held(cache: KVCache, budget: int) -> None:
    """Look at the tensors themselves: the budget, and one slot for the token that comes."""
    for layer in cache.layers:
        if isinstance(layer, SlotLayer) and layer.is_initialized:
            most = budget if layer.window is None else max(1, layer.window - 1)
            held = layer.keys.untyped_storage().nbytes()
            one = layer.keys[:, :, :1].nelement() * layer.keys.element_size()
            assert held <= (most + 1) * one, f"layer {layer.index} holds {held // one} slots"


# ---- the table

UNTRIED = {"gemma3n": "its image tower needs the package `timm`; its text model is `gemma3n_text`"}

README = Path(kvtool.__file__).parent / "models" / "reference.md"
MARKS = ("<!-- families -->", "<!-- /families -->")
MADE_WITH = "5.23.0"
"""The release of transformers whose families are in the table."""
HEAD = ("| family | | why, or what to know |", "|---|---|---|")


def told() -> list[str]:
    """Read the lines of the table in the page of the models."""
    text = README.read_text()
    return text.split(MARKS[0])[1].split(MARKS[1])[0].strip().splitlines()


def config_of(family: str) -> PreTrainedConfig:
    """Make a tiny configuration, or the default one of a family that is refused by it.

    Raises:
        KvtoolError: it is refused.
    """
    try:
        config = tiny_config(family)
    except (ValueError, StrictDataclassError):
        check_supported(CONFIG_MAPPING[family]())
        raise
    check_supported(config)
    return config


@torch.no_grad()
def judge(family: str) -> Row:
    """Try a family."""
    if family in UNTRIED:
        return Row(family, "not tried", UNTRIED[family])
    try:
        config = config_of(family)
        model = kvtool.attach(tiny_model(config))
        cache = kvtool.build_cache(model, "full")
    except kvtool.KvtoolError as error:
        return Row(family, "refused", str(error).splitlines()[0])
    except Exception as error:
        return Row(family, "wrong", "no tiny model: " + _line(error))
    try:
        expected = plain_logits(config)
        full = torch.cat([fed(model, cache, *block) for block in tokens()])
        if not _equal(full, expected):
            return Row(family, "wrong", f"full differs by {(full - expected).abs().max():.1e}")
        ours, masked = evicted_logits(config, BUDGET)
        if not _equal(ours, masked):
            return Row(family, "wrong", f"h2o differs by {(ours - masked).abs().max():.1e}")
        if _equal(ours, expected) and any(layer.window is None for layer in cache.slot_layers):
            return Row(family, "wrong", "nothing that was evicted is missed")
        coded, decoded = coded_logits(config)
        if not _equal(coded, decoded, ONE_CODE):
            return Row(family, "wrong", f"h2o+int8 differs by {(coded - decoded).abs().max():.1e}")
    except Exception as error:
        return Row(family, "wrong", _line(error))
    return Row(family, "works", "; ".join(says(model)))


def says(model: PreTrainedModel) -> list[str]:
    """Say what a user of a family that works should know, whatever the size of the model."""
    text = model.config.get_text_config(decoder=True)
    kinds = set(layer_kinds(text))
    facts = {
        "its own eager attention, watched by hooks": text.model_type in eager_families(),
        "stores latents (MLA), which are compressed": stores_latents(text),
        "layers that attend in chunks keep their chunk": "chunked_attention" in kinds,
        "layers with a window keep it": bool(kinds & set(SLIDING) - {"chunked_attention"}),
        "recurrent layers keep their state": bool(kinds & set(RECURRENT)),
        "layers that read the keys of another read what it keeps": bool(kv_sharing_layers(text)),
        "long texts have other RoPE factors, chosen once for a whole text": _rereads(model),
    }
    return [fact for fact, holds in facts.items() if holds]


def _rereads(model: PreTrainedModel) -> bool:
    """Whether transformers drops a family's cache where a text outgrows its RoPE factors."""
    source = inspect.getsource(type(model).prepare_inputs_for_generation)
    return "original_max_position_embeddings" in source


def _equal(ours: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> bool:
    scale = max(1.0, float(expected.abs().max()))
    return bool(torch.isfinite(ours).all()) and bool(
        ((ours - expected).abs() <= tolerance * scale).all()
    )


def _line(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {text[0]} ({where.filename.split('/')[-1]}:{where.lineno})"


def line(row: Row) -> str:
    """Print a row of the table."""
    return f"| `{row.family}` | {row.verdict} | {row.says} |"


def main(names: list[str]) -> None:
    """Print the table of some families, of all if none is named."""
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    print("\n".join(HEAD))
    for family in names or families():
        print(line(judge(family)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
