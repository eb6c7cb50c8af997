"""The layers of a model before a budget is split over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.documents.memory import ModelShape
from kvtool.documents.plan import LayerPlan
from kvtool.errors import UsageError
from kvtool.maths.allocation import Allocation
from kvtool.model_shape import FREE, LayerShape


@dataclass(frozen=True)
class PlannableLayers:
    """The layers of a model before the budget is split.

    Attributes:
        free: indices of the layers to split over.
        prompt_tokens: length of the longest prompt.
        shapes: what each layer stores of a token.
    """

    free: list[int]
    prompt_tokens: int
    shapes: list[LayerShape | None]

    @classmethod
    def of(cls, model: ModelShape, prompt: int, shapes: list[LayerShape | None]) -> PlannableLayers:
        free = [i for i, kind in enumerate(model.layer_types) if kind in FREE]
        if not free:
            raise UsageError(
                f"model `{model.id}` has no layer whose budget is free",
                hint="layers with a sliding window keep just that, whatever the budget",
            )
        return cls(free, prompt, shapes)

    @property
    def free_shapes(self) -> list[LayerShape]:
        """What the layers to split over store."""
        return [layer for layer in self.shapes if layer is not None and layer.window is None]

    @property
    def fixed(self) -> dict[int, int]:
        """Tokens that each layer holds at most whose budget is not free."""
        windows = {i: layer.window or 0 for i, layer in enumerate(self.shapes) if layer is not None}
        return {i: windows.get(i, 0) for i in range(len(self.shapes)) if i not in self.free}

    def tokens(self, split: Sequence[int]) -> list[int]:
        """Return the tokens of every layer."""
        held = self.fixed | dict(zip(self.free, split, strict=True))
        return [held[i] for i in range(len(held))]

    def plan(self, allocator: str, least: int, split: Allocation) -> LayerPlan:
        n = self.prompt_tokens
        free = dict(zip(self.free, split.tokens, strict=True))
        return LayerPlan(
            allocator=allocator,
            min_tokens=least,
            tokens=self.tokens(split.tokens),
            fractions=[free[i] / n if i in free else None for i in range(len(self.shapes))],
        )
