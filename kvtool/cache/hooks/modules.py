"""Find the modules of a model's attention: what enters it, and what takes the output of its heads.

Families name them differently, so one token is read. The module that takes the very numbers which
the attention of a layer has returned is its output projection, a plain linear layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kvtool.cache.hooks.attachment import HiddenHooks, ask_once, attachment
from kvtool.cache.steps.call import Call, PendingStep
from kvtool.cache.whole.cache import KVCache
from kvtool.errors import KvtoolError
from kvtool.model_shape import FREE, layer_kinds, stores_latents
from kvtool.policies.policy import Policy
from kvtool.policies.scores.full import Full
from kvtool.transformers_versions import cache_argument, eager_families, layer_types
from kvtool.weights_hash import local_part


@dataclass(frozen=True)
class LinearWeight:
    """The weight of a linear layer, as it is at every call.

    Attributes:
        module: returns the layer; None once the model is gone.
        transposed: whether it is stored as (in, out).
    """

    module: Callable[[], Any]
    transposed: bool

    def __call__(self) -> Tensor:
        weight = local_part(self.module().weight.detach())
        return weight.T if self.transposed else weight

    def __deepcopy__(self, memo: dict) -> LinearWeight:
        return self  # the model's


def find_projections(model: PreTrainedModel, policy: Policy) -> dict[int, LinearWeight]:
    """Find the output projection of each layer of free budget, by its index.

    Raises:
        KvtoolError: a layer has none, or one that is no plain linear layer.
    """
    text = model.config.get_text_config(decoder=True)
    reason = None
    if text.model_type in eager_families():
        reason = "runs its own eager attention, which does not show the output of its heads"
    elif stores_latents(text):
        reason = "stores latents in place of values"
    found: dict[int, LinearWeight | str] = {}
    if reason is None:
        found = ask_once(model, "output projections", partial(_ask_projections, model))
    weights = {}
    for i, kind in enumerate(layer_kinds(text)):
        if kind in FREE and reason is None and i in found:
            own = found[i]
            reason = own if isinstance(own, str) else None
            if isinstance(own, LinearWeight):
                weights[i] = own
    if reason is not None:
        raise KvtoolError(
            f"policy `{policy}` looks at the attention's output projection, "
            f"and `{text.model_type}` {reason}",
            hint=f"take a policy that does not: {policy.name}",
        )
    return weights


def show_hidden(model: PreTrainedModel, policy: Policy) -> HiddenHooks:
    """Have the hidden states that enter each layer's attention shown to caches that ask for them.

    Returns:
        The hooks, which go with the last cache that holds them.

    Raises:
        KvtoolError: a layer hands them on in a way that is not known here.
    """
    text, noted = model.config.get_text_config(decoder=True), attachment(model)
    assert noted is not None, "build_cache attaches"
    running = noted.hidden()
    if running is not None:
        return running
    modules: dict[int, nn.Module] = {}
    if text.model_type not in eager_families():
        modules = _attention_modules(model)
    if not {i for i, (kind, _) in enumerate(layer_types(text)) if kind in FREE} <= modules.keys():
        raise KvtoolError(
            f"policy `{policy}` looks at the hidden states that enter the attention, "
            f"and `{text.model_type}` does not hand them to it in a way that is known here",
            hint="take a policy that does not: snapkv",
        )
    hooks = HiddenHooks(
        [module.register_forward_pre_hook(_show, with_kwargs=True) for module in modules.values()]
    )
    noted.note_hidden(hooks)
    return hooks


def _show(module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Show a cache what enters the attention of a layer."""
    cache = _cache_of(args, kwargs)
    if cache is not None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        cache.running.show_hidden(hidden)


def _cache_of(args: tuple, kwargs: dict) -> KVCache | None:
    """Find the cache among what a module is given, whatever its family calls it."""
    for given in (*kwargs.values(), *args):
        if isinstance(given, KVCache):
            return given
    return None


@torch.no_grad()
def _attention_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Read one token; return the attention module of each layer that has run in one, by index."""
    found: dict[int, nn.Module] = {}
    entered: dict[int, nn.Module] = {}

    def watch(step: PendingStep, call: Call, out: Tensor) -> None:
        if step.layer.index in entered:
            found[step.layer.index] = entered[step.layer.index]

    def enter(module: Any, args: tuple, kwargs: dict) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else (*args, None)[0]
        known = _cache_of(args, kwargs) is not None and isinstance(hidden, Tensor)
        if known and hidden.dim() == 3:
            entered[module.layer_idx] = module

    indexed = [
        each
        for each in model.get_decoder().modules()
        if isinstance(vars(each).get("layer_idx"), int)
    ]
    _read_token(
        model, watch, [each.register_forward_pre_hook(enter, with_kwargs=True) for each in indexed]
    )
    return found


def _read_token(
    model: PreTrainedModel,
    watch: Callable[[PendingStep, Call, Tensor], None],
    hooks: list[RemovableHandle],
) -> None:
    """Read one token over a cache whose steps are watched, and remove the hooks then."""
    config = model.config.get_text_config(decoder=True)
    cache = KVCache(config, Policy(Full()), None)
    cache.watch_steps(watch, norms=False)
    token = torch.full((1, 1), config.vocab_size // 2, device=model.device)
    try:
        model(input_ids=token, use_cache=True, **{cache_argument(): cache})
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def _ask_projections(model: PreTrainedModel) -> dict[int, LinearWeight | str]:
    """Read one token; return the projection of each attention layer, or why it has none."""
    taken: dict[int, LinearWeight | str] = {}
    waiting: list[tuple[int, Tensor]] = []

    def watch(step: PendingStep, call: Call, out: Tensor) -> None:
        taken[step.layer.index] = "changes the output of its heads before it projects it"
        waiting[:] = [(step.layer.index, out.transpose(1, 2).flatten())]

    def enter(module: nn.Module, args: tuple) -> None:
        given = args[0] if args else None
        if not waiting or not isinstance(given, Tensor):
            return
        layer, out = waiting[0]
        if given.numel() == out.numel() and torch.equal(given.flatten(), out):
            waiting.clear()
            taken[layer] = _read(module, given.shape[-1])

    modules = model.get_decoder().modules()
    _read_token(model, watch, [each.register_forward_pre_hook(enter) for each in modules])
    return taken


def _read(module: Any, width: int) -> LinearWeight | str:
    """Return the weight of a module that takes the output of all heads, or what is wrong."""
    kind = type(module).__name__
    if type(module) not in (nn.Linear, Conv1D):
        return f"projects the output of its heads by a `{kind}`, which is no plain linear layer"
    weight, transposed = module.weight, type(module) is Conv1D
    if weight.is_meta:
        return "keeps the output projection off the device (offloading)"
    own = local_part(weight.detach())
    if type(own) is not Tensor or not own.is_floating_point() or own.element_size() < 2:
        return f"stores the output projection in codes ({own.dtype}), not as plain numbers"
    if own.shape[0 if transposed else 1] != width:
        return "splits the output projection in a way that is not known here"
    return LinearWeight(weakref.ref(module), transposed)
