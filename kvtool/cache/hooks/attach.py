"""Make a model run kvtool's attention, and give it its own back."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from kvtool.cache.hooks import eager as eager_hooks
from kvtool.cache.hooks import forward, rope
from kvtool.cache.hooks.attachment import Attachment, attachment, note_attachment, uncompiled
from kvtool.cache.hooks.attention import kvtool_attention, kvtool_mask
from kvtool.cache.hooks.families import check_supported
from kvtool.cache.hooks.families import notes as notes
from kvtool.cache.hooks.generate_calls import GenerateCalls
from kvtool.cache.hooks.same_cache import PreparedInputs
from kvtool.cache.steps.call import IMPLEMENTATION
from kvtool.errors import KvtoolError
from kvtool.transformers_versions import eager_families


def attach(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model run kvtool's attention, with or without a kvtool cache; `detach` undoes it.

    Its `generate` refuses from then on a used cache with a text that does not go on from it.

    Families without transformers' attention interface (Falcon, GPT-J) keep their own eager
    attention, watched by hooks: the same policies, but a prompt's weights are held in full while it
    runs.

    Raises:
        KvtoolError: the model's attention cannot be replaced, or its layers cannot be compressed.
    """
    given, model = model, uncompiled(model)
    if attachment(model) is not None:
        return given
    check_supported(model.config)
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise KvtoolError(
            "this PEFT model puts learned keys or tokens before every text (prefix or prompt "
            "tuning), which a compressed cache would not know of",
            hint="adapters that change weights, such as LoRA, work",
        )
    before = model.config._attn_implementation
    eager = model.config.get_text_config(decoder=True).model_type in eager_families()
    if eager:
        if before not in ("eager", "sdpa"):
            raise KvtoolError(
                f"`{model.config.model_type}` was loaded with {before}, "
                "which shows nobody its attention weights",
                hint="load it with attn_implementation eager",
            )
        # these families refuse `set_attn_implementation`, and read the name at every call
        model.config._attn_implementation = "eager"
    else:
        _exchange(model)
    hooks = [*(eager_hooks.install(model) if eager else []), *forward.install(model)]
    hooks += rope.install(model)
    note_attachment(model, Attachment(before, hooks, eager=eager))
    GenerateCalls.put_on(model)
    PreparedInputs.put_on(model)
    return given


def _exchange(model: PreTrainedModel) -> None:
    """Make a model call kvtool's attention."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(IMPLEMENTATION)
    if model.config._attn_implementation != IMPLEMENTATION:
        raise KvtoolError(
            f"the attention of `{model.config.model_type}` cannot be replaced: "
            "its code does not go through transformers' interface"
        )


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model its own attention back, and return the model."""
    given, model = model, uncompiled(model)
    previous = attachment(model)
    if previous is None:
        return given
    GenerateCalls.take_off(model)
    PreparedInputs.take_off(model)
    for hook in previous.hooks:
        hook.remove()
    hidden = previous.hidden()
    if hidden is not None:
        hidden.remove()
    if previous.eager:
        model.config._attn_implementation = previous.implementation
    else:
        model.set_attn_implementation(previous.implementation)
    note_attachment(model, None)
    return given


_LOCK = threading.Lock()
_USES: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()
"""Models that are attached for a while only, and how many uses they are in."""


def attach_for_a_while(model: PreTrainedModel) -> None:
    """Attach a model until it is given back as often as it was taken."""
    with _LOCK:
        if attachment(model) is None:
            attach(model)
            _USES[model] = 0
        if model in _USES:
            _USES[model] += 1


def give_back(model: PreTrainedModel, *, keep: bool) -> None:
    """End one use of a model; the last one detaches it."""
    with _LOCK:
        if model not in _USES:
            return  # its caller has attached it, or it is kept
        _USES[model] -= 1
        if keep or _USES[model] == 0:
            del _USES[model]
            if not keep:
                detach(model)


AttentionInterface.register(IMPLEMENTATION, kvtool_attention)
AttentionMaskInterface.register(IMPLEMENTATION, kvtool_mask)
