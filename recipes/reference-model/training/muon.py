"""Muon: momentum whose update is made nearly orthogonal, for weight matrices.

Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/. The update is scaled by
0.2 * sqrt(longest side), which gives it the size of an Adam update (Liu et al., 2025,
https://arxiv.org/abs/2502.16982).
"""

import math

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # quintic Newton-Schulz iteration of the first source
_ITERATIONS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return matrices of the same singular vectors, with singular values near one.

    Args:
        matrices: (..., rows, columns).
    """
    a, b, c = _COEFFICIENTS
    wide = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    x = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if matrices.shape[-2] > matrices.shape[-1] else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; takes two-dimensional parameters only."""

    def __init__(self, params: list[Tensor], *, lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes no closure
        """Update every parameter that has a gradient; equal shapes go through in one batch."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    pair = parameter, parameter.grad
                    by_shape.setdefault(parameter.shape, []).append(pair)
            for shape, pairs in by_shape.items():
                updates = torch.stack([self._nesterov(*pair, group["momentum"]) for pair in pairs])
                scale = group["lr"] * 0.2 * math.sqrt(max(shape))
                for (parameter, _), update in zip(pairs, orthogonalise(updates), strict=True):
                    parameter.add_(update, alpha=-scale)

    def _nesterov(self, parameter: Tensor, gradient: Tensor, momentum: float) -> Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(state["momentum"], momentum)
