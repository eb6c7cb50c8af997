"""How a cache's prompt is repeated before it is cut, and the weights that its slots received."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvtool.errors import KvtoolError, UsageError
from kvtool.policies.evidence import RepetitionAsked
from kvtool.policies.policy import Policy


@dataclass(frozen=True)
class Instructions:
    """What goes around a prompt that is repeated, in tokens.

    Attributes:
        first: token ids before the first chunk.
        later: before every other one.
        before, behind: tokens of the prompt around its text, which are not repeated.
    """

    first: Sequence[int]
    later: Sequence[int]
    before: int = 0
    behind: int = 0


class RepeatedWeights:
    """The highest weights that slots receive while their prompt is repeated.

    Attributes:
        sinks: so many first tokens are attended to beside the running chunk.
        starts, ends: positions of the running chunk of each batch entry; equal where it has none.
        by_layer: (batch, kv_heads, slots) float32 of each layer, by its index.
    """

    def __init__(self, sinks: int) -> None:
        self.sinks = sinks
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.by_layer: dict[int, Tensor] = {}

    def begin_chunk(self, spans: Sequence[tuple[int, int]]) -> None:
        """Say which tokens of each batch entry the next forward repeats."""
        self.starts, self.ends = [start for start, _ in spans], [end for _, end in spans]

    def slots(self, positions: Tensor, padded: bool) -> tuple[Tensor, Tensor]:
        """Find the slots of the first tokens and of the running chunk.

        Args:
            positions: (batch, slots) in ascending order but for padding, -1.
            padded: whether there is any.

        Returns:
            (batch, sinks + longest chunk) int64 indices, and which of them are tokens.
        """
        device = positions.device
        starts, ends = (torch.tensor(t, device=device)[:, None] for t in (self.starts, self.ends))
        width = max(end - start for start, end in zip(self.starts, self.ends, strict=True))
        sinks = torch.arange(self.sinks, device=device).expand(len(starts), -1)
        chunk = starts + torch.arange(width, device=device)
        wanted = torch.cat([sinks, chunk], 1)
        there = torch.cat([(sinks < starts) & (ends > starts), chunk < ends], 1)
        if padded:
            empty = (positions < 0).sum(-1, keepdim=True)
            wanted = positions.argsort(-1).gather(
                1, (wanted + empty).clamp(max=positions.shape[1] - 1)
            )
        return wanted.clamp(max=positions.shape[1] - 1), there

    def add(self, layer: int, weights: Tensor, index: Tensor, there: Tensor, slots: int) -> None:
        """Note the weights on the running chunk.

        Args:
            weights: (batch, kv_heads, sinks + longest chunk) float32.
            index, there: as `slots` returns them.
            slots: of the layer.
        """
        if layer not in self.by_layer:
            self.by_layer[layer] = weights.new_zeros(*weights.shape[:2], slots)
        chunk = slice(self.sinks, None)
        own = (weights * there[:, None])[:, :, chunk]
        place = index[:, None, chunk].expand_as(own)
        self.by_layer[layer].scatter_reduce_(2, place, own, "amax")


class Repetition:
    """What a cache knows of how its prompt is repeated; later texts are appended.

    Attributes:
        asked: what the score wants.
        instructions: in tokens; None where nobody has a tokenizer.
        ended: whether the prompt has been cut, or fits.
        driven: whether somebody feeds a prompt who will repeat it.
        running: what notes the weights of the running forward, which repeats; None: it does not.
    """

    refusals: ClassVar[Mapping[str, str]] = {
        "eager": "`{policy.score.name}` looks back from queries, "
        "and the eager attention of `{model}` does not show them",
        "joined": "it reads each prompt a second time",
    }

    def __init__(self, asked: RepetitionAsked, name: str) -> None:
        self.asked, self._name = asked, name
        self.instructions: Instructions | None = None
        self.running: RepeatedWeights | None = None
        self.reset()

    @classmethod
    def of(cls, policy: Policy) -> Repetition | None:
        """Return it for a policy that has its prompt repeated; None for others."""
        asked = policy.repetition
        return None if asked is None else cls(asked, policy.score.name)

    @classmethod
    def serves(cls, policy: Policy) -> bool:
        """Whether a policy has its prompt repeated."""
        return policy.repetition is not None

    def reset(self) -> None:
        """Forget the text, and what stood around it."""
        self.ended = self.driven = False
        if self.instructions is not None:
            self.instructions = replace(self.instructions, before=0, behind=0)

    def instruct(self, instructions: Instructions) -> None:
        """Say what goes around the prompt that comes."""
        self.instructions = instructions

    def begin(self) -> None:
        """Say that a prompt is fed which will be repeated.

        Raises:
            UsageError: nobody knows the instruction's tokens.
        """
        if self.ended:
            return
        if self.instructions is None:
            raise UsageError(
                f"policy `{self._name}` tells the model to repeat its prompt, "
                "and there is no tokenizer to say so with",
                hint="compress(model, cache, ids, tokenizer=tokenizer)",
            )
        self.driven = True

    def longest_pass(self, tokens: int) -> int:
        """Return how many tokens a forward feeds at most that repeats a part of so many tokens."""
        instructions = self.instructions
        if instructions is None:
            return 0
        around = max(len(instructions.first), len(instructions.later) + self.asked.lead)
        return around + min(tokens, self.asked.chunk)

    def repeat(self, weights: RepeatedWeights | None) -> None:
        """Take the next forwards as repetitions whose weights are noted; None: not any more."""
        self.running = weights

    def end(self) -> None:
        """Say that what comes is appended."""
        self.ended, self.driven = True, False

    def weights(self) -> RepeatedWeights | None:
        """Return what notes the weights of a forward that repeats; None for one that is stored.

        Raises:
            KvtoolError: a prompt that is fed by a plain forward, so that nobody will repeat it.
        """
        if not (self.ended or self.driven):
            raise KvtoolError(
                f"policy `{self._name}` has a prompt repeated before it is cut, "
                "and a plain forward, or `generate` of transformers, reads it once",
                hint="kvtool.compress(..) or kvtool.generate(..); from then on the model's own",
            )
        return self.running
