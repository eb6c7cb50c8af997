"""A budget of tokens or bytes, in tokens of a layer and KV head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from transformers import PreTrainedConfig

from kvtool.cache.storage.layer import SlotLayer
from kvtool.model_shape import LayerShape, layer_shapes
from kvtool.planning.forecast import Text
from kvtool.planning.held import tokens_for_bytes
from kvtool.policies.policy import Policy
from kvtool.sizes import Budget


@dataclass(frozen=True)
class ModelFacts:
    """What bytes follow from, read from a decoder's configuration once it is asked for."""

    config: PreTrainedConfig

    @cached_property
    def layers(self) -> list[LayerShape | None]:
        """What each layer stores, in all processes together."""
        return layer_shapes(self.config)


class TokenBudget:
    """What a budget that is no share of the prompt means for a layer."""

    def __init__(self, policy: Policy, budget: Budget | None, facts: ModelFacts) -> None:
        self._policy, self._budget, self._facts = policy, budget, facts
        self._known: dict[tuple[int, int, int], int] = {}

    def of(self, layer: SlotLayer, length: int, new_tokens: int) -> int:
        """Return tokens, or pairs that are read, per layer and KV head.

        Args:
            length: tokens that the longest entry will have seen at the prompt's end.
            new_tokens: how many will be generated, as far as is known.
        """
        budget = self._budget
        if budget is None:
            raise RuntimeError(f"policy `{self._policy}` has no budget")
        if budget.tokens is not None:
            return budget.tokens
        if budget.bytes is None:
            raise RuntimeError(f"{budget} is a share of the prompt")
        key = (length, layer.batch_size, new_tokens)
        if key not in self._known:
            text = Text(length, new_tokens, layer.batch_size, self._facts.config.vocab_size)
            self._known[key] = tokens_for_bytes(
                self._policy, self._shapes(layer), text, budget.bytes
            )
        return self._known[key]

    def _shapes(self, layer: SlotLayer) -> list[LayerShape | None]:
        """What each layer stores of a token, with numbers of the size that this one is given."""
        size = layer.slots.form.sample[0].element_size()
        return [each and replace(each, itemsize=size) for each in self._facts.layers]
