"""Check the tensors of a cache file, name by name, before a cache is filled with them.

A checksum shows that a file is as it was written, not that kvtool wrote it. So every tensor is
compared with the policy, the model and the others; one that is left over is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvtool.cache.files.format import bad_file
from kvtool.cache.hooks.probes import ask_recurrent
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.slot_form import RANGES
from kvtool.cache.whole.cache import KVCache
from kvtool.cache.whole.settings import RopeLengths
from kvtool.errors import KvtoolError
from kvtool.maths.quantise import MOST_EXPONENT, are_apart
from kvtool.model_shape import LayerShape, layer_shapes
from kvtool.policies.codec.codec import Codec
from kvtool.policies.numbers import SHIFT
from kvtool.sizes import MOST_TOKENS


class FileTensors:
    """The tensors of a file: one after the other is taken off, what is left is too many.

    Attributes:
        path: of the file.
        left: what has not been taken yet.
        seen: tokens that the cache has seen, padding included.
        batch: its batch entries.
        lengths: (batch,) tokens of each; None: all alike.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], seen: int, batch: int) -> None:
        self.path, self.left = path, dict(tensors)
        self.seen, self.batch = seen, batch
        self.lengths: Tensor | None = None
        if "lengths" in self.left:
            self.lengths = self.take("lengths", (batch,), torch.int64, 1, seen)

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
            found, expected = (tensor.dtype, list(tensor.shape)), (dtypes[0], sizes)
            message = "is {} {}, not {} {}".format(*found, *expected)
            raise self.bad(name, message.replace("torch.", "").replace("'", ""))
        if tensor.dtype.is_floating_point:
            sound = tensor.isfinite() | (tensor == float("-inf")) if unknown else tensor.isfinite()
            if not sound.all():
                raise self.bad(name, "holds numbers that are not finite")
        if tensor.numel() and (
            (low is not None and tensor.min() < low) or (high is not None and tensor.max() > high)
        ):
            raise self.bad(name, "holds numbers out of their range")
        return tensor

    def check_places(self, name: str, positions: Tensor) -> None:
        """Refuse positions, (batch, kv_heads, slots), that are not of seen tokens in order."""
        ordered = positions.masked_fill(positions < 0, self.seen)
        before, after = ordered[..., :-1], ordered[..., 1:]
        if not ((before < after) | (before == self.seen)).all():
            raise self.bad(name, "are not in ascending order, empty slots last")
        if self.lengths is not None and (positions >= self.lengths[:, None, None]).any():
            raise self.bad(name, "holds tokens that its row has not seen")

    def kept(self, layer: int) -> int | None:
        """Slots of a layer."""
        positions = self.left.get(f"layer.{layer}.positions")
        return positions.shape[-1] if positions is not None and positions.dim() == 3 else None


def check_layer(
    file: FileTensors,
    cache: KVCache,
    layer: SlotLayer,
    shape: LayerShape,
    dtype: torch.dtype,
) -> None:
    """Refuse tensors of a layer that do not fit its policy, the model or each other."""
    name, batch, heads = f"layer.{layer.index}", file.batch, shape.kv_heads
    slots = file.kept(layer.index)
    _check_stored(file, layer.policy.codec, name, (batch, heads, slots), shape, dtype)
    positions = file.take(
        f"{name}.positions", (batch, heads, slots), torch.int64, -1, file.seen - 1
    )
    file.check_places(f"{name}.positions", positions)
    for key in layer.policy.statistics:
        shifts = key == SHIFT
        low: float | None = -MOST_TOKENS if shifts else 0
        high: float | None = MOST_TOKENS
        if layer.policy.sees_hidden and key in layer.policy.score.statistics:
            low = high = None  # a network may return any number
        number = file.take(f"{name}.state.{key}", (batch, heads, slots), torch.float32, low, high)
        if shifts and not torch.equal(number, number.round()):
            raise file.bad(f"{name}.state.{key}", "holds parts of a position")
    _check_budget(file, cache, layer, name, positions)
    for part in layer.parts.values():
        part.check(file, f"{name}.", shape, dtype)


def _check_stored(
    file: FileTensors,
    codec: Codec | None,
    name: str,
    sizes: tuple[int, int, int | None],
    shape: LayerShape,
    dtype: torch.dtype,
) -> None:
    """Check keys and values, as they are or as codes."""
    sides = (None, None) if codec is None else codec.sides()
    dims = {"key": shape.key_dim, "value": shape.value_dim}
    for (kind, dim), side in zip(dims.items(), sides, strict=True):
        if side is None:
            file.take(f"{name}.{kind}s", (*sizes, dim), dtype)
        else:
            signs = kind == "key" and side.kernel_form is not None
            _check_codes(file, side, f"{name}.{kind}", sizes, dim, signs)
    if codec is not None and any(f"{name}.{own}" in file.left for own in RANGES):
        channels = (*sizes[:2], 1, shape.key_dim)
        file.take(f"{name}.{RANGES[0]}", channels, torch.float16)
        file.take(f"{name}.{RANGES[1]}", channels, torch.int8, -MOST_EXPONENT, MOST_EXPONENT)


def _check_codes(
    file: FileTensors,
    codec: Codec,
    name: str,
    sizes: tuple[int, int, int | None],
    dim: int,
    signs: bool,
) -> None:
    """Check the codes and scales of keys or values.

    Args:
        signs: whether the scales of a vector may all have a sign.
    """
    codes, scales = codec.encode(torch.zeros(dim, dtype=torch.float32))
    low = -127 if codes.dtype == torch.int8 else None
    file.take(f"{name}s", (*sizes, len(codes)), codes.dtype, low)
    low = None if signs else 0
    found = file.take(f"{name}_scales", (*sizes, len(scales)), scales.dtype, low)
    if signs and not torch.equal(are_apart(found).expand_as(found), found.signbit()):
        raise file.bad(f"{name}_scales", "have different signs in one vector")


def _check_budget(
    file: FileTensors, cache: KVCache, layer: SlotLayer, name: str, positions: Tensor
) -> None:
    """Check what sequences and heads may keep, and that they keep no more."""
    budget = _take_budget(file, layer, f"{name}.budget")
    most, uneven = budget[:, None], file.lengths is not None
    split = layer.window is None and cache.policy.head_split is not None
    if split and f"{name}.head_budgets" in file.left:
        sizes = file.batch, positions.shape[1]
        most = file.take(f"{name}.head_budgets", sizes, torch.int64, 0, MOST_TOKENS)
        uneven = True
    _check_filled(file, layer, f"{name}.positions", positions, most, uneven)
    asked = None if cache.budget is None else cache.budget.tokens
    own = cache.plan is not None or cache.policy.allocator is not None
    if asked is None or own or layer.window is not None or cache.policy.budget_is_traffic:
        return
    if bool(budget.ne(asked).any()):
        raise file.bad(f"{name}.budget", f"is not the cache's budget {cache.budget}")


def _take_budget(file: FileTensors, layer: SlotLayer, name: str) -> Tensor:
    """Take the budget of each sequence, or of all of them: (batch or 1,)."""
    found = file.left.get(name)
    rows = file.batch if found is not None and found.numel() > 1 else 1
    if layer.window is not None:
        return file.take(name, (rows,), torch.int64, layer.window - 1, layer.window - 1)
    return file.take(name, (rows,), torch.int64, int(layer.policy.when != "never"), MOST_TOKENS)


def _check_filled(
    file: FileTensors, layer: SlotLayer, name: str, positions: Tensor, most: Tensor, uneven: bool
) -> None:
    """Check how many slots are filled."""
    when, filled = layer.policy.when, (positions >= 0).sum(-1)
    if when == "always" and (filled >= most + layer.policy.spare).any():
        raise file.bad(name, "holds more tokens than its budget")
    if not uneven and (positions < 0).any():
        raise file.bad(name, "has empty slots where no row or head is shorter")
    expected = torch.tensor([file.seen]) if file.lengths is None else file.lengths
    keeps_all = when == "never" or (layer.policy.select_only and layer.window is None)
    if keeps_all and (filled != expected[:, None]).any():
        raise file.bad(name, "lacks tokens, and its policy keeps all")


def check_tensors(
    path: Path,
    metadata: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    cache: KVCache,
    model: PreTrainedModel,
) -> None:
    """Refuse tensors that no cache of this kind has written."""
    seen, tokens = int(metadata["seen"]), int(metadata["tokens_seen"])
    first = f"layer.{cache.first_layer.index}.keys"
    keys = tensors.get(first)
    if keys is None or keys.dim() != 4 or keys.shape[0] < 1:
        raise bad_file(path, f"`{first}` are missing or have another shape")
    file = FileTensors(path, tensors, seen, keys.shape[0])
    _check_text(file, cache, model, tokens)
    shapes = layer_shapes(model.config)
    for layer in cache.slot_layers:
        shape = shapes[layer.index]
        if shape is not None:
            check_layer(file, cache, layer, shape, model.dtype)
    for i, states in enumerate(ask_recurrent(model)):
        for name, state in states.items():
            whole = f"layer.{i}.{name}"
            if whole in file.left or not isinstance(cache.layers[i], SlotLayer):
                file.take(whole, (file.batch, *state.shape[1:]), state.dtype)
    for name in file.left:
        raise file.bad(name, "belongs to no cache of this policy and model")


def _check_text(file: FileTensors, cache: KVCache, model: PreTrainedModel, tokens: int) -> None:
    """Check lengths, tokens, logits and what is known of whole sequences."""
    batch = file.batch
    longest = file.seen if file.lengths is None else int(file.lengths.max())
    if longest != tokens:
        what = f"rows have seen {longest} tokens, and `tokens_seen` is {tokens}"
        raise bad_file(file.path, what)
    config = model.config.get_text_config(decoder=True)
    if "input_ids" in file.left:
        ids = file.take("input_ids", (batch, None), torch.int64, 0, config.vocab_size - 1)
        if not 1 <= ids.shape[1] <= MOST_TOKENS:
            raise file.bad("input_ids", "hold no token")
    logits = (batch, _logits_of(model))
    if "next_logits" in file.left:
        file.take("next_logits", logits, torch.float32, unknown=True)
    for part in cache.parts.values():
        part.check(file, file.kept(cache.first_layer.index), logits, model.dtype)
    free = [layer for layer in cache.slot_layers if layer.window is None]
    if cache.budgets.deferred:
        file.take("spread.variance", (batch, len(free)), torch.float64, 0)
        file.take("spread.queries", (batch,), torch.int64, 1, file.seen)
        file.take("spread.held", (batch, len(free)), torch.int64, 0, file.seen)
    if cache.budgets.traffic is not None:
        ends = file.left.get("read.ends")
        rows = batch if ends is not None and ends.numel() > 1 else 1
        file.take("read.ends", (rows,), torch.int64, 1, file.seen)
        file.take("read.reserve", (), torch.int64, 0, MOST_TOKENS)
    split = cache.policy.head_split
    if split is not None and split.scores is not None:
        file.left.pop("head_ranks", None)  # checked before the cache was made


def _logits_of(model: PreTrainedModel) -> int:
    """Count the logits of a token. Quantised layers of torch hold no weight that is a tensor."""
    head = model.get_output_embeddings()
    size = getattr(head, "out_features", None)
    return int(head.weight.shape[0] if size is None else size)


def check_ranks(path: Path, tensors: Mapping[str, Tensor], model: PreTrainedModel) -> None:
    """Refuse ranks of heads that are not those of every head of the model, before they are used."""
    ranks = tensors.get("head_ranks", torch.zeros(0))
    shapes = [shape for shape in layer_shapes(model.config) if shape is not None]
    wanted = torch.arange(len(shapes) * shapes[0].kv_heads).view(len(shapes), -1)
    order = ranks.flatten().sort().values.view(-1)
    if ranks.shape != wanted.shape or not torch.equal(order, wanted.flatten()):
        raise bad_file(path, "`head_ranks` are not the places of all heads")


def read_rope(path: Path, metadata: Mapping[str, str], cache: KVCache) -> RopeLengths | None:
    """Return the lengths for which a file's RoPE factors were chosen; None for other models.

    Files of older versions do not say so. Their keys have the factors of short texts as long as the
    text is one; beyond, factors may be mixed.

    Raises:
        KvtoolError: lengths that no cache of this model has, or an old file of a long text.
    """
    rope, stored_lengths, seen = cache.link.rope, metadata.get("rope_lengths"), cache.tokens_seen()
    if rope is None:
        if stored_lengths is not None:
            raise bad_file(path, "the RoPE of this model does not depend on the length of the text")
        return None
    if stored_lengths is None:
        if max(seen) > rope.thresholds[0]:
            raise KvtoolError(
                f"`{path}` does not say which RoPE factors its keys have, and beyond "
                f"{rope.thresholds[0]} tokens an older kvtool may have mixed them",
                hint="compress the text anew",
            )
        return RopeLengths.of([rope.factors_for(length) for length in seen])
    numbers = stored_lengths.split(",")
    sound = all(each.isascii() and each.isdecimal() and len(each) <= 10 for each in numbers)
    lengths = RopeLengths(tuple(map(int, numbers)) if sound else ())
    if len(lengths.lengths) not in (1, len(seen)) or not all(
        rope.factors_for(length) == length and rope.serve(length, tokens)
        for length, tokens in zip(lengths.of_entries(len(seen)), seen, strict=True)
    ):
        raise bad_file(path, f"RoPE factors of {stored_lengths} tokens for texts of {seen}")
    return lengths
