"""SnapKV: the last queries of the prompt vote, and their votes spread to neighbours.

Li et al., 2024, https://arxiv.org/abs/2404.14469, section 4.

Differences from the authors' code: keys are kept per KV head (they repeat them to every query head,
which costs the group's size in memory), the votes of a group are summed before the pooling, and
survivors stay in order. In a prompt run in blocks the last queries of each block vote, as CAOTE
does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.policies.scores.shared import Voting


@dataclass(frozen=True)
class SnapKV(Voting):
    """Keep the prompt tokens that the last queries attend to, with their neighbours; then append.

    Its settings are those of every score by votes.
    """

    name: ClassVar = "snapkv"
    paper: ClassVar = "https://arxiv.org/abs/2404.14469"
