"""What a cache knows of the text that it holds, and of the model that it was built for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from kvtool.cache.rope_lengths import LengthRope
from kvtool.documents.messages import Said
from kvtool.documents.plan import PlanDocument
from kvtool.policies.heads import ALL_HERE, KVHeads
from kvtool.policies.policy import Policy
from kvtool.sizes import Budget
from kvtool.transformers_versions import kv_sharing_layers


@dataclass(frozen=True)
class CacheSettings:
    """What a cache was made with.

    Attributes:
        config: of the text model.
        budget: None for policies that keep everything, and where nobody has given any.
        block: tokens of a prompt that are read at once; None: all.
        kernel: what runs where nobody asks for weights.
        plan: in place of a budget.
    """

    config: PreTrainedConfig
    policy: Policy
    budget: Budget | None
    block: int | None
    kernel: str
    plan: PlanDocument | None

    def __post_init__(self) -> None:
        _ = self.kv_sharing  # found now: torch.compile cannot trace the lock of the first time

    @cached_property
    def kv_sharing(self) -> frozenset[int]:
        """The layers whose keys and values later ones read."""
        return frozenset(kv_sharing_layers(self.config))

    def __deepcopy__(self, memo: dict) -> CacheSettings:
        return self  # never changed


def _nobody() -> None:
    return None


@dataclass(frozen=True)
class ModelLink:
    """The model that a cache was built for.

    Attributes:
        model: returns it, None once it is gone.
        shards: how its heads are split over processes.
        head_ranks: (attention layers, kv_heads) integers, 0 for the head that most needs the whole
            text; None where nobody has ranked them.
        rope: how its RoPE depends on the length of the text; None: it does not.
    """

    model: Callable[[], PreTrainedModel | None] = _nobody
    shards: KVHeads = ALL_HERE
    head_ranks: Tensor | None = None
    rope: LengthRope | None = None

    def __deepcopy__(self, memo: dict) -> ModelLink:
        return self  # never changed


@dataclass(frozen=True)
class Text:
    """The text so far, where kvtool drove it or loaded it.

    Attributes:
        input_ids: (batch, n) all tokens; None where nobody knows them.
        next_logits: (batch, vocab) after the last one, where all of them have been fed.
        chat: what it ends with, where it is a conversation in the words of a chat template.
        said: the messages of this conversation, where they are known.
        plain: whether plain forwards have fed any of it: what is padding among its tokens, and on
            which side, only their caller knows.
    """

    input_ids: Tensor | None = None
    next_logits: Tensor | None = None
    chat: Literal["open", "answer"] | None = None
    said: Said | None = None
    plain: bool = False


class FedTokens:
    """Ids of forwards that nobody has noted as text yet; joined when somebody asks.

    Attributes:
        start: tokens of the text that were noted before; None: it is not known what came before.
        parts: for each forward, how many tokens the cache had seen after it, and its own ids.
    """

    def __init__(self, start: int | None = 0) -> None:
        self.start = start
        self.parts: list[tuple[int, Tensor]] = []

    def pack(self) -> None:
        """Join the parts, so that what is held does not grow by a tensor a token."""
        end, ids = self._joined()
        self.parts[:] = [] if ids is None else [(end, ids)]

    def _joined(self) -> tuple[int, Tensor | None]:
        """How far the text is known, and the ids behind what was noted before, if there are any.

        What comes behind a forward that was not noted is left out.
        """
        end = 0 if self.start is None else self.start
        ids: list[Tensor] = []
        for seen, part in self.parts if self.start is not None else []:
            if seen - part.shape[1] != end or (ids and len(part) != len(ids[0])):
                break
            ids.append(part)
            end = seen
        return end, torch.cat(ids, 1) if ids else None

    def behind(self, text: Tensor | None) -> tuple[int | None, Tensor | None]:
        """Return how much of the text is known, and it, (batch, n) on the host: a sync.

        Args:
            text: what was noted before.
        """
        end, ids = self._joined()
        if ids is None:
            return self.start, text
        ids = ids.cpu()
        if not self.start:
            return end, ids
        if text is None or len(text) != len(ids):
            return None, None
        return end, torch.cat([text[:, : self.start].cpu(), ids], 1)
