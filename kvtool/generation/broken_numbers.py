"""Recognise a model whose numbers are broken: NaN or infinite weights, or sums that overflow.

Logits are looked at where the caller waits for them anyway. Only when they are broken is the text
run once more, module by module, to find out where it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvtool.errors import KvtoolError, is_out_of_memory


class BrokenNumbers(KvtoolError):
    """The model's logits are NaN or infinite, so that there is no next token."""


def broken_entries(logits: Tensor) -> Tensor:
    """Find rows without a likeliest token: a logit is NaN or infinite, or all are minus infinity.

    A single logit of minus infinity is a token that cannot come.

    Args:
        logits: (.., vocab).

    Returns:
        (..) bool, on the device of the logits.
    """
    return ~logits.amax(-1).isfinite()


def check_logits(model: PreTrainedModel, logits: Tensor, input_ids: Tensor) -> None:
    """Refuse to go on from broken logits. One device sync.

    Args:
        logits: (batch, vocab), or (batch, n, vocab).
        input_ids: (batch, n) what the model has read.
    """
    broken = broken_entries(logits)
    if not broken.is_meta and bool(broken.any()):  # a device without numbers breaks none
        row = int(broken.reshape(broken.shape[0], -1).any(1).nonzero()[0])
        raise explain(model, input_ids[row : row + 1])


@contextmanager
def explaining(model: PreTrainedModel, input_ids: Tensor) -> Iterator[None]:
    """Report a failure inside as broken numbers, where they are its cause.

    Args:
        input_ids: (batch, n) what the model reads inside.

    Raises:
        BrokenNumbers: it names the module where they first are.
    """
    try:
        yield
    except (KvtoolError, OSError):
        raise
    except Exception as error:  # any: policies sort and divide by what the model gives them
        if is_out_of_memory(error):
            raise
        for row in input_ids.split(1):
            found = find(model, row)
            if found is not None:
                raise explain(model, row, found) from error
        raise


def explain(
    model: PreTrainedModel, input_ids: Tensor, found: tuple[str, str] | None = None
) -> BrokenNumbers:
    """Return the place where a model's numbers break.

    Args:
        input_ids: (1, n) the text that they break in.
        found: what `find` has found, if it has been asked.
    """
    name = model.config._name_or_path or model.config.model_type
    found = found or find(model, input_ids)
    if found is None:
        return BrokenNumbers(
            f"the logits of `{name}` are not finite under this policy, and all numbers are with a "
            "full cache",
            hint="--policy full, or --dtype float32",
        )
    place, what = found
    if what == "weights":
        return BrokenNumbers(
            f"`{name}` is broken: the weights of `{place}` hold NaN or infinite numbers",
            hint="the checkpoint is damaged or was trained into NaN; load another copy",
        )
    return BrokenNumbers(
        f"the numbers of `{name}` overflow: {what} `{place}` is NaN or infinite",
        hint="--dtype float32 (or bfloat16) has more room",
    )


@torch.no_grad()
def find(model: PreTrainedModel, input_ids: Tensor) -> tuple[str, str] | None:
    """Run a text once without a cache, and find the first module whose numbers are not finite.

    Args:
        input_ids: (1, n).

    Returns:
        Its name, and what of it is broken: `weights`, `what goes into` or `what comes out of`; None
        where everything is finite.
    """
    found: list[tuple[str, str]] = []
    hooks = []
    for name, module in model.named_modules():
        if next(module.children(), None) is None:
            hooks.append(module.register_forward_pre_hook(_look_at_input(name, found)))
            hooks.append(module.register_forward_hook(_look_at_output(name, found)))
    try:
        with suppress(Exception):  # any: broken numbers may end a forward, and are found by then
            model(input_ids=input_ids.to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def _look_at_input(name: str, found: list[tuple[str, str]]) -> Callable:
    def look(module: nn.Module, args: tuple) -> None:
        if not found and not all(map(_finite, args)):
            found.append((name, "what goes into"))

    return look


def _look_at_output(name: str, found: list[tuple[str, str]]) -> Callable:
    def look(module: nn.Module, args: tuple, output: object) -> None:
        if found or all(map(_finite, output if isinstance(output, tuple) else (output,))):
            return
        whole = all(map(_finite, module.parameters()))
        found.append((name, "what comes out of" if whole else "weights"))

    return look


def _finite(value: object) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return True
    return bool(value.isfinite().all())
