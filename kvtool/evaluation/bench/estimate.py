"""Estimate what the prompts and caches of a comparison will measure, without weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtool.documents.memory import DeviceMemory
from kvtool.evaluation.samples.sample import Json, Sample
from kvtool.evaluation.tasks.asking import Asking
from kvtool.evaluation.tasks.task import Task
from kvtool.model_shape import trained_length
from kvtool.planning.bytes import Text
from kvtool.planning.estimate import bytes_held, estimate_memory
from kvtool.planning.variants import Variant

if TYPE_CHECKING:
    from kvtool.documents.settings import Protocol


def largest_batch_of(samples: Sequence[Sample]) -> int:
    """Return the most rows in which a sample is run."""
    return max((int(sample.cell.get("batch", 1)) for sample in samples), default=1)


@dataclass(frozen=True)
class Estimate:
    """What prompts and caches will measure.

    Attributes:
        tokenizer, config: of the model, as transformers loads them.
        dtype: of the cache, by name; `auto` is the checkpoint's own.
        protocol: how prompts are put.
    """

    tokenizer: Any
    config: Any
    dtype: str
    protocol: Protocol

    def of(
        self,
        task: Task,
        samples: Sequence[Sample],
        variants: Sequence[Variant],
        memory: DeviceMemory,
    ) -> Json:
        """Return the longest prompt in tokens, and the bytes that each variant holds and needs.

        Nothing is returned where only the task knows its prompts. `memory` counts the answers and
        as many rows as the largest batch, `kv_bytes` one prompt alone.

        Args:
            memory: of the device that the model will run on.

        Raises:
            UsageError: a budget that is too small for a variant.
        """
        lengths = [self.prompt_tokens(task, sample) for sample in samples]
        if None in lengths:
            return {}
        longest = max(length for length in lengths if length is not None)
        new, rows = self.answer_tokens(samples), largest_batch_of(samples)
        text = Text(longest, new, rows, self.config.get_text_config(decoder=True).vocab_size)
        held = {
            variant.name: bytes_held(self.config, self.dtype, variant, longest)
            for variant in variants
        }
        found = {
            variant.name: estimate_memory(self.config, self.dtype, variant, text, memory)
            for variant in variants
        }
        if self.protocol.shared_prefill and isinstance(task, Asking):
            alone = dict(found)
            for name, each in alone.items():
                found[name] = each.beside([alone[k] for k in alone if k != name], memory)
        return {"longest_prompt": longest, "kv_bytes": held, "memory": found}

    def answer_tokens(self, samples: Sequence[Sample]) -> int:
        """Return the most tokens that a sample generates, in all its turns together."""
        fixed = self.protocol.max_new_tokens
        answers = [
            sum(fixed or turn.max_new_tokens for turn in each.turns)
            or int(each.cell.get("new_tokens", 0))
            for each in samples
        ]
        return max(answers, default=0)

    def prompt_tokens(self, task: Task, sample: Sample) -> int | None:
        """Return the tokens of a sample up to its first answer, cut where they are cut."""
        from kvtool.evaluation.bench.prompts import first_prompt, spoken
        from kvtool.models.chat import Frame, make_frame

        if not sample.turns:
            if sample.context:
                return self._count(sample.context, special=True)
            length = sample.cell.get("length")
            return None if length is None else int(length)
        frame, limit, talk = Frame(), None, isinstance(task, Asking) and task.conversation
        if isinstance(task, Asking):
            wanted = self.protocol.template
            frame = make_frame(self.tokenizer, wanted, task.chat, thinking=task.enable_thinking)
            limit = self.protocol.max_length or trained_length(self.config)
        whole = first_prompt(
            self.tokenizer,
            spoken(frame) if talk else frame,
            sample,
            max_length=None,
            truncate="error",
            conversation=talk,
        )
        count = self._count(whole.context + whole.question, special=whole.special)
        return count if limit is None else min(count, limit)

    def _count(self, text: str, *, special: bool) -> int:
        return len(self.tokenizer(text, add_special_tokens=special)["input_ids"])
