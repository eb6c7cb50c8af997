"""The cache that transformers holds: what it does with forwards, prompts and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from html import escape
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvtool.cache.features.cuts import cut_deferred
from kvtool.cache.features.rope_shift import place_forward
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.tensor_parallel import heads_of_layer
from kvtool.cache.steps.bucket_calls import beside_slots
from kvtool.cache.steps.call import (
    IMPLEMENTATION,
    Call,
    MaskTarget,
    PendingStep,
    StepContext,
    Unstored,
    check_attended,
    forget_pending,
    set_mask_target,
    set_pending,
)
from kvtool.cache.steps.static import may_grow, reserve_slots
from kvtool.cache.whole.state import CacheState
from kvtool.documents.document import report
from kvtool.documents.generation import CacheSection
from kvtool.sizes import DEFAULT_BLOCK, next_block


class InWords:
    """A cache that says what it holds, as the commands do."""

    def __str__(self: Any) -> str:
        return CacheSection.taken_from(self.report()).in_words()

    def __repr__(self: Any) -> str:
        budget = "" if self.budget is None else f", budget {self.budget}"
        return f"<{type(self).__name__} {self.policy}{budget}: {self}>"

    def _repr_html_(self: Any) -> str:
        return f"<p><code>{escape(str(self.policy))}</code>: {escape(str(self))}</p>"

    def show(self, tokenizer: Any = None, *, input_ids: Tensor | None = None, row: int = 0) -> Any:
        """Show the text token by token, each with the share of layers and heads that hold it.

        Scores, merged tokens and those that a reader has read are shown where `record` was called
        before the text was read.

        Args:
            tokenizer: None takes that of the folder or hub ID that the model came from.
            input_ids: (batch, n) the text, padding on its left; None takes what the cache knows,
                unless plain forwards fed it: only their caller knows where padding was.
            row: the batch entry.

        Returns:
            A `kvtool.report.kept.text.KeptText`: `print` it, `save("kept.html")` it, or let a
            notebook show it.

        Raises:
            UsageError: nothing has been read, or the text is unknown.
            KvtoolError: the tokenizer cannot be loaded.
        """
        return report("kept.text").kept_text(self, tokenizer, input_ids=input_ids, row=row)


@contextmanager
def storing_nothing(cache: CacheState, attends: Unstored) -> Iterator[None]:
    """Let a part attend the forwards inside, and store none of their tokens."""
    with cache.rollback() if cache.recurrent else nullcontext():
        cache.running.store_nothing(attends)
        try:
            yield
        finally:
            cache.running.store_nothing(None)


def entry_budgets(cache: CacheState) -> list[int]:
    """Return the least that a layer may keep of each batch entry; without budgets, all of it."""
    entries: list[list[int]] = []
    for layer in _free(cache):
        tokens = layer.budget.tokens
        if isinstance(tokens, Tensor):
            entries.append(tokens.flatten().tolist())
        else:
            entries.append([tokens] * layer.batch_size)
    if not entries:
        return cache.tokens_seen()
    return [min(entry) for entry in zip(*entries, strict=True)]


def _free(cache: CacheState) -> list[SlotLayer]:
    return [layer for layer in cache.slot_layers if layer.window is None]


_PARTS = 512  # forwards whose ids are held apart


class StepWatcher(NamedTuple):
    """What is shown every step that has run, and whether with the norms of rows."""

    show: Callable[[PendingStep, Call, Tensor], None]
    norms: bool


class KVCache(InWords, CacheState):
    """A transformers cache whose attention layers hold at most their budget.

    A user's first forward is taken as the prompt, and so is every later one of more than one token;
    `prompt()` says so where it is not plain (blocks of one token, the length of a prompt that comes
    in blocks).
    """

    _watcher: StepWatcher | None = None

    # ---- what transformers asks

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        layer = self.layers[layer_idx]
        if not isinstance(layer, SlotLayer):
            return layer.update(key_states, value_states, *args, **kwargs)
        running, q_len = self.running, key_states.shape[2]
        if layer.unattended:
            check_attended(layer)
        begun = layer.seen_device is not None or layer.seen > 0
        decoding = q_len == 1 and begun and not running.in_prompt
        if self.parts:
            for part in self.parts.values():
                part.check_tokens(decoding)
        if self.settings.renumbers:
            running.check_placed(layer)
        self.changing, hidden = True, running.hidden
        if hidden is not None:
            running.show_hidden(None)  # not to be held longer than the step
        kernel, shares_kv = self.settings.kernel, layer.index in self.settings.kv_sharing
        placement, watcher = running.placement, self._watcher
        if running.unstored is not None and not decoding:
            raw_key, raw_value = beside_slots(layer, key_states, value_states)
            context = StepContext(kernel, notify=False, unstored=running.unstored, hidden=hidden)
        elif not decoding:
            self.ungroup()
            self.static.forget()
            raw_key, raw_value = layer.update(key_states, value_states, rounded=running.rounds)
            self.meter.run(raw_key.nbytes + raw_value.nbytes)
            context = StepContext(
                kernel,
                block=self.layer_block,
                last=running.last_block,
                placement=placement,
                shares_kv=shares_kv,
                norms=[] if watcher is not None and watcher.norms else None,
                hidden=hidden,
            )
        else:
            if layer is self.slot_layers[0] and layer.seen_device is None:
                self.groups.form(self.slot_layers, running.masked)
            group = self.groups.by_layer.get(layer.index)
            if group is None and layer.parts:
                self.prepare_decode(layer)
            raw_key, raw_value = layer.write_token(key_states, value_states)
            context = StepContext(
                kernel,
                placement=placement,
                group=group,
                notify=placement is not None or watcher is not None,
                shares_kv=shares_kv,
                hidden=hidden,
            )
        taken = raw_key, raw_value, key_states, value_states
        set_pending(PendingStep(self, layer, *taken, decoding, context))
        return raw_key, raw_value

    def decodes(self, layer: SlotLayer, q_len: int) -> bool:
        """Whether `q_len` new tokens are one decoded token, and not a block of a prompt."""
        begun = layer.seen_device is not None or layer.seen > 0
        return q_len == 1 and begun and not self.running.in_prompt

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        layer = self.layers[layer_idx]
        layer = layer if isinstance(layer, SlotLayer) else self.slot_layer(layer_idx)
        if self.settings.config._attn_implementation == IMPLEMENTATION:
            decoding = self.decodes(layer, query_length)
            set_mask_target(MaskTarget(layer, decoding, self.running.own_mask))
        return layer.get_mask_sizes(query_length)

    @property
    def is_linear(self) -> list[bool]:
        return self.linear

    def end_forward(self, ids: Tensor | None = None) -> None:
        """Note that a forward has run through all layers; `ids`: (batch, q_len), None: unknown."""
        self.changing = False
        if (
            ids is None
            or torch.compiler.is_compiling()
            or self.slot_layers[0].seen_device is not None
        ):
            return  # whoever runs a static step notes its tokens
        running, parts = self.running, self.running.fed.parts
        if running.in_generate and ids.shape[1] == 1:  # which notes its text at its end
            return
        if running.in_prompt:  # whoever feeds it knows how it was laid out
            return
        parts.append((self.slot_layers[0].seen, ids.clone()))
        if len(parts) == _PARTS:
            running.fed.pack()

    def break_off(self) -> None:
        """Note that a forward has broken off inside."""
        self.changing = True

    def take_back_step(self) -> None:
        """Forget a static step that was recorded in part, of which nothing has run."""
        self.changing = False
        for layer in self.slot_layers:
            for store in {layer, *layer.stores}:
                store.take_back_token()
        forget_pending()

    def place_forward(self, given: Mapping[str, Any]) -> Tensor:
        """Number the tokens of a forward by their places: position ids, (batch, q_len)."""
        placement, position_ids = place_forward(self.first_layer, given)
        self.running.place(placement)
        return position_ids

    def begin_forward(self) -> None:
        """Refuse a forward over a cache that another one has left torn (KvtoolError)."""
        if self.changing:
            self.check_whole()
        self.changing = self.recurrent

    # ---- steps

    @property
    def layer_block(self) -> int | None:
        """How many tokens of a forward a layer takes before it cuts; None: all of them."""
        policy = self.policy
        whole = self.parts.by_logits or policy.two_stages or policy.repetition is not None
        return None if whole else self.settings.block

    def watch_steps(
        self, show: Callable[[PendingStep, Call, Tensor], None] | None, *, norms: bool = True
    ) -> None:
        """Pass every step that has run to `show`, with the norms of rows; None stops that."""
        self._watcher = None if show is None else StepWatcher(show, norms)

    def prepare_decode(self, layer: SlotLayer) -> None:
        """Let who attends a layer's decoded tokens in its place prepare for them."""
        if layer.parts.attends is not None:
            layer.parts.attends.prepare(layer, self.budgets.traffic)

    def begin_block(
        self, layer: SlotLayer, query_heads: int, positions: Tensor | None, q_len: int
    ) -> None:
        """Fix what a layer holds and may keep, before a block of a prompt is cut.

        Args:
            query_heads: of the layer, in this process.
            positions: (batch, q_len), -1 = padding; None: no padding.
        """
        for own in self.parts.values():
            own.begin_block(layer)
        shards = self.link.shards
        if shards.processes > 1:
            kv_heads = layer.slots.kv_heads
            shape = self.settings.shapes[layer.index]
            layer.slots.set_heads(heads_of_layer(shards, self.config, shape, query_heads, kv_heads))
        running = self.running
        if running.goes_on and running.prompt_lengths and layer.window is None:
            self.budgets.keep(layer, running.prompt_lengths)
        else:
            self.budgets.assign(layer, positions, q_len, running.prompt_lengths)

    def end_step(self, step: PendingStep, call: Call, out: Tensor) -> None:
        """Note that a layer's step has run."""
        if not step.decoding:
            self.end_block(step.layer)
        if step.context.placement is not None and step.layer is self.slot_layers[-1]:
            self.running.place(None)
        if self._watcher is not None:
            self._watcher.show(step, call, out)

    def end_block(self, layer: SlotLayer) -> None:
        """Cut what was deferred, if this was the last layer of a prompt that came at once."""
        if self.budgets.deferred and not self.running.in_prompt and self.budgets.is_last(layer):
            self._cut_deferred()

    def _cut_deferred(self) -> None:
        if self.budgets.waiting:
            for layer in self.budgets.assign_deferred(self.tokens_seen()):
                cut_deferred(layer)

    # ---- prompts

    @contextmanager
    def prompt(self, lengths: list[int] | None = None, new_tokens: int = 0) -> Iterator[None]:
        """Say that the forwards inside are blocks of one prompt; `last_block` says which ends it.

        Args:
            lengths: tokens that each batch entry will have seen at its end; a budget that is a
                ratio is a ratio of these.
            new_tokens: how many will be generated, as far as is known; RocketKV's plan needs it.

        Raises:
            UsageError: an entry's budget is not above the tokens that the policy always keeps.
            KvtoolError: a forward was interrupted before.
        """
        self.check_whole()
        self.budgets.expect(new_tokens)
        if lengths is not None:
            self.budgets.check(lengths)
        self.running.enter_prompt(lengths)
        for part in self.parts.values():
            part.begin_prompt()
        before = self.first_layer.seen
        try:
            if lengths is not None:
                self.choose_rope(self._ends(lengths, new_tokens))
            yield
            self._cut_deferred()
            for layer in self.slot_layers:
                if self.running.piece is not None and layer.ragged is None:
                    layer.slots.shrink(layer.slots.used + layer.policy.spare)
                self.prepare_decode(layer)
            self._expect(new_tokens)
        except BaseException:
            if self.first_layer.seen != before:  # it is not cut as at a prompt's end
                self.changing = True
            elif before == 0:
                self.forget_rope()
            raise
        finally:
            self.running.leave_prompt()

    def _ends(self, lengths: list[int], new_tokens: int) -> list[int]:
        """How far each entry is read: to its last new token, or to the end of its repetition."""
        ends = [length + new_tokens for length in lengths]
        for part in self.parts.values():
            read = part.reads_to(lengths, self.budgets.prompt_budgets)
            ends = [max(both) for both in zip(ends, read, strict=True)]
        return ends

    def _expect(self, new_tokens: int) -> None:
        """Let buffers be as large as the tokens to come need, and no larger."""
        if self.plan is not None and new_tokens == 0:
            new_tokens = self.plan.target.max_new_tokens
        for layer in self.slot_layers:
            if layer.is_initialized:
                layer.expect(new_tokens)
        for part in self.parts.values():
            part.end_prompt()

    def expect_logits(self, tokens: Tensor, mask: Tensor | None) -> None:
        """Free slots for the tokens of the coming forward, for a policy that scores by logits.

        Args:
            tokens: (batch, q_len) int64.
            mask: (batch, past + q_len), 0 = padding; None: no padding.
        """
        if not self.parts.by_logits:
            return
        self.changing = True
        first, q_len = self.first_layer, tokens.shape[1]
        decoding = self.decodes(first, q_len)
        valid = None
        if mask is not None and (first.padded or not decoding):
            valid = mask[:, first.seen : first.seen + q_len].bool()
            if not first.padded and bool(valid.all()):  # the one device sync of a prompt block
                valid = None
        parts = self.parts.values()
        if not decoding:
            if not self.running.in_prompt:
                for part in parts:
                    part.begin_prompt()
            self.budgets.plan_block(q_len, valid, self.running.prompt_lengths)
        for part in parts:
            part.begin_forward(tokens, valid, decoding)

    def take_logits(self, logits: Tensor) -> None:
        """Look at the logits, (batch, q_len, vocab), of a forward, for such a policy."""
        for part in self.parts.values():
            part.end_forward(logits)

    def block_sizes(self, lengths: list[int]) -> list[int] | None:
        """How many tokens of each entry the next forward of a prompt should take; None: all.

        Args:
            lengths: tokens that each entry will have seen at the prompt's end.
        """
        block = self.running.piece or self.settings.block
        if block is not None and self.policy.repetition is not None and self.running.piece is None:
            seen = self.tokens_seen() if self.get_seq_length() else [0] * len(lengths)
            return [next_block(n - done, block) for n, done in zip(lengths, seen, strict=True)]
        if not self.parts.by_logits:
            return None if block is None else [block] * len(lengths)
        block = block or DEFAULT_BLOCK
        budgets = self.budgets.prompt_budgets(lengths) or [2 * block] * len(lengths)
        return [min(block, budget // 2 or 1) for budget in budgets]

    # ---- fixed shapes

    def fix_shapes(self, tokens: int) -> bool:
        """Make it so that no shape changes with the next decoded token, if that is possible yet.

        Layers that hold their budget must have filled it. Layers that append reserve slots for
        `tokens` tokens at once, and again when they are used up.

        Returns:
            Whether shapes are fixed, and no step is shown to a watcher.
        """
        if self._watcher is not None or any(map(may_grow, self.slot_layers)):
            return False
        self.ungroup()
        for layer in self.slot_layers:
            reserve_slots(layer, tokens)
        return True

    @contextmanager
    def static_step(self) -> Iterator[None]:
        """Let the forward inside, of one token per entry, change nothing but contents of tensors.

        Only while `fix_shapes` says that shapes are fixed.
        """
        with self.static.step(self.slot_layers):
            yield
