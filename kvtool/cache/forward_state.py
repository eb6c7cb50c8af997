"""What a cache knows of the forward, and of the prompt, that is running over it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from kvtool.cache.rope_lengths import RopeChoice
from kvtool.cache.steps.call import Placement
from kvtool.cache.storage.layer import SlotLayer
from kvtool.cache.text import FedTokens
from kvtool.errors import KvtoolError


class ForwardState:
    """The running forward.

    Attributes:
        masked: whether batch entries may have padding in it, as its mask would say.
        own_mask: whether its mask says of each query, or anew, which tokens it sees.
        in_generate: whether a `generate` runs it, which adds a token a forward to its text.
        fed: ids of forwards since the text was noted.
        placement: where it has placed its tokens; None: by their place in the text.
        logits_asked: its `logits_to_keep`.
        in_prompt: whether it is a part of a prompt that somebody has announced.
        prompt_lengths: tokens that each batch entry will have seen at the end of that prompt.
        last_block: whether it ends its prompt.
        rope: for which lengths of the text the factors of a RoPE were chosen.
    """

    def __init__(self) -> None:
        self.masked, self.own_mask, self.in_generate = True, False, False
        self.fed = FedTokens()
        self.rope = RopeChoice()
        self.placement: Placement | None = None
        self.logits_asked: int | Tensor = 0
        self.prompt_lengths: list[int] | None = None
        self.leave_prompt()

    def enter_prompt(self, lengths: list[int] | None) -> None:
        """Take the forwards that follow as blocks of a prompt."""
        self.in_prompt, self.prompt_lengths = True, lengths

    def leave_prompt(self) -> None:
        """Take the forwards that follow as prompts of their own, or as decoded tokens."""
        self.in_prompt, self.last_block = False, True
        self.prompt_lengths = None

    def note_text(self, tokens: int | None) -> None:
        """Say that so many tokens of the text have been noted; None: it is not known."""
        self.fed = FedTokens(tokens)

    def say_last(self, last: bool) -> None:
        """Say whether the next forward ends its prompt."""
        self.last_block = last

    def check_placed(self, layer: SlotLayer) -> None:
        """Refuse a forward that nobody has placed, over a layer that places tokens anew.

        Raises:
            KvtoolError: it is such a one.
        """
        if self.placement is None or not self.placement.follows(layer):
            raise KvtoolError(
                f"`{layer.policy}` numbers tokens by their place in the cache, "
                "and this forward has not asked for it",
                hint="call kvtool.attach(model) first, and pass the cache as past_key_values=cache",
            )

    def begin(self, *, masked: bool, own_mask: bool) -> None:
        """Take note of a forward that begins."""
        self.masked, self.own_mask = masked, own_mask

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Say that `generate` runs the forwards inside, and notes its text at its end."""
        self.in_generate = True
        try:
            yield
        finally:
            self.in_generate = False

    def note_rope(self, rope: RopeChoice) -> None:
        """Note for which lengths of the text the factors of a RoPE were chosen."""
        self.rope = rope

    def place(self, placement: Placement | None) -> None:
        """Say where the running forward has placed its tokens."""
        self.placement = placement

    def ask_logits(self, wanted: int | Tensor) -> None:
        """Note which logits the caller has asked for."""
        self.logits_asked = wanted

    def answer_logits(self) -> int | Tensor:
        """Return which logits the caller has asked for, once."""
        wanted, self.logits_asked = self.logits_asked, 0
        return wanted
