"""Cut every few decoded tokens, not after each.

Holding a budget after every token costs a selection a token. Here decoded tokens are appended, and
once `steps` of them are above the budget, one selection cuts back to it. So up to budget + steps
tokens are held, and a token attends to all of them; a prompt is cut to the budget at its end. R-KV
(Cai et al., 2025, https://arxiv.org/abs/2505.24133) holds its budget so.

On policies that cut a prompt by the votes of its last queries (SnapKV, PyramidKV, AdaKV), the
newest queries vote anew at each cut, over all slots that are stored then, as models that reason are
compared in https://arxiv.org/abs/2512.12008 (2025). Each layer keeps its newest queries as R-KV
does. A cut leaves to each head what the last cut of a prompt gave it. Queries see no later token,
those of images neither.
"""

from dataclasses import dataclass
from typing import ClassVar

from kvtool.policies.parts import Pace
from kvtool.policies.spelling import limited


@dataclass(frozen=True)
class Every(Pace):
    """Cut every `steps` decoded tokens, from the budget and these back to the budget.

    Args:
        steps: decoded tokens between two cuts.
    """

    steps: int = limited(64, "1 or more")

    name: ClassVar = "every"
    paper: ClassVar = "https://arxiv.org/abs/2505.24133"

    @property
    def spare(self) -> int:
        return self.steps
