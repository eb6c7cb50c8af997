"""Show how far the reading of a prompt is, by hooks on the layers of a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from kvtool.watcher import Watcher

_LONG = 1024  # tokens, below which a prompt has no bar
_PATIENCE = 1.0  # seconds for which no bar is shown


@contextmanager
def reading(
    model: PreTrainedModel,
    tokens: int,
    watcher: Watcher,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[None]:
    """Show how many tokens of a long prompt have been read, if that takes more than a second.

    A layer that has run counts as its share of the tokens, so that a prompt that goes through the
    model whole has a bar, too. The bar ends with the last token, before any text is generated.

    Args:
        tokens: of the prompt.
        clock: seconds.
    """
    if not watcher.shows_progress or tokens < _LONG:
        yield
        return
    layers = _layers(model)
    steps, start, done = tokens * len(layers), clock(), 0
    with ExitStack() as shown, ExitStack() as hooks:
        advance: Callable[..., None] | None = None
        told = 0

        def step(module: nn.Module, inputs: Any, kept: Any, output: Any) -> None:
            nonlocal advance, done, told
            done += _width(inputs, kept)
            if done >= steps:
                hooks.close()
                shown.close()
                return
            if advance is None and clock() - start >= _PATIENCE:
                advance = shown.enter_context(watcher.progress(tokens))
            read = done // len(layers)
            if advance is not None and read > told:
                advance("tokens of the prompt read", read - told)
                told = read

        for layer in layers:
            hooks.callback(layer.register_forward_hook(step, with_kwargs=True).remove)
        yield


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return a model's layers, or its decoder as one where they are not in a list."""
    decoder: Any = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    return list(layers) if isinstance(layers, nn.ModuleList) and len(layers) > 0 else [decoder]


def _width(inputs: tuple[Any, ...], kept: dict[str, Any]) -> int:
    """Return how many tokens of a sequence a module was given: (batch, tokens, ..)."""
    texts = (each for each in (*inputs, *kept.values()) if isinstance(each, Tensor))
    return next((each.shape[1] for each in texts if each.dim() > 1), 0)
