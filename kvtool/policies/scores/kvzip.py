"""KVzip: keep what the model needs to say its prompt once more.

Kim et al., 2025, https://arxiv.org/abs/2505.23416, section 3. The score of a token in a KV head is
the highest weight that it receives while the prompt, which is whole in the cache, is repeated chunk
by chunk. The softmax is over the first tokens, the chunk and the repetition alone; the repetition
itself attends to everything, as the authors' code has it.

KVzip+ (`plus=true`; Jegou and Jeblick, 2026, https://arxiv.org/abs/2601.07891) multiplies the
weight of query i on token j by |W_O^h v_j| / |h_i|, before the maximum over queries and the heads
of a group. W_O^h are the columns of the attention's output projection that belong to query head h,
and h_i is the hidden state that enters the layer's attention, behind its norm. Lengths are
Euclidean.

Ties go to the lower position, then to the lower layer and head. What the chat template sets around
the text is not repeated, and always kept; so are the first tokens, for which the authors' code
takes the system message. Under a codec the prompt is read in exact numbers, and the repetition
reads the codes.

Differences from the paper: with `--prefill block` a block of 512 tokens is read, repeated, scored
and cut at a time, so that the budget and a block are stored at most. Scores of earlier blocks stay
as they are: each cut leaves what one cut by all scores would leave. The loop is InfiniPot's (Kim
et al., 2024, https://arxiv.org/abs/2410.01518). Short blocks cost answers, as a softmax runs over
fewer tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kvtool.lazy_torch import Tensor
from kvtool.policies.allocate.joint import Joint
from kvtool.policies.evidence import Repeated, RepetitionAsked
from kvtool.policies.parts import Evidence, Score
from kvtool.policies.spelling import computed, limited

if TYPE_CHECKING:
    from kvtool.policies.evidence import AttentionRows
    from kvtool.policies.numbers import Count, State
    from kvtool.policies.parts import SlotView


@dataclass(frozen=True)
class KVzip(Score):
    """Keep what the model attends to when it repeats its prompt; then append.

    Args:
        sinks: first tokens that are always kept.
        chunk: tokens that are repeated at a time.
        layers: whether the KV heads of all layers compete for the budget (`joint`), or those of
            `each` layer.
        instruction: the text that asks the model to repeat; None: the words of its authors.
        plus: whether a weight counts by what its value adds to the hidden state (KVzip+).
    """

    sinks: int = limited(4, "0 or more")
    chunk: int = limited(2048, "1 or more")
    layers: Literal["joint", "each"] = "joint"
    instruction: str | None = computed("KVzip's words")
    plus: bool = False

    name: ClassVar = "kvzip"
    paper: ClassVar = "https://arxiv.org/abs/2505.23416"
    evidence: ClassVar = Evidence.REPETITION
    when: ClassVar = "prompt"

    @property
    def repetition(self) -> RepetitionAsked:
        return RepetitionAsked(self.chunk, self.sinks, self.instruction, by_output=self.plus)

    @property
    def unweighed(self) -> str | None:
        return self.name if self.plus else None

    @property
    def head_split(self) -> Joint:
        return Joint(self.layers)

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        return _repeated(view).weights

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor | None:
        return ~_repeated(view).tokens & (view.positions >= 0)

    def reserved(self, budget: int) -> Mapping[str, int]:
        return {"sinks": self.sinks}


def _repeated(view: SlotView) -> Repeated:
    if view.repeated is None:
        raise ValueError("this score has REPETITION as its evidence, and was given none")
    return view.repeated
