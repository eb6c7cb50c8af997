"""SirLLM: the tokens that surprised the model most, the same ones in every layer and head.

Yao et al., 2024, https://arxiv.org/abs/2405.12528. What the paper calls the entropy of a token is
its surprisal, -log p(x_t | x_<t), by the model's own logits. Tokens are evicted before `incoming`
new ones would exceed the budget. Kept are the sinks, the E - incoming most surprising tokens and
the newest others, budget - incoming in all, where E = budget - sinks - recent. `recent=0` is what
the authors publish.

Logits of a whole prompt take n x vocabulary numbers, so kvtool feeds such a policy in blocks that
the whole model runs. They have 128 tokens or `--prefill block:M`, and at most half of the budget,
since a block takes its slots from tokens that were kept before. A plain `model.generate` computes
the logits of the prompt at once. A block that does not fit beside the sinks drops all before it but
the sinks, and is itself cut to the budget afterwards.

Differences from the authors' code: the first token of a block is judged by the logits that the
block before has left, as every other token is. There a turn is read apart, and its first token gets
the largest surprisal of the turn, as here the first token of the text does. The decay comes once a
turn, at its first cut; decoded tokens cause none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.lazy_torch import Tensor
from kvtool.maths.selection import top_mask
from kvtool.policies.numbers import at_least_zero, minimum
from kvtool.policies.parts import AttentionRows, Count, Evidence, SlotView, State
from kvtool.policies.scores.shared import KeepsEnds
from kvtool.policies.spelling import limited


@dataclass(frozen=True)
class SirLLM(KeepsEnds):
    """Keep the tokens that surprised the model most, the same in all layers.

    Args:
        sinks: first tokens that are always kept.
        recent: newest tokens that have their place whatever their surprisal.
        decay: what the surprisals of kept tokens are multiplied by once a turn.
    """

    sinks: int = limited(4, "0 or more")
    recent: int = limited(0, "0 or more")
    decay: float = limited(1.0, "above 0 and at most 1")

    name: ClassVar = "sirllm"
    paper: ClassVar = "https://arxiv.org/abs/2405.12528"
    evidence: ClassVar = Evidence.LOGITS
    layer_tokens: ClassVar = "same"

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        return view.positions.float()

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor:
        sinks = view.sinks(self.sinks)
        count = at_least_zero(view.budget - self.sinks - self.recent - view.block)
        count = minimum(count, view.positions.shape[2])
        return sinks | top_mask(state["surprisal"], view.positions, count, among=~sinks)
