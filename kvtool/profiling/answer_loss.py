"""Measure what an answer loses when the cache of one layer alone is cut.

Our own. The full cache reads a prompt and gives the distributions of the tokens that follow, which
are known. Then a policy cuts a single layer, all other layers keep everything, and the same tokens
are read again in one block. The loss is the mean Kullback-Leibler divergence of the full cache's
distributions from those of the cut one, in nats. Unlike errors of attention outputs, the losses of
different layers compare. So do those of KV heads, where one head of a layer is cut and the others
keep everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvtool.cache.entry.build import build_cache
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.steps.block import KnownColumns
from kvtool.cache.steps.call import Call, PendingStep
from kvtool.cache.whole.cache import KVCache
from kvtool.cache.whole.replay import replay
from kvtool.generation.broken_numbers import check_logits
from kvtool.generation.feeding import forward, prefill
from kvtool.model_shape import layer_shapes
from kvtool.policies.allocate.fixed import OneHead, with_fixed_heads
from kvtool.policies.policy import Policy


@dataclass(frozen=True)
class AskedText:
    """A text and how it goes on.

    Attributes:
        prompt: (1, n) int64, read first; one layer of its cache is cut then.
        rest: (1, steps) int64 that follow it.
        asked: how many tokens of the rest are a question, whose own loss does not count.
    """

    prompt: Tensor
    rest: Tensor
    asked: int = 0


@torch.inference_mode()
def answer_loss(
    model: PreTrainedModel,
    policy: Policy,
    budgets: Sequence[int],
    text: AskedText,
    step: Callable[[], None] = lambda: None,
) -> Tensor:
    """Measure what is lost of an answer where one layer is cut, for each layer and budget.

    Args:
        model: with kvtool's attention.
        policy: that cuts.
        budgets: tokens per KV head of the layer that is cut.
        text: read whole up to where it goes on.
        step: called after each layer.

    Returns:
        (layers, budgets) float64 on the CPU, in nats; NaN for layers whose budget is not free.

    Raises:
        KvtoolError: a policy or a model that cannot be replayed layer by layer.
        BrokenNumbers: the logits are not finite.
    """
    full, cuts = _read(model, policy, budgets, text.prompt, text.rest.shape[1])
    lower = _Lower(model, full)
    with lower.recorded():
        before = _Answer.of(_follow(model, full, text))
    losses = torch.full((len(full.layers), len(budgets)), float("nan"), dtype=torch.float64)
    for layer in [own for own in full.slot_layers if own.window is None]:
        for place, cut in enumerate(cuts):
            with lower.replayed(below=layer.index):
                after = _follow(model, full, text, cut.slot_layer(layer.index))
            losses[layer.index, place] = before.loss(after)
        step()
    return losses


def head_losses(
    model: PreTrainedModel, policy: Policy, budgets: Sequence[int], text: AskedText
) -> Tensor:
    """Measure what is lost of an answer where one KV head is cut, for each layer, head and budget.

    Each head is cut as a plan with budgets of heads cuts it. The text is read once for each head of
    a layer: caches that keep all other heads whole take much memory.

    Args:
        model: with kvtool's attention.
        policy, budgets, text: as for `answer_loss`.

    Returns:
        (layers, kv_heads, budgets) float64 on the CPU, in nats; NaN for layers whose budget is not
        free, and for heads that a layer does not have.

    Raises:
        UsageError: a policy that keeps as many tokens in all heads.
        KvtoolError, BrokenNumbers: as `answer_loss`.
    """
    shapes = layer_shapes(model.config)
    sizes = [0 if shape is None else shape.kv_heads for shape in shapes]
    found = []
    for head in range(max(sizes)):
        own = answer_loss(model, with_fixed_heads(policy, OneHead(head)), budgets, text)
        absent = torch.tensor([[head >= size] for size in sizes])
        found.append(own.masked_fill(absent, float("nan")))
    return torch.stack(found, 1)


def _read(
    model: PreTrainedModel, policy: Policy, budgets: Sequence[int], prompt_ids: Tensor, steps: int
) -> tuple[KVCache, list[KVCache]]:
    """Read a prompt once; return the full cache, and one whose layers are cut for each budget.

    Every layer of a cut cache has read what the same layer of the full cache reads.
    """
    full, cuts = build_cache(model, "full"), [build_cache(model, policy, each) for each in budgets]
    width = prompt_ids.shape[1]

    def take_in(step: PendingStep, call: Call, out: Tensor) -> None:
        layer, columns = step.layer, KnownColumns()
        attended = out if layer.window is None and not layer.chunked else None
        for cache in cuts:
            replay(cache, step, call, attended, columns)

    for cache in (full, *cuts):
        cache.expect_length(width + steps)
    full.watch_steps(take_in, norms=False)
    with ExitStack() as prompts:
        for cache in cuts:
            prompts.enter_context(cache.prompt([width]))
        prefill(model, full, prompt_ids)
    full.watch_steps(None)
    return full, cuts


def _follow(
    model: PreTrainedModel, full: KVCache, text: AskedText, cut: SlotLayer | None = None
) -> Tensor:
    """Return the logits, (1, tokens, vocab), from which an answer comes; nothing is stored."""
    ids = text.rest.to(model.device)
    with full.rollback(), full.prompt([full.first_layer.seen + ids.shape[1]]):
        if cut is not None:
            full.replace_layer(cut)
            cut.set_budget(cut.budget.raised([ids.shape[1]], cut.slots.device))
        logits = forward(model, full, ids, None, None)
        check_logits(model, logits, ids)
    return logits[:, text.asked - 1 : -1] if text.asked else logits


@dataclass(frozen=True)
class _Answer:
    """What the full cache gives after each token: logits, their probabilities and normalisers."""

    logits: Tensor
    chances: Tensor
    norms: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> _Answer:
        return cls(logits, logits.softmax(-1), logits.logsumexp(-1))

    def loss(self, after: Tensor) -> float:
        """Return the mean divergence of other logits from these, in nats."""
        apart = (self.logits - after).mul_(self.chances).sum(-1)
        return max((apart + after.logsumexp(-1) - self.norms).double().mean().item(), 0.0)


class _Lower:
    """The decoder's layers below one that is cut: they give what they gave over the full cache."""

    def __init__(self, model: PreTrainedModel, full: KVCache) -> None:
        layers, shares = getattr(model.get_decoder(), "layers", None), full.settings.kv_sharing
        known = isinstance(layers, nn.ModuleList) and len(layers) == len(full.layers)
        self._layers: list[Any] = list(layers or ()) if known and not shares else []
        self._outputs: list[Any] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Note what each layer returns inside."""
        hooks = [
            layer.register_forward_hook(lambda module, given, out: self._outputs.append(out))
            for layer in self._layers
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def replayed(self, below: int) -> Iterator[None]:
        """Let the layers below one return what they returned, without running.

        The first layer runs in any case, by which the model's hooks see that the cache is used.
        """
        lower = list(zip(self._layers, self._outputs, strict=False))[1:below]
        with ExitStack() as stack:
            for layer, out in lower:
                stand_in = partial(_return, out)
                stack.enter_context(patch.object(layer, "forward", stand_in))
            yield


def _return(out: Any, *args: Any, **options: Any) -> Any:
    return out
