"""The output projection of a layer's attention, shown to a policy that looks at it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import Lanes, LayerSite, Part
from kvtool.policies.evidence import OutputProjection
from kvtool.policies.parts import SlotView


class Projection(Part):
    """Where a layer finds the weight of its output projection, which stays the model's.

    Attributes:
        weight: returns it, (hidden_size, heads * value_dim); None: no model is known.
    """

    name = "projection"
    joins_decode = False
    refusals: Mapping[str, str] = {
        "eager": "policy `{policy}` looks at what the output projection makes of values, "
        "and the eager attention of `{model}` does not show it",
        "latents": "policy `{policy}`",
    }

    def __init__(
        self, weight: Callable[[], Tensor] | None, heads: Tensor | None = None, kv_heads: int = 1
    ) -> None:
        self.weight, self._heads, self._kv_heads = weight, heads, kv_heads

    @classmethod
    def make(cls, site: LayerSite) -> Projection | None:
        return cls(site.projection) if site.policy.sees_projection else None

    def seen(self) -> OutputProjection:
        """Return it as a policy sees it."""
        if self.weight is None:
            raise RuntimeError("this cache was made without a model")
        return OutputProjection(self.weight(), self._heads, self._kv_heads)

    def for_heads(self, lanes: Lanes) -> Projection:
        return Projection(self.weight, lanes.heads, lanes.kv_heads)

    def show(self, layer: SlotLayer, view: SlotView) -> SlotView:
        return replace(view, projections=(*view.projections, self.seen()))
