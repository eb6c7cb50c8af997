"""State of a cache: layers, budgets and the text; how it is copied, reordered and counted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from kvtool.cache.features.cuts import rank_heads
from kvtool.cache.features.table import make_cache_parts
from kvtool.cache.features.trace import Trace
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.sizing import ByteMeter
from kvtool.cache.steps.grouped import LayerGroups
from kvtool.cache.steps.static import StaticSteps
from kvtool.cache.whole.budgets import StoredBudgets
from kvtool.cache.whole.layers import make_layers
from kvtool.cache.whole.report import CacheReport, make_report
from kvtool.cache.whole.settings import (
    CacheSettings,
    ForwardState,
    ModelLink,
    RopeChoice,
    RopeLengths,
    Text,
)
from kvtool.documents.messages import ChatHistory
from kvtool.documents.plan import PlanDocument
from kvtool.errors import KvtoolError, UsageError
from kvtool.policies.policy import Policy, reads_whole
from kvtool.sizes import Budget

if TYPE_CHECKING:
    from typing_extensions import Self


class CacheState(Cache):
    """The layers of a cache and all that is known of what they hold.

    Attributes:
        settings: what it was made with.
        link: the model that it was built for.
        slot_layers: the attention layers.
        recurrent: whether any layer has a recurrence; `linear`: which have nothing else.
        meter: bytes of keys and values of all layers.
        budgets: what layers and batch entries may keep.
        parts: what features keep for all layers, by name.
        running: what is known of the running forward.
        changing: whether a forward has begun to change the cache and has not ended.
        groups: layers that evict together.
        static: steps of fixed shapes.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        policy: Policy,
        budget: Budget | None,
        block: int | None = None,
        kernel: str = "sdpa",
        plan: PlanDocument | None = None,
        *,
        link: ModelLink | None = None,
    ) -> None:
        promised = plan is not None or (budget is not None and budget.bytes is not None)
        self.meter = ByteMeter(promised=promised)
        self.link = link or ModelLink()
        layers = make_layers(config, policy, self.meter, self.link)
        super().__init__(layers=layers)
        self.slot_layers = [layer for layer in self.layers if isinstance(layer, SlotLayer)]
        recurrent = [isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers]
        self.recurrent = any(recurrent)
        slots = [isinstance(layer, SlotLayer) for layer in layers]
        self.linear = [a and not b for a, b in zip(recurrent, slots, strict=True)]
        block = None if reads_whole(policy, planned=plan is not None) else block
        self.settings = CacheSettings(config, policy, budget, block, kernel, plan)
        self.budgets = StoredBudgets(self.slot_layers, self.settings)
        self.parts = make_cache_parts(self.slot_layers, policy)
        self.running, self._text, self.changing = ForwardState(), Text(), False
        self.groups, self.static = LayerGroups(), StaticSteps()
        if self.link.head_ranks is not None:
            rank_heads(self.slot_layers, self.link.head_ranks)

    # ---- what it was made with, and what is in it

    @property
    def config(self) -> PreTrainedConfig:
        """The configuration of the text model."""
        return self.settings.config

    @property
    def policy(self) -> Policy:
        """What stays."""
        return self.settings.policy

    @property
    def budget(self) -> Budget | None:
        """What it was asked to keep to."""
        return self.settings.budget

    @property
    def plan(self) -> PlanDocument | None:
        """What `kvtool plan-budget` decided, if that is what it follows."""
        return self.settings.plan

    @property
    def block(self) -> int | None:
        """Tokens of a prompt that are read at once; None: all."""
        return self.settings.block

    @property
    def prefill(self) -> str | None:
        """How prompts are read, `block:M`; None: whole."""
        return None if self.block is None else f"block:{self.block}"

    def read_in_blocks(self, block: int | None) -> None:
        """Read prompts from here on in blocks of `block` tokens; None: whole."""
        self.settings = replace(self.settings, block=block)

    @property
    def renumbers(self) -> bool:
        """Whether keys are rotated by their places in the cache."""
        return self.settings.renumbers

    @property
    def text(self) -> Text:
        """What is known of the text so far."""
        fed = self.running.fed
        if fed.parts:
            end, ids = fed.behind(self._text.input_ids)
            self._text = Text(ids, plain=ids is not None)
            self.running.note_text(end)
        return self._text

    @property
    def input_ids(self) -> Tensor | None:
        """The text so far, (batch, n), as it was fed, generated or loaded; None: not known."""
        return self.text.input_ids

    @property
    def next_logits(self) -> Tensor | None:
        """The logits after the text, (batch, vocab), where all of it has been fed."""
        return self.text.next_logits

    @property
    def chat(self) -> Literal["open", "answer"] | None:
        """What the text ends with, where it is a conversation in a chat template's words."""
        return self.text.chat

    @property
    def first_layer(self) -> SlotLayer:
        """The first attention layer."""
        return self.slot_layers[0]

    def remember(self, input_ids: Tensor | None, next_logits: Tensor | None = None) -> None:
        """Note the text so far, and the logits after it where all of it has been fed."""
        self._text = replace(self._text, input_ids=input_ids, next_logits=next_logits, plain=False)
        seen = self.first_layer.seen
        whole = input_ids is not None and input_ids.shape[1] >= seen
        self.running.note_text(seen if whole else None)

    def end_with(
        self, chat: Literal["open", "answer"] | None, history: ChatHistory | None = None
    ) -> None:
        """Note the end of a conversation, an `open` message or an `answer`, and its messages."""
        self._text = replace(self.text, chat=chat, history=history)

    def kept_positions(self, layer: int) -> Tensor:
        """True positions of what a layer holds: (batch, kv_heads, slots) int64, -1 at the end."""
        slots = self.slot_layer(layer)
        if not slots.is_initialized:
            raise KvtoolError("the cache is empty: nothing has been fed to it yet")
        positions = slots.stored_positions().long()
        last = torch.iinfo(torch.int64).max
        positions = positions.masked_fill(positions < 0, last).sort(-1).values
        positions = positions.masked_fill(positions == last, -1)
        filled = int((positions >= 0).sum(-1).max()) if positions.numel() else 0
        return positions[..., :filled]

    def record(self) -> None:
        """Note from here on what `show` shows beside what is held: ranks, merges and reads.

        It takes three bytes of host memory a token, layer and KV head.
        """
        for layer in self.slot_layers:
            if Trace.of(layer) is None:
                layer.add_part(Trace())

    def tokens_seen(self) -> list[int]:
        """Tokens of each batch entry so far, padding excluded."""
        layer = self.first_layer
        if layer.lengths is not None:
            return layer.lengths.tolist()
        return [layer.seen] * max(layer.batch_size, 1)

    def report(self, *, of_all_processes: bool = False) -> CacheReport:
        """Count what is held, from the tensors: see `make_report`."""
        return make_report(
            self.layers,
            self.tokens_seen(),
            peak=self.meter.peak,
            extra=sum(part.nbytes for part in self.parts.values()),
            shards=self.link.shards if of_all_processes else None,
        )

    def slot_layer(self, index: int) -> SlotLayer:
        """Return an attention layer by its index in the model."""
        layer = self.layers[index]
        if isinstance(layer, SlotLayer):
            return layer
        if index == 0:  # transformers asks layer 0 for the first attention layer
            return self.first_layer
        raise KvtoolError(f"layer {index} has no attention, so it holds no keys")

    def replace_layer(self, layer: SlotLayer) -> None:
        """Put an attention layer that has read the same text in the place of this cache's own."""
        self.ungroup()
        self.slot_layers[self.slot_layers.index(self.slot_layer(layer.index))] = layer
        self.layers[layer.index] = layer

    def check_whole(self) -> None:
        """Refuse to go on from a forward that an exception or Ctrl-C has ended (KvtoolError)."""
        if self.changing:
            raise KvtoolError(
                "the last forward over this cache was interrupted: some of its layers have seen "
                "tokens that others have not",
                hint="start anew with cache.reset(), or feed it inside `with cache.rollback():`",
            )

    def expect_tokens(self, count: int) -> None:
        """Say how many tokens will be generated, as far as is known; RocketKV's plan needs it."""
        self.budgets.expect(count)

    # ---- RoPE that depends on the length

    @property
    def rope(self) -> RopeChoice:
        """For which lengths of the text it has chosen the factors of a RoPE."""
        return self.running.rope

    def expect_length(self, tokens: int) -> None:
        """Say how many tokens the whole text will have, before any of it is fed.

        Only models whose RoPE depends on the length (longrope, dynamic NTK) need it, where a text
        is read in several calls. Its factors are chosen once, for this length.
        """
        self.running.note_rope(replace(self.rope, expected=tokens))

    def choose_rope(self, lengths: Sequence[int]) -> None:
        """Choose the factors of a RoPE that depends on the length, or check those chosen before.

        Args:
            lengths: tokens that each batch entry will have at the end of what is fed now.
        """
        rope, chosen = self.link.rope, self.rope.chosen
        if rope is None:
            return
        if chosen is None or self.get_seq_length() == 0:
            expected = self.rope.expected
            factors = [rope.factors_for(max(length, expected)) for length in lengths]
            self.resume_rope(RopeLengths.of(factors))
        else:
            self.check_rope(lengths)

    def check_rope(self, lengths: Sequence[int]) -> int | None:
        """Refuse texts that outgrow the factors by which the keys were rotated (UsageError).

        Args:
            lengths: tokens that each batch entry will have.

        Returns:
            How many more tokens each of them may have; None: any number.
        """
        rope, chosen, rooms = self.link.rope, self.rope.chosen, list[int]()
        if rope is None or chosen is None:
            return None
        for factors, length in zip(chosen.of_entries(len(lengths)), lengths, strict=False):
            longest = rope.longest(factors)
            if longest is not None and length > longest:
                raise UsageError(
                    f"the keys in this cache have the RoPE factors of texts of up to {factors} "
                    f"tokens, and this text may come to {length}",
                    hint="generate fewer tokens, or read the text anew for its whole length: "
                    "compress with a larger --max-new-tokens (cache.expect_length in Python)",
                )
            rooms += [] if longest is None else [longest - length]
        return min(rooms, default=None)

    def join_rope(self, others: Sequence[Self]) -> None:
        """Note the factors of batch entries that are put behind those of this cache."""
        joined = [(each.rope.chosen, each.first_layer.batch_size) for each in (self, *others)]
        lengths = [
            length
            for rope, batch in joined
            if rope is not None
            for length in rope.of_entries(batch)
        ]
        self.resume_rope(RopeLengths.of(lengths) if lengths else None)

    def resume_rope(self, rope: RopeLengths | None) -> None:
        """Note for which lengths the factors of the keys in this cache were chosen."""
        self.running.note_rope(replace(self.rope, chosen=rope, serves=0))

    def forget_rope(self) -> None:
        """Let the factors be chosen anew, for a text that has not been fed at all."""
        self.resume_rope(None)

    # ---- batch entries

    def ungroup(self) -> None:
        """Let every layer decide alone again: their slots are about to change."""
        if self.groups.formed:
            self.groups.ungroup()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._reindex(lambda rows: rows[beam_idx.to(rows.device)])
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._reindex(lambda rows: rows.repeat_interleave(repeats, 0))
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._reindex(lambda rows: rows[indices.to(rows.device)])
        super().batch_select_indices(indices)

    def _reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        self.ungroup()
        if self.running.in_generate:  # whose beams are noted at its end, not token by token
            self._text = Text()
            self.running.note_text(None)
        else:
            text = self.text
            known = (text.input_ids, text.next_logits)
            ids, logits = (None if each is None else change(each) for each in known)
            self._text = replace(text, input_ids=ids, next_logits=logits)
        self.budgets.reindex(change)
        for part in self.parts.values():
            part.reindex(change)
        if self.rope.chosen is not None:
            self.resume_rope(self.rope.chosen.reindexed(change))

    # ---- going back

    def reset(self) -> None:
        """Forget the text."""
        self.ungroup()
        self.static.forget()
        for part in self.parts.values():
            part.clear()
        self.running, self._text, self.changing = ForwardState(), Text(), False
        self.budgets.reset()
        super().reset()
        self.meter.forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back, as assisted generation does.

        Args:
            tokens_to_remove: how many, as a negative number; a positive one is how many stay, as
                earlier releases of transformers have it.

        Raises:
            KvtoolError: they cannot be taken back, such as from a cache that evicts.
        """
        seen = self.first_layer.seen
        stay = tokens_to_remove if tokens_to_remove > 0 else seen + tokens_to_remove
        tokens = min(max(seen - stay, 0), seen)
        if not tokens:
            return
        self._check_crop()
        text = self.text
        ids = None if text.input_ids is None else text.input_ids[:, : seen - tokens]
        self.ungroup()
        self.static.forget()
        super().crop(-tokens)
        self._text = Text(ids, plain=text.plain)
        self.running.note_text(None if ids is None else seen - tokens)

    def _check_crop(self) -> None:
        """Refuse to crop before any layer has been cropped."""
        self.check_whole()
        whys = [layer.why_no_crop() for layer in self.slot_layers]
        others = [layer for layer in self.layers if not isinstance(layer, SlotLayer)]
        if not all(layer.is_croppable for layer in others):
            whys.append("its recurrent layers do not go back")
        for why in filter(None, whys):
            raise KvtoolError(
                f"this cache, of policy `{self.policy}`, cannot be cropped: {why}",
                hint="generate without an assistant model and without prompt lookup",
            )

    def copy(self) -> Self:
        """Return a cache with the same content that goes its own way from here; see `rollback`."""
        return self.copy_but([])

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def __copy__(self) -> Self:
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise KvtoolError(
            "a cache cannot be pickled",
            hint="kvtool.save_cache(cache, path) writes it, and kvtool.load_cache(path, model) "
            "reads it",
        )

    def become(self, other: Self) -> None:
        """Take over what another cache holds, which is not to be used any more."""
        self.__dict__ = other.__dict__

    @contextmanager
    def rollback(self) -> Iterator[None]:
        """Leave the cache as it was: what is fed or generated inside is forgotten at the end.

        Keys and values are not copied as long as new ones only come behind them; a policy that
        writes over a stored key copies its layer once. May be nested.
        """
        used = [layer for layer in self.slot_layers if layer.is_initialized]
        stores = [store.slots for layer in used for store in layer.stores]
        before = self.copy_but([tensor for each in stores for tensor in each.stored.values()])
        for each in stores:
            each.share()
        try:
            yield
        finally:
            self.become(before)

    def copy_but(self, shared: list[Tensor]) -> Self:
        """Return a copy that shares some tensors, and what never changes, with this cache."""
        self.ungroup()
        with torch.inference_mode(False):  # what is made inside it could not be written outside
            return copy.deepcopy(self, {id(tensor): tensor for tensor in shared})
