"""Published budget curves: the share of the prompt that each layer keeps, for some mean shares."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvtool.documents.files import expand, read_bytes
from kvtool.errors import UsageError, quote


@dataclass(frozen=True)
class BudgetCurves:
    """Budget curves out of a file.

    Attributes:
        ratios: mean shares of the prompt, ascending.
        shares: for each ratio the share of each layer, the mean over its KV heads.
        by_head: whether the file has shares of KV heads.
    """

    ratios: Sequence[float]
    shares: Sequence[Sequence[float]]
    by_head: bool

    def at(self, ratio: float) -> list[float]:
        """Return the shares of the layers for a ratio, on the lines between those of the file.

        Below the smallest ratio of the file, and above the largest, its shares grow in proportion.
        """
        if not self.ratios[0] < ratio < self.ratios[-1]:
            place = 0 if ratio <= self.ratios[0] else -1
            return [share * ratio / self.ratios[place] for share in self.shares[place]]
        rows = zip(pairwise(self.ratios), pairwise(self.shares), strict=True)
        (low, high), (before, after) = next(row for row in rows if ratio <= row[0][1])
        part = (ratio - low) / (high - low)
        return [a + part * (b - a) for a, b in zip(before, after, strict=True)]


def read_curves(path: str, layers: int, kv_heads: int) -> BudgetCurves:
    """Read budget curves: a JSON object of ratios, each with a share or a list of shares per layer.

    Args:
        path: of the file.
        layers, kv_heads: of the model.

    Raises:
        UsageError: no such file, something that is no share, or another number of layers or heads.
    """
    where = f"`{path}`"
    try:
        data = json.loads(read_bytes(expand(path), where, kind="file of budget curves"))
    except UsageError:
        raise
    except OSError:
        raise UsageError(f"cannot read budget curves from {where}") from None
    except ValueError as error:
        raise UsageError(f"{where} holds no budget curves: {error}") from None
    if not isinstance(data, dict) or not data:
        raise UsageError(f"{where} holds no budget curves", hint='{"0.2": [0.1, 0.3], ..}')
    rows = {_share(key, f"{where}: a ratio"): (key, value) for key, value in data.items()}
    if 0 in rows:
        raise UsageError(f"{where}: a ratio must be above 0")
    shares, by_head = [], False
    for ratio in sorted(rows):
        key, value = rows[ratio]
        found = len(value) if isinstance(value, list) else 0
        if found != layers:
            raise UsageError(f"{where} has {found} layers at {key}, and the model {layers}")
        by_head |= any(isinstance(own, list) for own in value)
        shares.append(
            [_layer(own, f"{where}: layer {i} at {key}", kv_heads) for i, own in enumerate(value)]
        )
    return BudgetCurves(sorted(rows), shares, by_head)


def _layer(value: Any, where: str, kv_heads: int) -> float:
    """Return the share of a layer, the mean of its heads where it has one for each."""
    if not isinstance(value, list):
        return _share(value, where)
    if len(value) != kv_heads:
        raise UsageError(f"{where} has {len(value)} KV heads, and the model {kv_heads}")
    return math.fsum(_share(each, where) for each in value) / kv_heads


def _share(value: Any, where: str) -> float:
    try:
        share = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        share = math.nan
    if not 0 <= share <= 1:
        raise UsageError(f"{where} must be a share from 0 to 1, got {quote(str(value))}")
    return share
