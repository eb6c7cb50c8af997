"""Count how often CaliDrop would attend to evicted tokens, on real queries (figure 3b).

A query is held, and its cosine with the one of each step decides. Below `theta1` the evicted part
is computed anew and the step's query is held instead. Then, or above `theta2`, the output is
calibrated; in between it is left alone. https://arxiv.org/abs/2507.19906
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.profiling.seen import Seen

DEFAULT = (0.7, 0.85)
GRID = [DEFAULT, *((t1, t2) for t1 in (0.6, 0.65, 0.7, 0.75, 0.8) for t2 in (0.8, 0.85, 0.9))]
GRID = [point for point in dict.fromkeys(GRID) if point[0] < point[1]]
_FEW, _PROMPT = 16, 128  # decoded queries that are too few, and prompt queries used instead


def recompute_shares(queries: Tensor, grid: Sequence[tuple[float, float]]) -> Tensor:
    """Replay the automaton.

    Args:
        queries: (..., 1 + steps, dim); the first is held at the beginning.
        grid: pairs of theta1 and theta2.

    Returns:
        (..., grid, 2): shares of the steps that recompute, and that calibrate (those included).
    """
    units = functional.normalize(queries.float(), dim=-1, eps=1e-8)
    cosines = units @ units.transpose(-1, -2)
    theta1 = list(dict.fromkeys(low for low, _ in grid))
    low = torch.tensor(theta1, device=queries.device)
    held = torch.zeros(*units.shape[:-2], len(theta1), dtype=torch.long, device=queries.device)
    steps = units.shape[-2] - 1
    rho = torch.empty(steps, *held.shape, dtype=torch.float32, device=queries.device)
    for step in range(steps):
        rho[step] = cosines[..., step + 1, :].gather(-1, held)
        held = torch.where(rho[step] < low, step + 1, held)
    rho = rho[..., [theta1.index(t1) for t1, _ in grid]]
    pairs = torch.tensor(grid, device=queries.device)
    recomputed = rho < pairs[:, 0]
    calibrated = recomputed | (rho > pairs[:, 1])
    return torch.stack([recomputed.double().mean(0), calibrated.double().mean(0)], -1)


def replays_prompt(steps: int) -> bool:
    """Whether so few tokens are decoded that the last queries of the prompt are replayed, too."""
    return steps < _FEW


class RecomputeFrequency:
    """Shares of steps that recompute and calibrate in every layer, per head and thresholds."""

    def __init__(self, steps: int) -> None:
        """Expect `steps` decoded tokens."""
        self._from_prompt = _PROMPT if replays_prompt(steps) else 1
        self._queries: dict[int, list[Tensor]] = {}

    def see(self, seen: Seen) -> None:
        """Keep the last query of the prompt and those of decoded tokens."""
        last = seen.query[:, -self._from_prompt :].float()
        self._queries.setdefault(seen.layer, []).append(last.clone())

    def results(self) -> dict[str, dict[int, Tensor]]:
        """Return (heads, grid, 2)."""
        shares = {
            layer: recompute_shares(torch.cat(queries, 1), GRID)
            for layer, queries in self._queries.items()
        }
        return {"recompute_frequency": shares}
