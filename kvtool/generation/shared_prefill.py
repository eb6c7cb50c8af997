"""Read a prompt once for several caches: the model runs over one that keeps everything.

As long as a cache sees the whole prompt at once, what it evicts changes nothing before the first
generated token. So queries, keys, values and attention outputs of one run serve every policy, and
only scores and selections are computed for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from torch import Tensor
from transformers import PreTrainedModel

from kvtool.cache.entry.build import build_cache
from kvtool.cache.features.cache_part import CachePart
from kvtool.cache.features.repetition import Instructions, Repetition
from kvtool.cache.hooks.attachment import attachment
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.steps.block import KnownColumns
from kvtool.cache.steps.call import Call, PendingStep
from kvtool.cache.whole.cache import KVCache
from kvtool.cache.whole.replay import replay
from kvtool.generation.feeding import feed, prefill
from kvtool.generation.repeating import begin_prompt, repeat_prompt
from kvtool.model_shape import stores_latents


def can_share(model: PreTrainedModel, cache: KVCache, tokens: int) -> bool:
    """Return whether an empty cache can take a prompt in from another one's run.

    Not where it reads the prompt in blocks, uses logits or hidden states, or numbers tokens anew.
    Nor where it has the prompt repeated and does not know the words yet, or the model's RoPE
    depends on the length. Nor on a model with other layers than those of full attention, or whose
    keys are stored in latent form.

    Args:
        tokens: of the prompt.
    """
    attached = attachment(model)
    block = cache.settings.block
    return (
        (attached is None or not attached.eager)
        and not stores_latents(cache.config)
        and cache.get_seq_length() == 0
        and (block is None or block >= tokens)
        and not cache.policy.sees_hidden
        and all(_repeats(cache, part) for part in cache.parts.values())
        and not (cache.recurrent or cache.renumbers)
        and not cache.settings.kv_sharing
        and all(_is_plain(layer) for layer in cache.layers)
    )


def _is_plain(layer: object) -> bool:
    """Whether a layer attends to all of a prompt and nothing else."""
    return isinstance(layer, SlotLayer) and layer.window is None and not layer.chunked


def _repeats(cache: KVCache, part: CachePart) -> bool:
    """Whether a part of a cache repeats the prompt, in known words and at the same angles."""
    told = isinstance(part, Repetition) and part.instructions is not None
    return told and cache.link.rope is None


def prefill_shared(
    model: PreTrainedModel,
    caches: Sequence[KVCache],
    input_ids: Tensor,
    *,
    new_tokens: int = 0,
    length: int = 0,
) -> Tensor:
    """Feed a prompt to several empty caches by one run of the model.

    Caches of one policy that has the prompt repeated repeat it together.

    Args:
        caches: those that `can_share` accepts.
        input_ids: (batch, n), without padding.
        new_tokens: how many will be generated after it, as far as is known.
        length: tokens of the whole text; see `KVCache.expect_length`.

    Returns:
        (batch, vocab) float32 logits after the last token.

    Raises:
        UsageError: a budget that is not above the tokens that its policy always keeps.
        KvtoolError: keys that are stored in another form than they are attended in.
        BrokenNumbers: the logits are not finite.
    """
    batch, width = input_ids.shape
    lead = build_cache(model, "full")
    for cache in (lead, *caches):
        cache.expect_length(length)

    def take_in(step: PendingStep, call: Call, out: Tensor) -> None:
        columns = KnownColumns()
        for cache in caches:
            replay(cache, step, call, out, columns)

    lead.watch_steps(take_in, norms=False)
    with ExitStack() as prompts:
        for cache in caches:
            begin_prompt(cache, None)
            prompts.enter_context(cache.prompt([width] * batch, new_tokens))
        logits = prefill(model, lead, input_ids, new_tokens=new_tokens)
        for together in _by_policy(caches):
            repeat_prompt(together, input_ids.tolist(), partial(feed, model))
        return logits


def _by_policy(caches: Sequence[KVCache]) -> list[list[KVCache]]:
    """Group the caches that have their prompt repeated, in the same words each."""
    groups: dict[tuple[str, Instructions], list[KVCache]] = {}
    for cache in caches:
        part = Repetition.of(cache)
        if part is not None and part.instructions is not None:
            groups.setdefault((str(cache.policy), part.instructions), []).append(cache)
    return list(groups.values())
