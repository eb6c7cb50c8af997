"""RoPE whose factors depend on the length: rotate in all forwards over a cache by the same ones.

Transformers chooses the factors in every forward, by the last position in it. So copies of a rotary
module, one for each length, are asked about one position more, the last one that the whole text
will have, and that answer is dropped. Other forwards are left alone, unless inside `reading`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvtool.cache.whole.cache import KVCache
from kvtool.cache.whole.settings import LengthRope, RopeLengths
from kvtool.transformers_versions import given_cache

_OF_LENGTH = ("dynamic", "longrope")  # kinds of RoPE whose factors depend on the text's length
_MOST_COPIES = 64  # of a rotary module, which are small; batches may hold as many lengths

_LOCAL = threading.local()


# ---- what is known of a model


def length_kinds(module: nn.Module) -> dict[str | None, str]:
    """Return the kinds of RoPE of a rotary module that depend on the length, by type of layer."""
    kinds = getattr(module, "rope_type", None)
    by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
    return {
        layer: name
        for layer, kind in by_layer.items()
        for name in _OF_LENGTH
        if isinstance(kind, str) and name in kind
    }


def length_rope(model: PreTrainedModel) -> LengthRope | None:
    """Return how a model's RoPE depends on the length of the text; None: it does not."""
    thresholds, grows = set(), False
    for module in _rotary_modules(model):
        for layer, kind in length_kinds(module).items():
            grows = grows or kind == "dynamic"
            thresholds.add(_threshold(module, layer, kind))
    return LengthRope(tuple(sorted(thresholds)), grows) if thresholds else None


def _rotary_modules(model: PreTrainedModel) -> list[nn.Module]:
    return [module for module in model.get_decoder().modules() if length_kinds(module)]


def _threshold(module: Any, layer: str | None, kind: str) -> int:
    """The length up to which a rotary module rotates as it does in a short text."""
    if kind == "dynamic":
        return module.original_max_seq_len
    parameters = module.config.rope_parameters
    return (parameters if layer is None else parameters[layer])["original_max_position_embeddings"]


# ---- hooks


def install(model: PreTrainedModel) -> list[RemovableHandle]:
    """Hook the rotary modules of a model whose RoPE depends on the length, and its decoder."""
    modules = _rotary_modules(model)
    if not modules:
        return []
    decoder = model.get_decoder()
    hooks = [
        decoder.register_forward_pre_hook(_before_decoder, with_kwargs=True),
        decoder.register_forward_hook(_after_decoder, with_kwargs=True),
    ]
    for module in modules:
        rotary = Rotary()
        hooks.append(module.register_forward_pre_hook(rotary.before, with_kwargs=True))
        hooks.append(module.register_forward_hook(rotary.after, with_kwargs=True))
    return hooks


@contextmanager
def reading(lengths: RopeLengths | None) -> Iterator[None]:
    """Rotate in this thread's forwards over other caches by the factors of a kvtool cache.

    Args:
        lengths: for which they were chosen; None: every forward chooses for itself.
    """
    before, _LOCAL.reading = getattr(_LOCAL, "reading", None), lengths
    try:
        yield
    finally:
        _LOCAL.reading = before


def _before_decoder(module: nn.Module, args: tuple, kwargs: dict) -> None:
    given = kwargs
    if args:
        names = inspect.signature(module.forward).parameters
        given = dict(zip(names, args, strict=False)) | kwargs
    cache = given_cache(given)
    if not isinstance(cache, KVCache):
        _LOCAL.running = getattr(_LOCAL, "reading", None)
        return
    first = cache.first_layer
    stored = cache.running.unstored is None
    if cache.link.rope is not None and first.seen_device is None and stored:
        _check(cache, cache.link.rope, given)
    _LOCAL.running = cache.rope.chosen


def _check(cache: KVCache, rope: LengthRope, given: dict[str, Any]) -> None:
    """Choose the factors for a text that was not announced; refuse one that outgrows them."""
    tokens = given.get("input_ids")
    tokens = given["inputs_embeds"] if tokens is None else tokens
    running, end = cache.running, cache.first_layer.seen + tokens.shape[1]
    if cache.rope.chosen is None:
        cache.choose_rope(_ends(cache, tokens, given))
    elif end > running.rope.serves and running.prompt_lengths is None:  # which have been checked
        serves = all(rope.serve(known, end) for known in cache.rope.chosen.lengths)
        room = 0 if serves else cache.check_rope(_ends(cache, tokens, given))
        running.note_rope(
            replace(running.rope, serves=end + (room or 0))
        )  # the host waits for padded entries here, seldom


@torch.compiler.disable
def _ends(cache: KVCache, tokens: Tensor, given: dict[str, Any]) -> list[int]:
    """How many tokens each batch entry has at the end of a forward, without padding."""
    seen = cache.tokens_seen() if cache.get_seq_length() else [0]
    seen = seen * len(tokens) if len(seen) == 1 else seen
    mask = given.get("attention_mask")
    new = [tokens.shape[1]] * len(tokens)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        new = mask[:, -tokens.shape[1] :].long().sum(1).tolist()
    return [before + count for before, count in zip(seen, new, strict=True)]


def _after_decoder(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
    _LOCAL.running = None


class Rotary:
    """Hooks of one rotary module, and its copies."""

    def __init__(self) -> None:
        self._copies: dict[tuple, nn.Module] = {}

    def before(self, module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Keep the state of a module that grows: it is asked about what it knows already."""
        asked = _Asked.of(args, kwargs)
        kind = length_kinds(module).get(asked.layer)
        if getattr(_LOCAL, "running", None) is None or kind is None:
            return None
        _LOCAL.asked = asked
        if kind == "longrope":  # which chooses anew every time
            return None
        known = getattr(module, f"{asked.layer}_max_seq_len_cached", module.max_seq_len_cached)
        last = torch.zeros_like(asked.positions[..., :1]) + (known - 1)
        return asked.about(last).arguments()

    def after(self, module: Any, args: tuple, kwargs: dict, output: Any) -> Any:
        """Answer by the factors of the running forward."""
        running: RopeLengths | None = getattr(_LOCAL, "running", None)
        if running is None or length_kinds(module).get(_Asked.of(args, kwargs).layer) is None:
            return None
        asked: _Asked = _LOCAL.asked
        _LOCAL.asked = None  # whose states are large
        if len(running.lengths) == 1:
            return self._answer(module, asked, running.lengths[0])
        answer = None
        for length in sorted(set(running.lengths)):
            entries = [own == length for own in running.lengths]
            chosen = torch.tensor(entries, device=asked.states.device)[:, None]
            ours = self._answer(module, asked.about(asked.positions * chosen), length)
            where: Any = partial(torch.where, chosen[..., None])
            answer = ours if answer is None else _each(where, ours, answer)
        return answer

    def _answer(self, module: nn.Module, asked: _Asked, length: int) -> Any:
        """Ask the copy for one length, about the last position of its text as well."""
        key = length, asked.layer, asked.states.device, asked.states.dtype
        own = self._copies.get(key) or self._copy(module, asked, length, key)
        last = nn.functional.pad(asked.positions, (0, 1), value=length - 1)
        return _each(lambda each: each[..., :-1, :], asked.about(last).run(own))

    @torch.compiler.disable
    def _copy(self, module: nn.Module, asked: _Asked, length: int, key: tuple) -> nn.Module:
        """Copy a rotary module, and have it choose its factors for one length and for good."""
        own: Any = type(module).__new__(type(module))
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers(recurse=False)}
        state = {name: each for name, each in vars(module).items() if name not in _OF_MODEL}
        vars(own).update(state, _buffers=buffers)
        place = torch.zeros_like(asked.positions[..., :1])
        asked.about(place).run(own)  # which forgets what longer texts have left
        asked.about(place + length - 1).run(own)
        kinds, chosen = own.rope_type, "default"  # under which nothing is chosen anew
        kinds = dict.fromkeys(kinds, chosen) if isinstance(kinds, dict) else chosen
        vars(own).update(rope_type=kinds)
        if len(self._copies) >= _MOST_COPIES:
            self._copies.clear()
        self._copies[key] = own
        return own


_OF_MODEL = ("forward", "_hf_hook", "_old_forward")  # what others have put on the module itself


@dataclass(frozen=True)
class _Asked:
    """What a rotary module is asked: to rotate states of a dtype and device, by positions.

    Attributes:
        positions: (.., batch, q_len) int64.
        layer: the type of layer; None: all layers rotate alike.
        typed: whether the type is an argument.
    """

    states: Tensor
    positions: Tensor
    layer: str | None
    typed: bool

    @classmethod
    def of(cls, args: tuple, kwargs: dict) -> _Asked:
        """Read the arguments of its forward."""
        given = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
        typed = "layer_type" in given
        return cls(given["x"], given["position_ids"], given.get("layer_type"), typed)

    def about(self, positions: Tensor) -> _Asked:
        """Ask the same about other positions."""
        return _Asked(self.states, positions, self.layer, self.typed)

    def arguments(self) -> tuple[tuple, dict]:
        """Return the arguments of the module's forward."""
        return (self.states, self.positions), {"layer_type": self.layer} if self.typed else {}

    def run(self, module: nn.Module) -> Any:
        """Run a module's own forward, without hooks."""
        args, kwargs = self.arguments()
        return type(module).forward(module, *args, **kwargs)


def _each(act: Callable[..., Tensor], *answers: Any) -> Any:
    """Apply a function to answers that are tensors, or to the cosines and the sines of each."""
    if isinstance(answers[0], Tensor):
        return act(*answers)
    return tuple(act(*parts) for parts in zip(*answers, strict=True))
