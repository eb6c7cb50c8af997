"""Check what a cache file holds, name by name, before a cache is filled with it.

A checksum tells that a file is as it was written, not that kvtool wrote it. So every tensor is held
against the policy (which names there are), the model (shapes, dtypes, size of the vocabulary) and
the others: what rows and heads hold, and the numbers of tokens that they have seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvtool.cache import handover
from kvtool.cache.cache import KVCache
from kvtool.cache.slots import SlotLayer
from kvtool.errors import KvtoolError
from kvtool.model_shape import RECURRENT, LayerShape, layer_kinds, layer_shapes
from kvtool.policies.evicted.calidrop import GATHERED, CaliDrop
from kvtool.policies.evicted.merging import Merging
from kvtool.policies.numbers import SHIFT
from kvtool.sizes import MOST_TOKENS

_TEXTS = ("policy", "budget", "prefill", "model", "config_hash", "weights", "kvtool")
_WEIGHED = {"query": True, "out": True, "lse": False}  # of calibration: whether it has channels
_EITHER, _PLACES = (torch.float32, torch.float64), (torch.int64, torch.int32)
_COUNTED = ("steps", "recomputed", "calibrated")


@torch.no_grad()
def ask_recurrent(model: PreTrainedModel) -> list[Mapping[str, Tensor]]:
    """Read one token to find the states of each layer's recurrence by name, of one row."""
    if not any(kind in RECURRENT for kind in layer_kinds(model.config)):
        return [{} for _ in layer_kinds(model.config)]
    attachment, form = handover.attachment(model), (model.device, model.dtype)
    if attachment is not None and form in attachment.recurrent:
        return attachment.recurrent[form]
    cache = DynamicCache(config=model.config)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    model(input_ids=token, past_key_values=cache, use_cache=True)
    states: list[Mapping[str, Tensor]] = [recurrent_states(layer) for layer in cache.layers]
    if attachment is not None:
        attachment.recurrent[form] = states
    return states


def recurrent_states(layer: object) -> dict[str, Tensor]:
    """Return the states of a layer with a recurrence, by their names in a file."""
    states = {}
    for i in range(getattr(layer, "number_of_states", 0)):
        if layer.is_conv_states_initialized[i]:
            states[f"convolution.{i}"] = layer.conv_states[i]
        if layer.is_recurrent_states_initialized[i]:
            states[f"recurrence.{i}"] = layer.recurrent_states[i]
    return states


def check_metadata(path: Path, metadata: Mapping[str, str]) -> None:
    """Refuse a file that lacks a text, or whose counts of tokens are none.

    Raises:
        KvtoolError: the first such entry.
    """
    for name in _TEXTS:
        if name not in metadata:
            raise bad_file(path, f"`{name}` is missing")
    counts = []
    for name in ("tokens_seen", "seen"):
        text = metadata.get(name, "")
        if not (text.isascii() and text.isdecimal() and len(text) <= 10):
            raise bad_file(path, f"`{name}` is no number of tokens")
        counts.append(int(text))
    if not 1 <= counts[0] <= counts[1] <= MOST_TOKENS:
        raise bad_file(path, f"{counts[0]} tokens of {counts[1]} seen")


def bad_file(path: Path, what: str) -> KvtoolError:
    """Return the error of a file that is whole and cannot be a cache."""
    return KvtoolError(f"`{path}` is not a sound cache file: {what}")


def check_tensors(
    path: Path,
    metadata: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    cache: KVCache,
    model: PreTrainedModel,
) -> None:
    """Refuse tensors that no cache of this kind has written.

    Args:
        metadata: of the file, checked.
        tensors: of the file, on the CPU.
        cache: an empty one, made as the metadata say.

    Raises:
        KvtoolError: the first tensor that is missing or too many, or does not fit.
    """
    _Check(path, metadata, tensors, cache, model).run()


class _Check:
    """Takes one tensor after the other off the list; what is left at the end is too many."""

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, str],
        tensors: Mapping[str, Tensor],
        cache: KVCache,
        model: PreTrainedModel,
    ) -> None:
        self.path, self.left, self.cache, self.model = path, dict(tensors), cache, model
        self.tokens, self.seen = int(metadata["tokens_seen"]), int(metadata["seen"])
        self.batch = 0
        self.lengths: Tensor | None = None

    def run(self) -> None:
        first = self.cache.first_layer.index
        keys = self.left.get(f"layer.{first}.keys")
        if keys is None or keys.dim() != 4 or keys.shape[0] < 1:
            raise self.bad(f"layer.{first}.keys", "are missing or have another shape")
        self.batch = keys.shape[0]
        self._check_text()
        shapes = layer_shapes(self.model.config)
        for layer in self.cache.slot_layers:
            shape = shapes[layer.index]
            if shape is not None:
                self._check_slots(layer, shape)
        for i, states in enumerate(ask_recurrent(self.model)):
            for name, state in states.items():
                whole = f"layer.{i}.{name}"
                if whole in self.left or not isinstance(self.cache.layers[i], SlotLayer):
                    self.take(whole, (self.batch, *state.shape[1:]), state.dtype)
        for name in self.left:
            raise self.bad(name, "belongs to no cache of this policy and model")

    def bad(self, name: str, what: str) -> KvtoolError:
        return bad_file(self.path, f"`{name}` {what}")

    def take(
        self,
        name: str,
        shape: tuple[int | None, ...],
        dtype: torch.dtype | tuple[torch.dtype, ...],
        low: float | None = None,
        high: float | None = None,
        *,
        unknown: bool = False,
    ) -> Tensor:
        """Take a tensor off the list.

        Args:
            shape: None for a size that is free.
            dtype: one or several that it may be of.
            low, high: what its numbers may be, both included.
            unknown: whether numbers may be minus infinity.
        """
        tensor = self.left.pop(name, None)
        if tensor is None:
            raise self.bad(name, "is missing")
        fits = len(shape) == tensor.dim() and all(
            want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
        )
        dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
        if tensor.dtype not in dtypes or not fits:
            sizes = ["any" if size is None else size for size in shape]
            found, due = (tensor.dtype, list(tensor.shape)), (dtypes[0], sizes)
            told = "is {} {}, not {} {}".format(*found, *due)
            raise self.bad(name, told.replace("torch.", "").replace("'", ""))
        if tensor.dtype.is_floating_point:
            sound = tensor.isfinite() | (tensor == float("-inf")) if unknown else tensor.isfinite()
            if not sound.all():
                raise self.bad(name, "holds numbers that are not finite")
        if tensor.numel() and (
            (low is not None and tensor.min() < low) or (high is not None and tensor.max() > high)
        ):
            raise self.bad(name, "holds numbers out of their range")
        return tensor

    # ---- of the whole cache

    def _check_text(self) -> None:
        """Check lengths, tokens, logits and what is known of whole rows."""
        cache, batch = self.cache, self.batch
        if "lengths" in self.left:
            self.lengths = self.take("lengths", (batch,), torch.int64, 1, self.seen)
        longest = self.seen if self.lengths is None else int(self.lengths.max())
        if longest != self.tokens:
            what = f"rows have seen {longest} tokens, and `tokens_seen` is {self.tokens}"
            raise bad_file(self.path, what)
        config = self.model.config.get_text_config(decoder=True)
        if "input_ids" in self.left:
            ids = self.take("input_ids", (batch, None), torch.int64, 0, config.vocab_size - 1)
            if not 1 <= ids.shape[1] <= MOST_TOKENS:
                raise self.bad("input_ids", "hold no token")
        logits = (batch, self.model.get_output_embeddings().weight.shape[0])
        if "next_logits" in self.left:
            self.take("next_logits", logits, torch.float32, unknown=True)
        if cache.surprisals is not None:
            self.take("state.surprisal", (batch, self._kept(cache.first_layer)), torch.float32)
            self.take("state.next_logits", logits, (*_EITHER, self.model.dtype), unknown=True)
        free = [layer for layer in cache.slot_layers if layer.window is None]
        if cache.budgets.wait:
            self.take("spread.variance", (batch, len(free)), torch.float64, 0)
            self.take("spread.queries", (batch,), torch.int64, 1, self.seen)
            self.take("spread.held", (batch, len(free)), torch.int64, 0, self.seen)
        if cache.budgets.reads is not None:
            ends = self.left.get("read.ends")
            rows = batch if ends is not None and ends.numel() > 1 else 1
            self.take("read.ends", (rows,), torch.int64, 1, self.seen)
            self.take("read.reserve", (), torch.int64, 0, MOST_TOKENS)
        split = cache.policy.head_split
        if split is not None and split.ranking:
            self.left.pop("head_ranks", None)  # checked before the cache was made

    def _kept(self, layer: SlotLayer) -> int | None:
        positions = self.left.get(f"layer.{layer.index}.positions")
        return positions.shape[-1] if positions is not None and positions.dim() == 3 else None

    # ---- of a layer

    def _check_slots(self, layer: SlotLayer, shape: LayerShape) -> None:
        name, batch, heads = f"layer.{layer.index}", self.batch, shape.kv_heads
        slots = self._kept(layer)
        for part, dim in (("keys", shape.key_dim), ("values", shape.value_dim)):
            self.take(f"{name}.{part}", (batch, heads, slots, dim), self.model.dtype)
        positions = self.take(
            f"{name}.positions", (batch, heads, slots), torch.int64, -1, self.seen - 1
        )
        self._check_positions(f"{name}.positions", positions)
        for key in layer.policy.statistics:
            turns = key == SHIFT
            low = -MOST_TOKENS if turns else 0
            number = self.take(
                f"{name}.state.{key}", (batch, heads, slots), torch.float32, low, MOST_TOKENS
            )
            if turns and not torch.equal(number, number.round()):
                raise self.bad(f"{name}.state.{key}", "holds parts of a position")
        self._check_budget(layer, name, positions)
        on_evict = layer.policy.on_evict
        if isinstance(on_evict, Merging):
            for key, start in on_evict.start(batch, heads, torch.device("cpu")).items():
                kind = f"{name}.memory.{key}"
                found = self.left.get(kind)
                if found is not None and start.isnan().all():  # which stands for: none yet
                    self.left[kind] = found.nan_to_num(0.0, posinf=torch.inf, neginf=-torch.inf)
                self.take(kind, tuple(start.shape), start.dtype)
        if isinstance(on_evict, CaliDrop):
            self._check_calibration(f"{name}.calibration", on_evict, shape)
        if layer.policy.select_only and layer.window is None and f"{name}.marked" in self.left:
            marked = self.take(f"{name}.marked", (batch, heads, None), _PLACES, -1, self.seen - 1)
            self._check_ascending(f"{name}.marked", marked)

    def _check_positions(self, name: str, positions: Tensor) -> None:
        self._check_ascending(name, positions)
        if self.lengths is not None:
            over = positions >= self.lengths[:, None, None]
            if over.any():
                raise self.bad(name, "holds tokens that its row has not seen")

    def _check_ascending(self, name: str, positions: Tensor) -> None:
        ordered = positions.masked_fill(positions < 0, self.seen)
        before, after = ordered[..., :-1], ordered[..., 1:]
        if not ((before < after) | (before == self.seen)).all():
            raise self.bad(name, "are not in ascending order, empty slots last")

    def _check_budget(self, layer: SlotLayer, name: str, positions: Tensor) -> None:
        """Check what rows and heads may keep, and that they keep no more."""
        cache, score, batch = self.cache, layer.policy.score, self.batch
        found = self.left.get(f"{name}.budget")
        rows = batch if found is not None and found.numel() > 1 else 1
        budget = self.take(f"{name}.budget", (rows,), torch.int64, 0, MOST_TOKENS)
        if layer.window is not None and (budget != layer.window - 1).any():
            raise self.bad(f"{name}.budget", "is not the width of the layer's window")
        if score.when != "never" and layer.window is None and (budget < 1).any():
            raise self.bad(f"{name}.budget", "keeps no token")
        filled = (positions >= 0).sum(-1)
        split = layer.window is None and cache.policy.head_split is not None
        most = budget[:, None]
        uneven = self.lengths is not None
        if split and f"{name}.head_budgets" in self.left:
            most = self.take(
                f"{name}.head_budgets", (batch, positions.shape[1]), torch.int64, 0, MOST_TOKENS
            )
            uneven = True
        if score.when == "always" and (filled > most).any():
            raise self.bad(f"{name}.positions", "holds more tokens than its budget")
        if not uneven and (positions < 0).any():
            raise self.bad(f"{name}.positions", "has empty slots where no row or head is shorter")
        due = torch.tensor([self.seen]) if self.lengths is None else self.lengths
        if score.when == "never" and (filled != due[:, None]).any():
            raise self.bad(f"{name}.positions", "lacks tokens, and its policy keeps all")
        fixed = cache.budget is not None and cache.budget.tokens is not None
        own = cache.plan is not None or cache.policy.allocator is not None
        fixed = fixed and layer.window is None and not own and not cache.policy.budget_is_traffic
        if fixed and (budget != cache.budget.tokens).any():
            raise self.bad(f"{name}.budget", f"is not the cache's budget {cache.budget}")

    def _check_calibration(self, name: str, on_evict: CaliDrop, shape: LayerShape) -> None:
        """Check what a layer has set aside; nothing, or all of it."""
        batch, heads, kv_heads = self.batch, shape.heads, shape.kv_heads
        width = {"query": shape.key_dim, "out": shape.value_dim}
        for key, channels in _WEIGHED.items():
            sizes = (batch, heads, width[key]) if channels else (batch, heads)
            self.take(f"{name}.memory.{key}", sizes, torch.float32, unknown=key == "lse")
        for key in _COUNTED:
            self.take(f"{name}.memory.{key}", (batch, heads), torch.float32, 0)
        form = {"bf16": torch.bfloat16, "int8": torch.int8}.get(on_evict.store, self.model.dtype)
        for place in ("shelf", "gathered"):
            if not any(each.startswith(f"{name}.store.{place}.") for each in self.left):
                continue
            packed = place == "shelf"
            parts = []
            for dim in (shape.key_dim, shape.value_dim):
                parts.append((dim, form if packed else self.model.dtype))
                if packed and on_evict.store == "int8":
                    parts.append((1, torch.float32))
            first = self.left.get(f"{name}.store.{place}.0")
            slots = first.shape[2] if first is not None and first.dim() == 4 else None
            for i, (dim, dtype) in enumerate(parts):
                self.take(f"{name}.store.{place}.{i}", (batch, kv_heads, slots, dim), dtype)
            last = f"{name}.store.{place}.{len(parts)}"
            self.take(last, (batch, kv_heads, slots), _PLACES, -1, self.seen - 1)
            if slots == 0 or (not packed and slots > GATHERED):
                raise self.bad(last, f"sets {slots} tokens aside at a time")


def check_ranks(path: Path, tensors: Mapping[str, Tensor], model: PreTrainedModel) -> None:
    """Refuse ranks of heads that are not those of every head of the model, before they are used.

    Raises:
        KvtoolError: they are missing, of another shape, or no ranks.
    """
    ranks = tensors.get("head_ranks")
    shapes = [shape for shape in layer_shapes(model.config) if shape is not None]
    if ranks is None or ranks.dtype != torch.int64:
        raise bad_file(path, "`head_ranks` are missing or no whole numbers")
    wanted = (len(shapes), shapes[0].kv_heads)
    if tuple(ranks.shape) != wanted:
        raise bad_file(path, f"`head_ranks` are {list(ranks.shape)}, not {list(wanted)}")
    if not torch.equal(ranks.flatten().sort().values, torch.arange(ranks.numel())):
        raise bad_file(path, "`head_ranks` are not the places of all heads")
