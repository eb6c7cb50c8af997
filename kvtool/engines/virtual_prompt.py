"""Export a compressed cache: as slots that an engine loads in place of a prompt.

The engine places the B slots of a cache at positions 0 .. B - 1, and the question at B and on. In
kvtool the question is at N, the number of tokens read. RoPE attention depends on distances
alone. So every key is rotated by the one constant B - N, and each distance to the question stays
what it is in kvtool. With `positions=cache` a key is rotated to its place among the kept ones.

A layer with a sliding window holds the last tokens of the text. They are put into the last slots,
which is where vLLM looks for them. The slots before are outside of the window, and empty.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvtool.cache.features.calidrop import Calibration
from kvtool.cache.files.format import check_one_process, weights_labels
from kvtool.cache.hooks.attachment import uncompiled
from kvtool.cache.hooks.probes import find_rotations
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.tensor_files.tensor_file import digest_of
from kvtool.cache.whole.cache import KVCache
from kvtool.cache.whole.layers import attention_layers
from kvtool.engines.llamacpp.format import refuse_family
from kvtool.engines.virtual_text import virtual_text
from kvtool.engines.vllm.format import IDS, KIND, SCHEMA, facts_of
from kvtool.engines.vllm.ids import FEWEST, virtual_ids
from kvtool.errors import KvtoolError, UsageError, printable
from kvtool.identity import config_hash
from kvtool.maths.rotation import Rotation
from kvtool.model_shape import FREE, SLIDING, layer_kinds, stores_latents
from kvtool.models.chat import Frame, TemplateFrame, make_frame
from kvtool.policies.evicted.calidrop import CaliDrop
from kvtool.policies.numbers import SHIFT
from kvtool.policies.policy import Policy
from kvtool.transformers_versions import kv_sharing_layers
from kvtool.version import VERSION

NAMES = {"vllm": "vLLM", "llamacpp": "llama.cpp", "mlx": "mlx-lm"}
"""Engines that load an exported cache, by their word on the command line."""

_BASE = 10000.0
_BY_PLACE = "llama_4_scaling_beta"


@dataclass(frozen=True)
class VirtualPrompt:
    """An exported cache: what its file holds.

    Attributes:
        family: the type of the text model.
        notes: what its user has to know, in lines.
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    family: str
    notes: tuple[str, ...] = ()

    @property
    def ids(self) -> list[int]:
        """The virtual ids, one a slot."""
        return self.tensors[IDS].tolist()

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(tensor.nbytes for name, tensor in self.tensors.items() if name != IDS)

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, (kv_heads, slots, head_dim)."""
        names = [name.removesuffix(".keys") for name in self.tensors if name.endswith(".keys")]
        return [(self.tensors[f"{name}.keys"], self.tensors[f"{name}.values"]) for name in names]


def export_cache(
    cache: KVCache,
    *,
    to: str = "vllm",
    model: PreTrainedModel | None = None,
    model_name: str | None = None,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
) -> VirtualPrompt:
    """Make of a cache what an engine loads in place of a prompt.

    Args:
        to: the engine, of `NAMES`.
        model: that filled the cache; by default the one it was built for.
        model_name: what to call the model; by default its own name or path.
        tokenizer: to note how a question goes on with an open chat message.
        dtype: of the exported keys and values; None: that of the model.

    Raises:
        UsageError: a cache, policy or model that an engine cannot serve, with the reason.
        KvtoolError: the cache is empty, or was interrupted in a forward.
    """
    model = uncompiled(model) if model is not None else cache.link.model()
    if model is None:
        raise KvtoolError("the model that this cache was built for is gone; pass it as `model`")
    engine = NAMES[to]
    refuse_policy(cache.policy, to)
    refuse_model(model, to)
    _check_text(cache, engine)
    found = _read_layers(cache, engine)
    slots = _count_slots(cache, found, engine)
    layers = attention_layers(cache.config)
    measured = find_rotations(model, layers, f"export to {engine}")
    rotations = dict(zip(layers, measured, strict=True))
    seen = cache.tokens_seen()[0]
    tensors = {}
    for i, held in found.items():
        keys = _rotated(held, rotations[i], slots, seen)
        for name, states in (("keys", keys), ("values", held.values)):
            placed = states.new_zeros((states.shape[1], slots, states.shape[3]))
            placed[:, slots - held.count :] = states[0]
            tensors[f"layer.{i}.{name}"] = placed.to(dtype or model.dtype).cpu().contiguous()
    digest = digest_of(tensors, {})
    config = model.config.get_text_config(decoder=True)
    ids = virtual_ids(digest, slots, config.vocab_size, _special_ids(model))
    around, frame = _around_question(cache, tokenizer)
    if to == "llamacpp" and tokenizer is not None:
        worded = virtual_text(digest, slots, tokenizer, frame)
        if worded is not None:
            (text, ids), system = worded, _system(cache)
            around |= {"text": text} | ({} if system is None else {"system": system})
    first = tensors[f"layer.{layers[0]}.keys"]
    metadata = {
        "kind": KIND,
        "schema_version": SCHEMA,
        "digest": digest,
        "slots": str(slots),
        "tokens_seen": str(seen),
        "policy": str(cache.policy),
        "model": model_name or model.config._name_or_path or model.config.model_type,
        "config_hash": config_hash(model.config),
        **weights_labels(model),
        "layers": str(len(layers)),
        "kv_heads": str(first.shape[0]),
        "head_dim": str(first.shape[2]),
        "dtype": str(first.dtype).removeprefix("torch."),
        "facts": json.dumps(facts_of(config)),
        "kvtool": VERSION,
        **around,
    }
    metadata = {name: printable(text) for name, text in metadata.items()}
    tensors[IDS] = torch.tensor(ids)
    return VirtualPrompt(tensors, metadata, config.model_type, _notes(cache, tokenizer, engine))


# ---- refusals


def refuse_policy(policy: Policy, to: str = "vllm") -> None:
    """Refuse a policy whose decoded tokens an engine would treat otherwise.

    Raises:
        UsageError: a reader, or CaliDrop.
    """
    reason = None
    if policy.reader is not None:
        reason = f"reads a part of the cache at each step, and {NAMES[to]} reads all of it"
    elif isinstance(policy.on_evict, CaliDrop):
        reason = f"corrects each step by evicted tokens, which {NAMES[to]} does not have"
    if reason is not None:
        hint = "compress with a policy that evicts, such as snapkv, expected or keydiff"
        raise UsageError(f"`{policy}` {reason}", hint=hint)


def refuse_model(model: PreTrainedModel, to: str = "vllm") -> None:
    """Refuse a model whose cache is more than keys and values of equal counts.

    Raises:
        UsageError: latents, recurrences, chunks, shared layers, scales that depend on positions;
            sliding windows but for vLLM.
    """
    config = model.config.get_text_config(decoder=True)
    kinds, reason = layer_kinds(config), None
    other = next((kind for kind in kinds if kind not in FREE + SLIDING or "hybrid" in kind), None)
    if stores_latents(config):
        reason = "stores latents in place of keys"
    elif kv_sharing_layers(config):
        reason = "has layers that read the keys of another layer"
    elif other is not None:
        reason = f"has `{other}` layers, whose states are no keys and values"
    elif "chunked_attention" in kinds:
        reason = "has layers that attend to chunks of the text, which move with the positions"
    elif getattr(config, "attn_temperature_tuning", False) or _scales_by_place(config):
        reason = "scales its queries by their positions"
    elif to != "vllm" and any(kind in SLIDING for kind in kinds):
        reason = "has layers with a sliding window, which only an export to vLLM holds"
    if reason is not None:
        asked = f"export to {NAMES[to]}"
        raise UsageError(f"{asked} is not available for `{config.model_type}`: it {reason}")
    if to == "llamacpp":
        refuse_family(config.model_type)


def _scales_by_place(config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None) or {}
    return _BY_PLACE in rope


def _check_text(cache: KVCache, engine: str) -> None:
    """Refuse a cache that holds no text, several, or less than is known of its text."""
    cache.check_whole()
    check_one_process(cache)
    known, first, reason = cache.input_ids, cache.first_layer, None
    if cache.get_seq_length() == 0:
        reason = "the cache is empty: nothing has been fed to it yet"
    elif first.batch_size > 1:
        reason = f"the cache holds {first.batch_size} texts, and a file for {engine} holds one"
    elif known is not None and known.shape[1] > first.seen:
        reason = "the last token of this cache was generated and has not been read"
    if reason is not None:
        raise UsageError(reason, hint="export a cache of kvtool compress")


@dataclass(frozen=True)
class _Held:
    """What a layer holds, in ascending position.

    Attributes:
        keys, values: (1, kv_heads, count, head_dim), dequantised.
        turn: (1, kv_heads, count) how far each key has to be rotated to its place among the kept
            ones, with `positions=cache`; None: keys are at the positions of the text.
        free: whether the budget bounds it; else its window does.
    """

    keys: Tensor
    values: Tensor
    turn: Tensor | None
    free: bool

    @property
    def count(self) -> int:
        return self.keys.shape[2]


def _read_layers(cache: KVCache, engine: str) -> dict[int, _Held]:
    """Read all layers, by index."""
    return {layer.index: _read_layer(layer, cache.policy, engine) for layer in cache.slot_layers}


def _read_layer(layer: SlotLayer, policy: Policy, engine: str) -> _Held:
    slots = layer.sorted_slots()
    counts = (slots.positions >= 0).sum(-1).flatten().tolist()
    if len(set(counts)) > 1:
        raise _unequal(policy, f"the heads of layer {layer.index}", counts, engine)
    assert Calibration.of(layer) is None, "which is refused by its policy"
    kept = slice(counts[0])
    stored = {name: tensor[:, :, kept] for name, tensor in slots.stored.items()}
    keys, values = layer.form.dequantise(stored)
    turn = slots.state[SHIFT][:, :, kept] if SHIFT in slots.state else None
    return _Held(keys, values, turn, layer.window is None)


def _count_slots(cache: KVCache, layers: dict[int, _Held], engine: str) -> int:
    """Return how many slots the file has."""
    free = [held.count for held in layers.values() if held.free]
    windows = [held.count for held in layers.values() if not held.free]
    slots = max(free or windows)
    if len(set(free)) > 1:
        raise _unequal(cache.policy, "the layers", free, engine)
    if windows and max(windows) > slots:
        raise UsageError(
            f"layers with a sliding window hold {max(windows)} tokens, and the budget leaves room "
            f"for {slots}",
            hint=f"-b {max(windows)} or more",
        )
    if slots < FEWEST:
        raise UsageError(
            f"the cache holds {slots} tokens, and {FEWEST} are the fewest for {engine}"
        )
    return slots


def _unequal(policy: Policy, what: str, counts: list[int], engine: str) -> UsageError:
    return UsageError(
        f"{what} hold {min(counts)} to {max(counts)} tokens under `{policy}`, and {engine} has "
        "one length for all of them",
        hint="compress with equal budgets: snapkv, expected or keydiff, and no plan",
    )


# ---- keys, ids and notes


def _rotated(held: _Held, rotation: Rotation | None, slots: int, seen: int) -> Tensor:
    """Rotate keys to where the engine has their slots."""
    if rotation is None:
        return held.keys
    if held.turn is not None:
        return rotation.shift(held.keys, held.turn.float() + (slots - held.count))
    by = rotation.rotation_ahead(slots - seen, [0])  # in float64: texts may be long
    return rotation.rotate(held.keys, by)


def _special_ids(model: PreTrainedModel) -> set[int]:
    """Return the token ids that configurations name: begins and ends of texts, images .."""
    found = set()
    for config in (model.config, model.config.get_text_config(), model.generation_config):
        for name, value in ({} if config is None else config.to_dict()).items():
            if name.endswith(("token_id", "token_ids", "token_index")):
                values = value if isinstance(value, list) else [value]
                found |= {each for each in values if isinstance(each, int)}
    return found


def _around_question(cache: KVCache, tokenizer: Any) -> tuple[dict[str, str], Frame]:
    """Return the texts around a question that goes on with an open message, and its frame."""
    if cache.chat != "open" or tokenizer is None:
        return {}, Frame()
    frame = make_frame(tokenizer, "auto", chat=True, system=_system(cache))
    if not isinstance(frame, TemplateFrame):
        return {}, frame
    return {"question_before": "\n", "question_after": frame.closing}, frame


def _system(cache: KVCache) -> str | None:
    """Return the system message that a cached conversation begins with."""
    history = cache.text.history
    said = history.messages[:1] if history is not None else ()
    return next((each.content for each in said if each.role == "system"), None)


def _notes(cache: KVCache, tokenizer: Any, engine: str) -> tuple[str, ...]:
    notes = []
    if cache.policy.when == "always":
        notes.append(
            f"note: `{cache.policy}` evicts while it decodes; {engine} keeps all that follows, "
            "so answers may differ from those of kvtool generate"
        )
    if cache.chat == "open" and tokenizer is None:
        notes.append("note: the text ends in an open chat message; the question has to close it")
    base = (getattr(cache.config, "rope_parameters", None) or {}).get("rope_theta", _BASE)
    if engine == NAMES["mlx"] and base != _BASE:
        notes.append(
            f"note: the RoPE base is {base:g}; mlx-lm reads it from `rope_theta` in config.json, "
            f"and takes {_BASE:g} without an error where it is under `rope_parameters` alone"
        )
    return tuple(notes)
